"""Limits, demand, turns and warnings of acts, with a scheduler in memory."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from tests.testbed.full_disk import size_limited
from tests.unit.reconciler.actions_bench import WALL, Bench, decision, journal_entry, later

from gpu_exporter.common.clock import ManualClock
from gpu_exporter.common.config.defaults import Policy
from gpu_exporter.common.config.rules import PolicyRule
from gpu_exporter.common.errors import AnswerError
from gpu_exporter.reconciler.actions import asking as asking_module
from gpu_exporter.reconciler.actions import warnings as warnings_module
from gpu_exporter.reconciler.actions.asking import PATIENCE_S
from gpu_exporter.reconciler.actions.freed import AGAIN_S, FREED_S, FreedGpus
from gpu_exporter.reconciler.actions.journal import (
    CONFIRM_S,
    HOUR_S,
    without_demand,
)
from gpu_exporter.reconciler.actions.limits import FAILED_S, TARGETS_MAX, WITHIN_S
from gpu_exporter.reconciler.actions.record import PolicyStanding
from gpu_exporter.reconciler.actions.warnings import UNSEEN_MAX_S
from gpu_exporter.reconciler.actor import DONE, ENDING, NOT_DONE
from gpu_exporter.reconciler.audit import AuditLog
from gpu_exporter.reconciler.decision.policy import Decision
from gpu_exporter.reconciler.decision.rulebook import Rulebook
from gpu_exporter.reconciler.decision.target import Skipped, Target
from gpu_exporter.reconciler.evidence.records import HolderName
from gpu_exporter.reconciler.marks import MarkError


def test_targets_that_are_held_after_every_read_do_not_block_others() -> None:
    bench = Bench()
    groups = [decision(f"p{at}", f"batch/v1/Job/j{at:02}") for at in range(TARGETS_MAX + 1)]
    read = bench.read

    def read_held(reference: Any, *what: Any) -> Target:
        found = read(reference, *what)
        return found if reference.name == f"j{TARGETS_MAX:02}" else found._replace(above="CronJob/x owns it")

    bench.read = read_held  # type: ignore[method-assign]
    bench.restart()
    assert bench.run(*groups) == ([], ["above"] * TARGETS_MAX + ["limit"])
    assert bench.run(*groups)[0] == [("suspend", "done")]


def test_a_source_that_fails_for_one_target_is_not_asked_about_the_next_targets() -> None:
    bench = Bench()
    groups = [decision(pod, f"batch/v1/Job/{pod}") for pod in "abc"]
    asked: list[Any] = []

    def fail(names: Collection[HolderName]) -> Any:
        asked.append(names)
        raise AnswerError("timed out")

    works = bench.read_host_work
    bench.read_host_work = fail  # type: ignore[method-assign]
    bench.restart()
    assert bench.run(*groups) == ([], ["proof"] * 3) and len(asked) == 1
    bench.read_host_work = works  # type: ignore[method-assign]
    assert bench.run(*groups) == ([], ["proof"] * 3), "the source is not asked again for a while"
    bench.clock.advance(PATIENCE_S)
    assert bench.run(*(later(bench, each) for each in groups))[0] == [("suspend", "done")] * 2


@pytest.mark.parametrize("has_namespace", [True, False])
def test_a_question_about_one_target_that_fails_delays_only_the_targets_of_its_owner(has_namespace: bool) -> None:
    """Many older targets of one owner have questions that are too large or too slow. Jobs have no namespace."""
    bench = Bench(cycle_max=9)

    def of(owner: str, at: int) -> Decision:
        each = decision(f"{owner}{at}", f"batch/v1/Job/{owner}{at}")
        name, who = each.name._replace(namespace=owner), each.owner
        if not has_namespace:
            name, who = each.name._replace(namespace=""), f"{owner}/shared-account"
        return each._replace(name=name, owner=who, idle_since_wall=WALL - 20_000 + at)

    hostile, others = [of("evil", at) for at in range(30)], [of("good", 40), of("fine", 41)]
    works, asked = bench.read_host_work, []

    def read(names: Collection[HolderName]) -> Any:
        asked.append(min(names).name)
        if asked[-1].startswith("evil"):
            raise AnswerError("no answer within 5 s")
        return works(names)

    bench.read_host_work = read  # type: ignore[method-assign]
    bench.restart()
    bench.run(*hostile, *others)
    assert asked == ["evil0", "good40", "fine41"]
    for _ in range(8):
        bench.clock.advance(PATIENCE_S / 8)
        bench.run(*(later(bench, each) for each in hostile))
    assert asked[3:] == ["evil1"], "the next one after a while"


def test_a_cycle_spends_at_most_a_minute_on_acts() -> None:
    bench = Bench(cycle_max=9)
    bench.read_s = WITHIN_S / 4 + 1.0
    done, held = bench.run(*(decision(pod, f"batch/v1/Job/{pod}") for pod in "abcd"))
    assert len(done) < 4 and held[-1] == "limit"


def test_a_policy_of_the_site_is_judged_by_its_own_record() -> None:
    bench = Bench()
    strict = decision(rule=PolicyRule("night"))
    assert bench.run(strict) == ([], ["shadow"])
    bench.record.answers["night", "batch"] = Skipped("regret", "too many")
    assert bench.run(strict) == ([], ["regret"])
    bench.record.answers["night", "batch"] = PolicyStanding(60.0, 0.0)
    assert bench.run(strict)[0] == [("suspend", "done")]


def test_an_override_replaces_the_record_and_ignored_demand_replaces_demand() -> None:
    bench = Bench(override="trial, A. Admin", demand="ignored")
    bench.record.answers, bench.waiting = {}, {}
    assert bench.run(decision())[0] == [("suspend", "done")]


def test_acts_are_limited_per_cycle_and_per_hour_and_failed_acts_count() -> None:
    bench = Bench(cycle_max=2, hour_max=3)
    bench.result = MarkError("error", "403", status=403)
    groups = [decision(pod, f"batch/v1/Job/{pod}") for pod in "abcd"]
    assert bench.run(*groups) == ([("suspend", "error")] * 2, ["limit"] * 2)
    bench.result = None
    assert bench.run(*groups) == ([("suspend", "done")], ["limit", "failed", "failed"]), (
        "targets that were not read before come first"
    )
    bench.clock.advance(3599.0)
    assert bench.run(*(later(bench, each) for each in groups))[0] == []
    bench.clock.advance(1.0)
    assert len(bench.run(*(later(bench, each) for each in groups))[0]) == 2


def test_restarts_do_not_reset_the_hourly_limit_of_acts() -> None:
    """Acts are counted in the journal."""
    bench = Bench(cycle_max=2, hour_max=3)
    groups = [decision(pod, f"batch/v1/Job/{pod}") for pod in "abcdefgh"]
    for _ in range(5):
        bench.restart()
        bench.run(*(later(bench, each) for each in groups))
        bench.clock.advance(60.0)
        groups = [each for each in groups if (each.around and each.around.group) not in bench.acted]
    assert len(bench.acted) == 3


def test_a_target_whose_act_failed_does_not_block_other_targets() -> None:
    bench = Bench(cycle_max=1, hour_max=16)
    first, second = (decision(pod, f"batch/v1/Job/{pod}") for pod in "ab")
    bench.result = MarkError("error", "403", status=403)
    assert bench.run(first, second) == ([("suspend", "error")], ["limit"])
    bench.result = None
    assert bench.run(first, second) == ([("suspend", "done")], ["failed"])
    bench.clock.advance(FAILED_S)
    assert bench.run(later(bench, first))[0] == [("suspend", "done")]


def test_freed_gpus_reduce_the_demand_also_after_a_restart() -> None:
    bench = Bench(hour_max=16)
    bench.waiting = {"pool": 1.0}
    first, second = (decision(pod, f"batch/v1/Job/{pod}") for pod in "ab")
    assert bench.run(first)[0] == [("suspend", "done")]
    assert bench.run(second) == ([], ["no_demand"])
    bench.restart()
    assert bench.run(second) == ([], ["no_demand"])
    bench.clock.advance(FREED_S - 1.0)
    assert bench.run(later(bench, second)) == ([], ["no_demand"]), "the pod that waits may never be scheduled"
    bench.waiting = {}
    assert bench.run(later(bench, second)) == ([], ["no_demand"])
    bench.clock.advance(1.0)
    bench.waiting = {"pool": 1.0}
    assert bench.run(later(bench, second))[0] == [("suspend", "done")]


def test_freed_gpus_no_longer_count_once_the_demand_has_fallen_by_as_many() -> None:
    bench = Bench(hour_max=16)
    bench.waiting = {"pool": 5.0}
    first, second = (decision(pod, f"batch/v1/Job/{pod}") for pod in "ab")
    assert bench.run(first)[0] == [("suspend", "done")]
    bench.waiting = {"pool": 1.0}
    assert bench.run(second)[0] == [("suspend", "done")]


def test_gpus_that_others_have_taken_over_do_not_count_when_the_demand_rises_again() -> None:
    bench = Bench(hour_max=16)
    first, second = ([decision(pod, f"batch/v1/Job/{pods}", members=pods) for pod in pods] for pods in ("abcd", "efgh"))
    bench.waiting = {"pool": 5.0}
    assert bench.run(*first)[0] == [("suspend", "done")]
    bench.waiting = {"pool": 1.0}
    assert bench.run(*second) == ([], ["no_demand"]), "it has more GPUs than are wanted"
    bench.waiting = {"pool": 5.0}
    assert bench.run(*second) == ([], ["no_demand"]), "an owner may have withdrawn a request and repeated it"
    bench.waiting = {"pool": 8.0}
    assert bench.run(*second)[0] == [("suspend", "done")], "four more"


def test_a_request_that_is_withdrawn_and_repeated_costs_its_gpus_once_an_hour() -> None:
    """One job of 8 GPUs cannot start, and its owner holds and releases it. A job of one GPU waits too."""
    clock, entries = ManualClock(wall=WALL), []
    freed = FreedGpus(clock)
    for minute in range(6 * 60):
        held = minute % 18 >= 16
        freed.follow(entries, clock.wall())
        freed.observe({"pool": 1.0 if held else 9.0})
        if not held and freed.wanted([{"pool": 9.0}], 8):
            entry = journal_entry(minute, gpus=8, waited_for=(("pool", 9.0),))
            entries.append(entry._replace(wall=clock.wall(), told=DONE))
        entries = [without_demand(entry, freed.used) for entry in entries]
        clock.advance(60.0)
    assert len(entries) == 6


def test_a_demand_that_rises_again_counts_after_an_hour() -> None:
    bench = Bench(hour_max=16)
    first, second = (decision(pod, f"batch/v1/Job/{pod}") for pod in "ab")
    for each in (first, second):
        bench.waiting = {"pool": 1.0}
        assert bench.run(later(bench, each))[0] == [("suspend", "done")]
        bench.waiting = {"pool": 0.0}
        assert bench.run() == ([], [])
        bench.waiting = {"pool": 1.0}
        bench.clock.advance(AGAIN_S - 1.0)
        assert bench.run(later(bench, second)) == ([], ["no_demand"])
        bench.clock.advance(1.0)


def test_a_fall_that_another_leader_has_seen_counts_here_too() -> None:
    clock = ManualClock(wall=WALL)
    for known in (DONE, ENDING):
        freed, entry = FreedGpus(clock), journal_entry(0, gpus=8, waited_for=(("pool", 8.0),), told=known)
        freed.follow([entry._replace(wall=clock.wall())], clock.wall())
        clock.advance(AGAIN_S)
        assert freed.wanted([{"pool": 8.0}], 8) == {}
        freed.follow([entry._replace(waited_for=(), told=DONE)], clock.wall())
        freed.observe({"pool": 8.0})
        assert freed.wanted([{"pool": 8.0}], 8) == {"pool": 8.0}, known


def test_an_action_that_the_journal_no_longer_has_is_forgotten_at_last() -> None:
    """Another leader has seen its end, and needed the room."""
    clock = ManualClock(wall=WALL)
    freed, entry = FreedGpus(clock), journal_entry(0, gpus=8, waited_for=(("pool", 8.0),), told=ENDING)
    freed.follow([entry], clock.wall())
    clock.advance(FREED_S - 1.0)
    for expected in ({}, {"pool": 8.0}):
        freed.follow([], clock.wall())
        freed.observe({"pool": 8.0})
        assert freed.wanted([{"pool": 8.0}], 8) == expected
        clock.advance(1.0)


def test_gpus_that_others_have_taken_over_do_not_count_for_the_next_process() -> None:
    bench = Bench(hour_max=16)
    first, second, third = (decision(pod, f"batch/v1/Job/{pod}") for pod in "abc")
    bench.waiting = {"pool": 2.0}
    assert bench.run(first)[0] == [("suspend", "done")]
    bench.waiting = {"pool": 1.0}
    bench.warned_s = 0.0
    assert bench.run(second) == ([], ["not_warned"])
    bench.warned_s = 7200.0
    bench.clock.advance(HOUR_S)
    bench.waiting = {"pool": 2.0}
    bench.restart()
    assert bench.run(later(bench, second), later(bench, third))[0] == [("suspend", "done")] * 2


def test_a_fall_of_the_demand_counts_for_one_action_also_after_another_is_unconfirmed() -> None:
    clock = ManualClock(wall=WALL)
    freed = FreedGpus(clock)
    one, two = (journal_entry(at, gpus=8, waited_for=(("pool", 24.0),)) for at in (1, 2))
    freed.follow([one, two], clock.wall())
    assert freed.wanted([{"pool": 24.0}], 8) == {"pool": 24.0} and freed.wanted([{"pool": 24.0}], 9) == {}
    freed.follow([one._replace(told="unconfirmed"), two._replace(told=DONE)], clock.wall())
    freed.observe({"pool": 16.0})
    assert freed.wanted([{"pool": 16.0}], 16) == {"pool": 16.0}
    freed = FreedGpus(clock)
    freed.follow([one._replace(told=DONE), two._replace(told=DONE)], clock.wall())
    for waiting, remain in ((24.0, 8), (20.0, 8), (16.0, 8), (8.0, 8)):  # each fall serves one of them
        freed.observe({"pool": waiting})
        assert freed.wanted([{"pool": waiting}], remain) and not freed.wanted([{"pool": waiting}], remain + 1), waiting


@pytest.mark.parametrize(
    ("meanwhile", "is_served"), [({"pool": 0.0}, True), ({}, False), ({"other": 0.0}, False), ({"pool": 1.0}, False)]
)
def test_a_demand_of_zero_has_fallen_and_an_unknown_one_has_not(meanwhile: dict[str, float], is_served: bool) -> None:
    """Nothing is proposed meanwhile."""
    bench = Bench(hour_max=16)
    first, second = (decision(pod, f"batch/v1/Job/{pod}") for pod in "ab")
    bench.waiting = {"pool": 1.0}
    assert bench.run(first)[0] == [("suspend", "done")]
    for _ in range(120):
        bench.clock.advance(30.0)
        bench.waiting = meanwhile
        assert bench.run() == ([], [])
    bench.waiting = {"pool": 1.0}
    assert bench.run(later(bench, second)) == (([("suspend", "done")], []) if is_served else ([], ["no_demand"]))


def test_demand_counts_only_for_a_pool_that_all_members_of_a_group_belong_to() -> None:
    bench = Bench()
    pair = [decision(pod, members="ab") for pod in "ab"]
    bench.pools = {pair[0].name: {"x": 4.0, "y": 4.0}, pair[1].name: {"y": 4.0}}
    assert bench.run(*pair)[0] == [("suspend", "done")]
    bench = Bench()
    bench.pools = {pair[0].name: {"x": 4.0}, pair[1].name: {"y": 4.0}}
    assert bench.run(*pair) == ([], ["no_demand"])


def test_class_and_policy_of_every_member_are_checked() -> None:
    pair = [decision("a", members="ab"), decision("b", kind="unclear", members="ab")]
    assert Bench().run(*pair) == ([], ["class"])
    pair[1] = decision("b", members="ab", rule=PolicyRule("night"))
    assert Bench().run(*pair) == ([], ["shadow"])


@pytest.mark.parametrize(
    ("shown", "said", "own", "acts"),
    [
        ("batch", "batch", "", True),
        ("unclear", "batch", "", False),  # the label of a member may only make the class more careful
        ("unclear", "batch", "batch", True),
        ("serving", "batch", "batch", True),
        ("batch", "batch", "serving", False),
        ("batch", "unclear", "batch", False),
    ],
)
def test_only_the_label_of_the_target_may_make_its_class_less_careful(
    shown: str, said: str, own: str, acts: bool
) -> None:
    bench = Bench()
    around = decision().around
    assert around is not None
    bench.target = {"kind": own}
    one = decision()._replace(around=around._replace(kind=said, shown=shown))
    assert bool(bench.run(one)[0]) is acts


def test_a_warning_counts_only_while_this_process_has_seen_it_without_a_gap() -> None:
    bench = Bench(warned_for=600.0)
    bench.has_watched = False

    def look(after_s: float) -> tuple[list[tuple[str, str]], list[str]]:
        bench.clock.advance(after_s)
        return bench.run(later(bench, decision()))

    assert look(0.0) == look(170.0) == ([], ["not_warned"]), (
        "by its start the alert is two hours old, but a silence may have ended just now"
    )
    bench.unwarned = True
    assert look(10.0) == ([], ["not_warned"])
    bench.unwarned = False
    for after_s in (10.0, 150.0, 150.0, 150.0, 149.0):
        assert look(after_s) == ([], ["not_warned"]), "after a short silence the timer starts again"
    assert look(1.0)[0] == [("suspend", "done")]
    assert look(UNSEEN_MAX_S + 1.0) == ([], ["not_warned"]), "no check for too long"


def test_a_warning_counts_between_two_checks_of_a_holder_that_are_far_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking_module, "ASKED_MAX", 1)
    monkeypatch.setattr(warnings_module, "UNSEEN_MAX_S", 1.0)
    bench = Bench(warned_for=3600.0, cycle_max=9, hour_max=16)
    bench.has_watched = False
    crowd = [decision(pod, f"batch/v1/Job/{pod}") for pod in "abc"]
    for _ in range(45):
        bench.clock.advance(100.0)  # so every holder is checked once in five minutes
        bench.run(*(later(bench, each) for each in crowd))
        if bench.clock.wall() - WALL < 3600.0:
            assert bench.acted == []
    assert len(set(bench.acted)) == 3


def test_warnings_do_not_count_while_the_process_was_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking_module, "ASKED_MAX", 1)
    bench = Bench(warned_for=3600.0)
    bench.has_watched = False
    crowd = [decision(pod, f"batch/v1/Job/{pod}") for pod in "ab"]
    for after_s in (0.0, 30.0, 3600.0, 30.0):
        bench.clock.advance(after_s)
        held = bench.run(*(later(bench, each) for each in crowd))[1]
        assert (held, bench.acted) == (["not_warned"], [])


def test_no_act_while_the_audit_log_cannot_be_written(tmp_path: Path) -> None:
    bench = Bench()
    path = tmp_path / "audit.jsonl"
    bench.audit = AuditLog(path, Rulebook(Policy()), bench.clock, lambda: None)
    bench.restart()
    path.unlink()
    path.mkdir()
    assert bench.run(decision()) == ([], ["audit"])
    assert bench.entries() == ()
    path.rmdir()
    assert bench.run(decision())[0] == [("suspend", "done")]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["result"] for line in lines] == ["begins", "done"]
    assert lines[0]["id"] == lines[1]["id"] and lines[0]["name"] == lines[1]["name"] == "a"


def test_no_act_where_only_a_part_of_its_audit_line_was_written(tmp_path: Path) -> None:
    bench = Bench()
    path = tmp_path / "audit.jsonl"
    bench.audit = AuditLog(path, Rulebook(Policy()), bench.clock, lambda: None)
    bench.restart()
    with size_limited(100):
        assert bench.run(decision()) == ([], ["audit"])
    assert (path.stat().st_size, bench.entries()) == (100, ())
    assert bench.run(decision())[0] == [("suspend", "done")]
    torn, *lines = path.read_text().splitlines()
    assert [json.loads(line)["result"] for line in lines] == ["begins", "done"] and len(torn) == 100


def test_mode_shadow_counts_one_name_in_several_namespaces_separately_and_keeps_the_limits() -> None:
    bench = Bench(hour_max=3)
    bench.settings = bench.settings._replace(mode="shadow")
    bench.restart()
    crowd = [decision(f"p{n}")._replace(name=HolderName("kubernetes", f"team-{n}", "p")) for n in range(4)]
    counted = [len(bench.run(*crowd)[0]) for _ in range(4)]
    assert sum(counted) == 3 and bench.acted == [] and bench.texts.kept == {}


def test_a_large_site_is_checked_in_turns_and_every_holder_gets_its_turn() -> None:
    bench = Bench(cycle_max=1000, hour_max=16)
    bench.waiting = {"pool": 1e6}
    crowd = [decision(f"p{number}", f"batch/v1/Job/{number}") for number in range(250)]
    asked: set[str] = set()
    for _ in range(30):
        bench.was_read.clear()
        bench.run(*(later(bench, each) for each in crowd))
        assert (bench.asked_about, len(bench.was_read)) == (100, TARGETS_MAX), "of 250"
        asked |= set(bench.acted)
        crowd = [each for each in crowd if (each.around and each.around.group) not in asked]
        crowd += [decision(f"q{len(asked)}-{n}", f"batch/v1/Job/{len(asked)}-{n}") for n in range(250 - len(crowd))]
        bench.clock.advance(3600.0)
    assert len(asked) >= 250


def test_a_source_of_proofs_that_fails_is_not_asked_again_for_a_while() -> None:
    bench = Bench()
    bench.trouble = "Alertmanager is slow"
    assert bench.run(decision()) == bench.run(decision()) == ([], ["proof"])
    assert bench.asked == 1
    bench.trouble = ""
    bench.clock.advance(PATIENCE_S)
    assert bench.run(later(bench, decision()))[0] == [("suspend", "done")]


def test_an_unforeseen_error_does_not_leave_the_runner(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.result = ZeroDivisionError()
    bench.sights = [NOT_DONE]
    assert bench.run(decision()) == ([], [])
    assert "internal error" in caplog.text
    bench.clock.advance(CONFIRM_S)
    bench.sights = [NOT_DONE]
    assert bench.run() == ([("suspend", "error")], [])
    bench.book.inspect = None  # type: ignore[assignment, method-assign]
    assert bench.run(later(bench, decision("b", "batch/v1/Job/b"))) == ([], ["error"])


def test_a_server_that_throttles_gets_no_more_requests() -> None:
    bench = Bench()
    bench.book.fail = MarkError("throttled", "429")
    assert bench.run(decision("a", "batch/v1/Job/a"), decision("b", "batch/v1/Job/b")) == ([], ["throttled"])


def test_mode_shadow_counts_a_target_once_although_its_demand_comes_and_goes() -> None:
    """Mode act would take its GPUs back once."""
    bench = Bench()
    bench.settings = bench.settings._replace(mode="shadow")
    bench.restart()
    counted = []
    for cycle in range(12):
        bench.waiting = {"pool": 8.0 if cycle % 2 == 0 else 0.0}
        bench.clock.advance(FREED_S)
        counted += bench.run(later(bench, decision()))[0]
    assert counted == [("suspend", "shadow")]
    bench.waiting = {"pool": 8.0}
    assert bench.run(later(bench, decision(group="batch/v1/Job/other")))[0] == [("suspend", "shadow")]


def test_an_action_that_failed_at_the_last_step_is_counted_with_its_gpus() -> None:
    """The owner changed the object between the check and the action."""
    bench = Bench()
    bench.result = MarkError("conflict", "API server: status 409", status=409)
    assert bench.run(decision()) == ([("suspend", "conflict")], [])
    assert bench.spared == ["conflict"]
    bench = Bench()
    assert bench.run(decision())[0] == [("suspend", "done")]
    assert bench.spared == ["pending"], "its GPUs are not free yet"
