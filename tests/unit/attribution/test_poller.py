"""What the poller remembers of a source that does not answer."""

from __future__ import annotations

import locale
import logging
import queue
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from gpu_exporter.agent.attribution.poller import GRANTS_MAX, Poller
from gpu_exporter.agent.attribution.source import Answer, SourceError
from gpu_exporter.agent.attribution.static import CallbackSource, StaticSource, parse_static, static_holder
from gpu_exporter.common.clock import ManualClock
from gpu_exporter.common.model.holders import Grant, Holder, HolderKey, SourceStatus

GRANT = Grant("uuid", "GPU-0", Holder(HolderKey("slurm", "7"), job_id="7", source="slurm"))


class Scripted:
    """A source that answers or fails as the test says. `whole`: an answer with more than grants."""

    name = "slurm"

    def __init__(self) -> None:
        self.answer: Sequence[Grant] | None = None
        self.whole: Answer | None = None

    def poll(self) -> Answer:
        if self.whole is not None:
            return self.whole
        if self.answer is None:
            raise SourceError("controller is away")
        return Answer(self.answer)


def named(source: str, answer: Answer) -> Scripted:
    """A source that always gives the same answer."""
    script = Scripted()
    script.name, script.whole = source, answer
    return script


def make() -> tuple[ManualClock, Scripted, Poller]:
    clock, script = ManualClock(), Scripted()
    return clock, script, Poller([script], clock, keep_last_s=300.0)


def test_the_last_mapping_remains_for_a_limited_time_with_the_time_of_its_answer() -> None:
    clock, script, poller = make()
    script.answer = [GRANT]
    answered = clock.wall()
    (grant,) = poller.poll()
    confirmed = grant.confirmed
    assert (grant.device, grant.holder.key, confirmed) == (GRANT.device, GRANT.holder.key, clock.monotonic())
    script.answer = None
    clock.advance(300)
    assert [entry.confirmed for entry in poller.poll()] == [confirmed]
    (status,) = poller.statuses()
    assert status == SourceStatus("slurm", False, False, answered, error="controller is away")
    assert poller.is_known()
    clock.advance(0.1)
    assert poller.poll() == []
    assert not poller.is_known()


def test_a_grant_is_as_old_as_its_source_reports_and_remains_until_its_renewal_is_due() -> None:
    clock, script, poller = make()
    old = clock.monotonic() - 250.0
    script.answer = [GRANT, GRANT._replace(confirmed=old), GRANT._replace(confirmed=old, renewed_s=400.0)]
    assert [grant.confirmed for grant in poller.poll()] == [clock.monotonic(), old, old]
    clock.advance(60.0)
    assert [grant.confirmed for grant in poller.poll()] == [clock.monotonic(), old]
    clock.advance(91.0)
    assert [grant.confirmed for grant in poller.poll()] == [clock.monotonic()]


def test_an_error_of_the_exporter_in_a_source_is_an_outage_of_that_source_only() -> None:
    clock = ManualClock()

    def broken() -> Sequence[Grant]:
        raise ZeroDivisionError("a bug")

    poller = Poller([CallbackSource("a", broken), CallbackSource("b", lambda: [GRANT])], clock, 300.0)
    assert len(poller.poll()) == 1
    a, b = poller.statuses()
    assert (a.up, a.error) == (
        False,
        "internal error (ZeroDivisionError: a bug): report it with the traceback in the log",
    )
    assert b.up


def test_an_answer_with_a_problem_counts_but_proves_no_gpu_free() -> None:
    class Puzzling:
        name = "slurm"

        def poll(self) -> Answer:
            return Answer([GRANT], "job 9: not parsed")

    poller = Poller([Puzzling()], ManualClock(), 300.0)
    assert len(poller.poll()) == 1
    assert not poller.is_known()
    assert poller.statuses()[0].error == "job 9: not parsed"


