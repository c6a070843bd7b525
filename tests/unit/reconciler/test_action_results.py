"""What the reconciler does after an act: results, journal, restarts."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.testbed.proven import Texts
from tests.unit.reconciler.actions_bench import JSON, LOST, REFUSED, WALL, Bench, decision, journal_entry, later

from gpu_exporter.reconciler.actions.acts import UNCONFIRMED_S
from gpu_exporter.reconciler.actions.freed import FREED_S
from gpu_exporter.reconciler.actions.journal import CONFIRM_S, ENTRIES_MAX, KEY, Journal, parse, render
from gpu_exporter.reconciler.actor import DONE, ENDING, GONE, NOT_DONE, UNCLEAR, Ended, Entry
from gpu_exporter.reconciler.marks import MarkError, Refused


@pytest.mark.parametrize(
    ("result", "sights", "done", "told"),
    [
        (LOST, [DONE], [("suspend", "done")], 1),
        (LOST, [NOT_DONE], [], 0),
        (MarkError("error", "504: it did not complete in time", status=504), [DONE], [("suspend", "done")], 1),
        (MarkError("error", "403", status=403), [], [("suspend", "error")], 0),
        (LOST, [GONE], [("suspend", "replaced")], 0),
        (REFUSED, [], [("suspend", "conflict")], 0),
        (Refused("changed", "meanwhile"), [], [("suspend", "refused")], 0),
        (None, [NOT_DONE], [], 0),
        (None, [UNCLEAR], [], 0),
    ],
)
def test_the_result_of_an_act_is_what_the_live_object_shows(
    result: Exception | None, sights: list[str], done: list[tuple[str, str]], told: int
) -> None:
    bench = Bench()
    bench.result, bench.sights = result, list(sights)
    assert bench.run(decision())[0] == done
    assert len(bench.told) == told == len(bench.record.acts)
    assert len(bench.entries()) == 1


def test_an_act_whose_effect_is_not_visible_yet_is_pending_and_has_not_failed() -> None:
    bench = Bench()
    bench.sights = [UNCLEAR] * 3
    assert bench.run(decision()) == ([], [])
    for seconds in (CONFIRM_S, UNCONFIRMED_S - CONFIRM_S - 1.0):
        bench.clock.advance(seconds)
        assert bench.run(later(bench, decision())) == ([], ["pending"])
    bench.target = {"note": bench.entries()[0].note}
    assert bench.run(later(bench, decision())) == ([("suspend", "done")], ["acted"])


def test_an_act_whose_effect_never_becomes_visible_is_unconfirmed() -> None:
    bench = Bench()
    bench.sights = [UNCLEAR] * 3
    assert bench.run(decision()) == ([], [])
    bench.clock.advance(UNCONFIRMED_S)
    assert bench.run()[0] == [("suspend", "unconfirmed")]


@pytest.mark.parametrize("told", ["", ENDING])
def test_an_act_of_a_scheduler_that_the_next_process_is_not_set_up_for_is_unconfirmed(told: str) -> None:
    bench = Bench()
    entry = journal_entry(0, told=told, until_wall=WALL + UNCONFIRMED_S)._replace(scheduler="slurm")
    bench.texts.kept[KEY] = render([entry])
    assert bench.run() == ([], []) and bench.entries()[0].is_open
    bench.clock.advance(UNCONFIRMED_S)
    assert bench.run()[0] == [("suspend", "unconfirmed")]
    assert not bench.entries()[0].is_open


@pytest.mark.parametrize(
    ("sights", "result", "told"),
    [([DONE], "done", 1), ([NOT_DONE], "error", 0), ([GONE], "replaced", 0)],
)
def test_an_act_whose_answer_was_lost_is_completed_by_a_later_cycle(sights: list[str], result: str, told: int) -> None:
    """Here the later cycle runs in another process, which knows the act only from the journal."""
    bench = Bench()
    bench.result, bench.sights = LOST, [NOT_DONE]
    bench.run(decision())
    bench.restart()
    bench.clock.advance(CONFIRM_S - 1.0)
    bench.sights = [NOT_DONE]
    assert bench.run(later(bench, decision())) == ([], ["pending"]), "the request may still arrive"
    bench.clock.advance(1.0)
    bench.sights = list(sights)
    assert bench.run()[0] == [("suspend", result)]
    assert len(bench.told) == told
    assert bench.run()[0] == [] and len(bench.told) == told, "once"
    assert len(bench.acted) == 1


def test_after_a_restart_freed_gpus_count_by_their_age_and_failed_acts_do_not_count() -> None:
    for age_s, result, may_act in ((60.0, None, False), (FREED_S, None, True), (60.0, REFUSED, True)):
        bench = Bench(hour_max=16)
        bench.waiting = {"pool": 1.0}
        bench.result = result
        bench.run(decision())
        bench.result = None
        bench.clock.advance(age_s)
        bench.restart()
        done, held = bench.run(later(bench, decision("b", "batch/v1/Job/b")))
        assert (done, held) == (([("suspend", "done")], []) if may_act else ([], ["no_demand"])), (age_s, result)


def test_an_owner_who_could_not_be_told_is_told_by_a_later_cycle(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.untold = [LOST, LOST]
    assert bench.run(decision())[0] == []
    done = "suspend: the action is done, but its owner could not be notified: "
    assert [done in line and line.endswith("; the next cycle retries") for line in caplog.messages] == [True]
    assert bench.run()[0] == [] and bench.told == []
    assert bench.run() == ([("suspend", "done")], [])
    assert (bench.told, len(bench.record.acts)) == (["batch/v1/Job/train"], 1)
    bench.untold = [LOST] * 100
    bench.run(decision("b", "batch/v1/Job/b"))
    bench.clock.advance(UNCONFIRMED_S)
    caplog.clear()
    assert bench.run()[0] == [("suspend", "unconfirmed")]
    unconfirmed = (
        "batch/v1/Job/b in ml: suspend: unconfirmed: the action is done, but its owner could not be notified: "
    )
    assert caplog.messages[0].startswith(unconfirmed)


def test_an_object_that_cannot_be_read_after_an_act_leaves_the_result_unknown(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.look = lambda _entry: (_ for _ in ()).throw(LOST)  # type: ignore[attr-defined, method-assign]
    assert bench.run(decision())[0] == []
    unread = "suspend: the object cannot be read, so the result is unknown: "
    assert [unread in line and line.endswith("; the next cycle retries") for line in caplog.messages] == [True]


def test_no_act_begins_that_cannot_be_written_into_the_journal() -> None:
    bench = Bench()
    bench.texts.kept[KEY] = "garbage"
    assert bench.run(decision()) == ([], ["journal"])
    bench.texts.kept = {}
    bench.texts.write_text = lambda key, text: bench._fail()  # type: ignore[method-assign, attr-defined]
    bench._fail = lambda: (_ for _ in ()).throw(MarkError("fenced", "the Lease is lost"))  # type: ignore[attr-defined]
    assert bench.run(decision()) == ([], ["fenced"])
    assert bench.acted == []


def test_a_note_on_the_target_that_is_not_in_the_journal_is_an_opt_out() -> None:
    bench = Bench()
    bench.run(decision())
    (entry,) = bench.entries()
    bench.target = {"note": entry.note}
    assert bench.run(decision()) == ([], ["acted"])
    bench.target = {"note": "suspend 2027-01-01T00:00:00Z by hand"}
    assert bench.run(decision()) == ([], ["noted"])


def test_targets_that_owners_resume_are_counted_in_the_record() -> None:
    bench = Bench()
    bench.run(decision())
    (entry,) = bench.record.acts
    for sight, resumed, gone in ((DONE, 0, 0), (NOT_DONE, 1, 0), (GONE, 1, 1)):
        bench.record.due, bench.sights = [entry], [sight]
        bench.run()
        assert (len(bench.record.resumed), len(bench.record.gone)) == (resumed, gone)


def test_the_journal_keeps_the_last_entries_and_never_drops_an_entry_without_a_result() -> None:
    texts = Texts()
    journal = Journal(texts)
    for number in range(ENTRIES_MAX + 3):
        journal.begin(journal_entry(number))
        if number:
            journal.complete(f"{number:08x}", "done")
    assert [entry.ident for entry in journal.read()][:2] == ["00000000", "00000004"]
    assert len(journal.read()) == ENTRIES_MAX
    texts = Texts()
    journal = Journal(texts)
    for number in range(ENTRIES_MAX):
        journal.begin(journal_entry(number))
    with pytest.raises(MarkError, match="their results are not known"):
        journal.begin(journal_entry(99))
    assert len(texts.kept[KEY]) < 16_000


TEXT = st.text(max_size=9)


@given(
    st.lists(
        st.builds(
            journal_entry,
            st.integers(0, 10**9),
            gpus=st.integers(0, 64),
            told=TEXT,
            until_wall=st.floats(0, 1e10),
            undo=st.text(max_size=40),
            ends=st.lists(st.builds(Ended, TEXT, TEXT, st.lists(TEXT, max_size=2).map(tuple)), max_size=3).map(tuple),
            waited_for=st.lists(st.tuples(st.text(max_size=5), st.floats(0, 1e6)), max_size=2).map(tuple),
        ),
        max_size=5,
    )
)
def test_the_journal_is_read_as_it_was_written(entries: list[Entry]) -> None:
    assert parse(render(entries)) == tuple(entries)


@given(st.text() | JSON.map(json.dumps) | JSON.map(lambda each: json.dumps({"v": 1, "entries": each})))
def test_any_text_is_either_a_journal_or_a_clear_error(text: str) -> None:
    try:
        entries = parse(text)
    except MarkError as exc:
        assert exc.result == "journal"
    else:
        assert all(isinstance(entry, Entry) for entry in entries)