def test_a_partial_or_remembered_answer_is_reported_with_its_age() -> None:
    clock, script, poller = make()
    expected = [
        (Answer([GRANT]), (True, True, 0.0)),
        (Answer([GRANT], notice="users are hidden"), (True, True, 0.0)),
        (Answer([GRANT], is_late=True), (True, True, 0.0)),  # on a busy cluster some job has always just started
        (Answer([GRANT], "job 9: not parsed"), (True, False, 0.0)),
        (Answer([GRANT], as_of=clock.monotonic() - 90.0), (True, True, 90.0)),
        (Answer([GRANT], "slurmctld is away", as_of=clock.monotonic() - 400.0, is_old=True), (False, False, 400.0)),
    ]
    for script.whole, said in expected:
        poller.poll()
        (status,) = poller.statuses()
        assert status.last_success_wall is not None
        assert (status.up, status.complete, clock.wall() - status.last_success_wall) == pytest.approx(said)
    script.whole = Answer([GRANT])
    poller.poll()
    poller.note_resolution([], [(GRANT, "no GPU has this minor number")])
    assert [(status.up, status.complete) for status in poller.statuses()] == [(True, False)]
    poller.note_resolution([], [], [(GRANT, "it may only watch")])
    assert [(status.up, status.complete) for status in poller.statuses()] == [(True, True)]


def test_before_the_first_answer_holders_are_unknown() -> None:
    _, _, poller = make()
    assert poller.poll() == []
    (status,) = poller.statuses()
    assert (status.up, status.last_success_wall) == (False, None)
    assert not poller.is_known()


def test_without_sources_holders_are_unknown_too() -> None:
    assert not Poller([], ManualClock(), 300.0).is_known()


def test_conflicts_count_for_the_source_of_lower_precedence() -> None:
    _, script, poller = make()
    script.answer = []
    poller.poll()
    poller.note_resolution([GRANT, GRANT], [])
    assert poller.statuses()[0].conflicts == 2
    script.whole = Answer([], conflicts=3)
    poller.poll()
    assert poller.statuses()[0].conflicts == 5


def test_a_grant_without_a_device_is_reported_with_its_reason_until_it_has_one() -> None:
    _, script, poller = make()
    script.answer = [GRANT]
    poller.poll()
    holder = GRANT.holder
    many = [(GRANT._replace(number=f"IDX {i}"), "positions are not proven") for i in range(5)]
    poller.note_resolution([], many)
    assert poller.statuses()[0].error == (
        f"{holder.label}: IDX 0 is not resolved: positions are not proven; "
        f"{holder.label}: IDX 1 is not resolved: positions are not proven; "
        f"{holder.label}: IDX 2 is not resolved: positions are not proven; 2 more"
    )
    poller.note_resolution([], [])
    assert poller.statuses()[0].error == ""


def test_a_grant_without_a_device_is_reported_once_and_for_its_own_source() -> None:
    other = GRANT._replace(holder=GRANT.holder._replace(source="kubelet"))
    poller = Poller(
        [named("slurm", Answer([GRANT], "no gres.conf")), named("kubelet", Answer([other]))], ManualClock(), 9.0
    )
    poller.poll()
    poller.note_resolution([], [(GRANT, "no gres.conf"), (GRANT, ""), (other, "no such GPU"), (other, "")])
    text = f"{other.holder.label}: GPU-0 is not resolved: no such GPU"
    assert [status.error for status in poller.statuses()] == ["no gres.conf", text]


def test_each_change_is_logged_once_for_its_source(caplog: pytest.LogCaptureFixture) -> None:
    _, script, poller = make()

    def log_of(polls: int, unresolved: Sequence[tuple[Grant, str]] = ()) -> list[str]:
        caplog.clear()
        for _ in range(polls):
            poller.poll()
            poller.note_resolution([], unresolved)
        return caplog.messages

    with caplog.at_level(logging.INFO):
        assert log_of(3) == ["attribution slurm: controller is away"]
        script.whole = Answer([GRANT])
        assert log_of(3) == ["attribution slurm: answers again"]
        script.whole = Answer([GRANT], "job 9: not parsed", "IDX 2 is hidden")
        assert log_of(3) == ["attribution slurm: job 9: not parsed", "attribution slurm: IDX 2 is hidden"]
        script.whole = Answer([GRANT])
        assert log_of(3) == ["attribution slurm: answers again"]
        unresolved = f"{GRANT.holder.label}: GPU-0 is not resolved: no such GPU"
        assert log_of(3, [(GRANT, "no such GPU")]) == [f"attribution slurm: {unresolved}"]
        assert log_of(3) == ["attribution slurm: every device is resolved and certain again"]

        def fail() -> Answer:
            raise ZeroDivisionError("a bug")

        script.poll = fail  # type: ignore[method-assign]
        assert log_of(3) == [
            "attribution slurm: internal error (ZeroDivisionError: a bug): report it with the traceback in the log"
        ]
        (line,) = caplog.records
        assert line.exc_info is not None, "the traceback is in the log"


def test_a_slow_source_delays_no_other_and_its_answer_is_dated_by_the_question() -> None:
    clock, answers = ManualClock(), queue.SimpleQueue[list[Grant]]()

    def slow() -> Sequence[Grant]:
        return answers.get(timeout=20)

    other = Grant("uuid", "GPU-1", GRANT.holder)
    sources = [CallbackSource("slow", slow), CallbackSource("quick", lambda: [other])]
    poller = Poller(sources, clock, 300.0, patience_s=0.05)
    asked = clock.monotonic()
    for error in ("", "has not answered for more than one poll"):
        assert [entry.device for entry in poller.poll()] == ["GPU-1"]
        assert [status.error for status in poller.statuses()] == [error, ""]
        assert not poller.is_known()
        clock.advance(5.0)
    answers.put([GRANT])
    thread = poller._memory["slow"].question._thread  # type: ignore[union-attr]
    assert thread.daemon  # the end of the program waits for no source
    thread.join()
    found = {entry.device: entry.confirmed for entry in poller.poll()}
    assert found == {"GPU-0": asked, "GPU-1": asked + 10.0}
    assert poller.is_known()
    answers.put([])  # answers the question of this poll


def test_the_poller_waits_for_an_answer_within_the_patience() -> None:
    answers = queue.SimpleQueue[list[Grant]]()
    poller = Poller([CallbackSource("a", lambda: answers.get(timeout=20))], ManualClock(), 300.0, patience_s=20.0)
    threading.Timer(0.1, answers.put, [[GRANT]]).start()
    assert [entry.device for entry in poller.poll()] == [GRANT.device]


def test_an_answer_with_too_many_grants_is_ignored_and_the_last_answer_remains() -> None:
    _, script, poller = make()
    script.answer = [GRANT]
    poller.poll()
    script.answer = [GRANT] * (GRANTS_MAX + 1)
    assert [entry._replace(confirmed=0.0) for entry in poller.poll()] == [GRANT]
    script.answer = [GRANT] * GRANTS_MAX
    assert len(poller.poll()) == GRANTS_MAX
    script.answer = [GRANT] * (GRANTS_MAX + 1)
    poller.poll()
    (status,) = poller.statuses()
    assert (status.up, status.error) == (False, "4097 held devices are more than 4096, so all of them are ignored")


def test_a_node_is_closed_only_while_its_scheduler_answers_and_its_gpus_remain_counted() -> None:
    _, script, poller = make()
    script.whole = Answer([], closed="drained", closed_reason="bad fan", counted=4)
    poller.poll()
    (status,) = poller.statuses()
    assert status.say_closed() == "slurm has closed this node: drained (bad fan)"
    script.whole = None
    poller.poll()
    (status,) = poller.statuses()
    assert (status.closed, status.say_closed()) == ("", "")
    assert poller.counted() == (("slurm", 4),)


def test_replicas_of_one_gpu_are_counted_once() -> None:
    _, script, poller = make()
    holder = GRANT.holder
    script.whole = Answer([], offers=[Grant("uuid", f"GPU-{gpu}::{part}", holder) for gpu in "ab" for part in range(9)])
    poller.poll()
    assert poller.counted() == (("slurm", 2),)


def test_a_notice_is_not_a_problem() -> None:
    _, script, poller = make()
    script.whole = Answer([GRANT], notice="IDX 2 in use by jobs that squeue does not list")
    poller.poll()
    (status,) = poller.statuses()
    assert (status.up, status.error, status.notice) == (True, "", "IDX 2 in use by jobs that squeue does not list")
    assert poller.is_known()


PLAIN = Holder(HolderKey("slurm", "7"), job_id="7", source="static", identity="name")
PERSON = {"user": "ada", "account": "phys", "partition": "gpu"}
IN_A = Holder(
    HolderKey("kubernetes", "ml/a/main"),
    namespace="ml",
    pod="a",
    container="main",
    source="static",
    identity="name",
    units=1,
)


@pytest.mark.parametrize(
    ("text", "holders"),
    [
        ("- {uuid: GPU-0, pod: ml/a/main}", [IN_A]),
        ("- {uuid: GPU-0, pod: ml/a/main, gpus: 4}", [IN_A._replace(units=4)]),
        ("- {uuid: GPU-0, pod: ml/a/main}\n- {uuid: GPU-1, pod: ml/a/main}", [IN_A._replace(units=2)] * 2),
        ("- {uuid: GPU-0, pod: ml/a/main, user: ada, account: phys, partition: gpu}", [IN_A._replace(**PERSON)]),
        ("- {uuid: GPU-0, job: 7}", [PLAIN]),  # the job's size is unknown: it may have GPUs on other nodes
        ("- {uuid: GPU-0, job: 7, gpus: 1}", [PLAIN._replace(units=1)]),
        ("- {uuid: GPU-0, job: 7, user: ada, account: phys, partition: gpu}", [PLAIN._replace(**PERSON)]),
        ("- {uuid: GPU-0, job: 7}\n- uuid: GPU-1\n  job: 7\n", [PLAIN, PLAIN]),
        ("[]", []),
    ],
)
def test_holders_are_read_from_a_static_file(tmp_path: Path, text: str, holders: list[Holder]) -> None:
    path = tmp_path / "holders.yaml"
    path.write_text(text, encoding="utf-8")
    assert StaticSource(path, settled_s=0.0).poll().grants == [
        Grant("uuid", f"GPU-{position}", holder) for position, holder in enumerate(holders)
    ]


@pytest.mark.parametrize("texts", [{"job": "7"}, {"pod": "ml/a/main"}])
def test_missing_texts_of_a_static_holder_are_empty(texts: dict[str, str]) -> None:
    expected = PLAIN if "job" in texts else IN_A._replace(units=None)
    assert static_holder(texts, "static", "name") == expected
    assert static_holder(texts, "scenario", "") == expected._replace(source="scenario", identity="")


@pytest.fixture
def plain_locale() -> Iterator[None]:
    """The locale of a unit that sets no locale: text files are ASCII. It has no effect in Python's UTF-8 mode."""
    before = locale.setlocale(locale.LC_CTYPE)
    locale.setlocale(locale.LC_CTYPE, "C")
    yield
    locale.setlocale(locale.LC_CTYPE, before)


@pytest.mark.usefixtures("plain_locale")
def test_a_static_file_is_utf_8_in_every_locale(tmp_path: Path) -> None:
    path = tmp_path / "holders.yaml"
    path.write_text("- {uuid: GPU-0, job: 7, user: żaneta}", encoding="utf-8")
    assert [grant.holder.user for grant in StaticSource(path, settled_s=0.0).poll().grants] == ["żaneta"]


@pytest.mark.parametrize(
    ("data", "error"),
    [
        ({"a": 1}, "expected a list of entries, not dict"),
        (["GPU-0"], "[0]: expected a mapping, not str"),
        ([{"uuid": "GPU-0"}], "[0]: needs uuid and exactly one of pod and job"),
        ([{"uuid": "GPU-0", "job": 1, "gpuu": 2}], "[0]: 'gpuu': unknown key, did you mean gpus?"),
        ([{"uuid": "GPU-0", "job": 1, "gpus": 0}], "[0]: gpus: expected a whole number above 0, not 0"),
        ([{"uuid": "GPU-0", "job": 1, "gpus": "4"}], "[0]: gpus: expected a whole number above 0, not '4'"),
        ([{"uuid": "GPU-0", "job": 7, "user": ["ada"]}], "[0]: user: expected a string, not list"),
        ([{"uuid": "GPU-0", "pod": "train"}], "pod: expected namespace/pod/container, not 'train'"),
    ],
)
def test_the_error_of_a_static_file_names_the_fault(data: object, error: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_static(data)
    assert str(caught.value) == error


def test_a_static_file_that_would_take_all_memory_is_refused(tmp_path) -> None:
    path = tmp_path / "holders.yaml"
    path.write_text("[" * 5000 + "]" * 5000, encoding="utf-8")
    with pytest.raises(SourceError, match="holders.yaml: the file is nested too deeply; it must be a list of entries"):
        StaticSource(path, settled_s=0.0).poll()
    doubled = "".join(f"- &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 20))
    path.write_text(f"- &a0 [x]\n{doubled}- {{uuid: GPU-0, job: *a19}}\n", encoding="utf-8")
    with pytest.raises(SourceError, match=r"\[0\]: expected a mapping, not list"):
        StaticSource(path, settled_s=0.0).poll()


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", r"empty: write \[\]"),
        ("# nobody\n", "expected a list"),
        ("- uuid: GPU-0\n  job: 4", "last line is incomplete"),
    ],
)
def test_a_static_file_that_a_full_disk_has_cut_shows_no_gpu_as_free(tmp_path: Path, text: str, error: str) -> None:
    path = tmp_path / "holders.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SourceError, match=error):
        StaticSource(path, settled_s=0.0).poll()


def test_a_change_of_a_static_file_counts_once_two_polls_have_found_the_same(tmp_path: Path) -> None:
    """Between its two polls, a program writes the file in place, and not all at once."""
    path = tmp_path / "holders.yaml"
    whole = "- {uuid: GPU-0, job: 7}\n- {uuid: GPU-1, job: 8}\n"
    path.write_text(whole, encoding="utf-8")
    source = StaticSource(path, settled_s=0.0)

    def jobs() -> list[str]:
        return [grant.holder.job_id for grant in source.poll().grants]

    assert jobs() == ["7", "8"]
    path.write_text("- {uuid: GPU-0, job: 9}\n", encoding="utf-8")
    assert jobs() == ["7", "8"]
    path.write_text("- {uuid: GPU-0, job: 9}\n- {uuid: GPU-1, job: 8}\n", encoding="utf-8")
    assert [jobs(), jobs()] == [["7", "8"], ["9", "8"]]
    path.write_text("", encoding="utf-8")
    assert jobs() == ["9", "8"]
    for _ in range(2):
        with pytest.raises(SourceError, match="the file is empty"):
            source.poll()
    path.write_text(whole, encoding="utf-8")
    with pytest.raises(SourceError, match="the file is being written"):
        source.poll()
    assert jobs() == ["7", "8"]


def test_a_static_file_that_was_just_changed_is_looked_at_twice_at_the_first_poll(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "holders.yaml"
    path.write_text("- {uuid: GPU-0, job: 7}\n", encoding="utf-8")
    more = iter(["- {uuid: GPU-1, job: 8}\n", ""])

    def write_more(_: float) -> None:
        with path.open("a", encoding="utf-8") as file:
            file.write(next(more))

    monkeypatch.setattr("gpu_exporter.agent.attribution.static.time.sleep", write_more)
    source = StaticSource(path, settled_s=3600.0)
    with pytest.raises(SourceError, match="the file is being written"):
        source.poll()
    assert len(source.poll().grants) == 2
    assert len(StaticSource(path, settled_s=3600.0).poll().grants) == 2


def test_offers_are_known_while_every_source_reports_its_offers() -> None:
    clock = ManualClock()
    kubelet = named("kubelet", Answer([], offers=[GRANT]))
    poller = Poller([kubelet], clock, keep_last_s=300.0)
    assert poller.offers() is None
    poller.poll()
    assert poller.offers() == [GRANT]
    clock.advance(301)
    assert poller.offers() is None
    beside = Poller([kubelet, named("slurm", Answer([]))], clock, keep_last_s=300.0)
    beside.poll()
    assert beside.offers() is None, "a GPU that the kubelet does not offer may belong to Slurm"
    empty = named("kubelet", Answer([], "an odd device", offers=[GRANT]))
    partly = Poller([empty], clock, keep_last_s=300.0)
    partly.poll()
    assert partly.offers() is None


def test_no_gpu_is_free_while_a_source_does_not_know_the_devices_of_new_holders() -> None:
    source = named("slurm", Answer([GRANT], is_late=True))
    poller = Poller([source], ManualClock(), keep_last_s=300.0)
    poller.poll()
    assert not poller.is_known()
    assert [status.up for status in poller.statuses()] == [True], "the source has no fault"
    source.whole = Answer([GRANT])
    poller.poll()
    assert poller.is_known()


def test_answers_are_as_old_as_the_oldest_question() -> None:
    clock, script, first = make()
    assert first.asked() is None
    script.answer = []
    poller = Poller([script, named("kubelet", Answer([]))], clock, keep_last_s=300.0)
    poller.poll()
    asked, script.answer = clock.monotonic(), None
    clock.advance(5.0)
    poller.poll()
    assert (poller.has_all(), poller.asked()) == (True, asked)
