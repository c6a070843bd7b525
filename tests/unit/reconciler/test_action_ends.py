"""When an action is done, when it is unconfirmed, and what its GPUs count for until then."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.reconciler.actions_bench import NAME, WALL, Bench, decision, journal_entry, later

from gpu_exporter.common.clock import ManualClock
from gpu_exporter.common.config.defaults import Policy
from gpu_exporter.reconciler.actions import journal as journal_module
from gpu_exporter.reconciler.actions.acts import GRACE_MAX_S, UNCONFIRMED_S
from gpu_exporter.reconciler.actions.freed import FreedGpus
from gpu_exporter.reconciler.actions.proofs import Shown, Work
from gpu_exporter.reconciler.actor import ENDING, Entry
from gpu_exporter.reconciler.audit import AuditLog, describe, read_transitions
from gpu_exporter.reconciler.decision.rulebook import Rulebook
from gpu_exporter.reconciler.decision.target import Part
from gpu_exporter.reconciler.evidence.records import HolderName

DONE, UNCONFIRMED = [("suspend", "done")], [("suspend", "unconfirmed")]
STILL = {NAME: Shown(frozenset({"uid"}), WALL - 90_000)}


@pytest.mark.parametrize(
    ("open_because", "why"),
    [
        ({"left": "pod a is being deleted"}, "pod a is being deleted"),
        ({"shown": STILL}, "an exporter still shows ml/a as a holder"),
        ({"shown": {NAME: Shown(frozenset({"other", "uid"}), None)}}, "an exporter still shows ml/a as a holder"),
        ({"shown": {NAME: Shown(frozenset({""}), None)}}, "an exporter still shows ml/a as a holder"),
        ({"shown": {NAME: Shown(frozenset({""}), WALL - 1.0)}}, "an exporter still shows ml/a as a holder"),
        ({"silent": {"n"}}, "the exporter of node n has no fresh sample"),
        ({"trouble": "Prometheus is down"}, "the exporters' series cannot be read: Prometheus is down"),
    ],
)
def test_an_action_is_open_until_all_that_it_ended_is_gone_and_then_done_or_unconfirmed(
    open_because: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Each cycle here is that of another process."""
    for seconds, results in ((UNCONFIRMED_S - 1.0, DONE), (UNCONFIRMED_S, UNCONFIRMED)):
        bench = Bench()
        gone = {name: getattr(bench, name) for name in open_because}
        bench.left = "it has just been told"
        assert bench.run(decision()) == ([], [])
        assert bench.told == ["batch/v1/Job/train"] and len(bench.record.acts) == 1, "at once"
        bench.left = ""
        for name, value in open_because.items():
            setattr(bench, name, value)
        bench.clock.advance(UNCONFIRMED_S - 1.0)
        bench.restart()
        assert bench.run(later(bench, decision())) in (([], ["pending"]), ([], ["proof"]))
        if seconds < UNCONFIRMED_S:
            for name, value in gone.items():
                setattr(bench, name, value)
        bench.clock.advance(seconds - UNCONFIRMED_S + 1.0)
        bench.restart()
        assert bench.run()[0] == results
        assert bench.told == ["batch/v1/Job/train"], "one time"
    assert any(message.endswith(f"suspend: unconfirmed: {why}") for message in caplog.messages)


def test_the_audit_log_names_the_reason_of_an_unconfirmed_action_for_each_holder_of_gpus(tmp_path: Path) -> None:
    bench, path = Bench(), tmp_path / "audit.jsonl"
    bench.audit = AuditLog(path, Rulebook(Policy()), bench.clock, lambda: None)
    bench.restart()
    launcher = Part(HolderName("kubernetes", "ml", "launcher"), "uid-2", 0)
    bench.parts, bench.rest = [Part(NAME, "uid", 1), launcher], {"launcher": Work(0.0, 0.0)}
    bench.left = "pod launcher has a finalizer"
    bench.run(decision())
    bench.clock.advance(UNCONFIRMED_S)
    bench.run()
    lines = [describe(record) for record in read_transitions(path, NAME).records]
    assert [line.partition(" action ")[2] for line in lines] == [
        "suspend: begins (1 of 1 GPUs seen)",
        "suspend: unconfirmed: pod launcher has a finalizer",
    ]
    assert read_transitions(path, launcher.name).records == []


def test_the_next_holder_of_the_gpu_does_not_keep_an_action_open() -> None:
    for after in (
        Shown(frozenset({"other"}), None),  # a pod with the same name
        Shown(frozenset({"other"}), WALL - 90_000),
        Shown(frozenset({""}), WALL + 5.0),  # a requeued job, or a pod whose UID the exporter does not know
    ):
        bench = Bench()
        bench.shown = {NAME: after}
        assert bench.run(decision())[0] == DONE


def test_two_actions_at_once_end_independently() -> None:
    bench = Bench()
    bench.left = "told"
    pair = [decision(pod, f"batch/v1/Job/{pod}") for pod in "ab"]
    assert bench.run(*pair) == ([], [])
    bench.left = ""
    bench.shown = {pair[1].name: Shown(frozenset({"uid"}), None)}
    assert bench.run()[0] == DONE
    assert [(entry.target.name, entry.told) for entry in bench.entries()] == [("a", "done"), ("b", ENDING)]
    bench.clock.advance(UNCONFIRMED_S)
    assert bench.run()[0] == UNCONFIRMED
    assert all(entry.ends == () for entry in bench.entries()), "the journal has room again"


@pytest.mark.parametrize(
    ("grace_s", "grace_max", "waits_s"),
    [(30.0, 600.0, 330.0), (600.0, 600.0, 900.0), (3600.0, 7200.0, GRACE_MAX_S + UNCONFIRMED_S), (40.0, 60.0, 340.0)],
)
def test_an_action_is_unconfirmed_after_its_grace_period_and_five_minutes(
    grace_s: float, grace_max: float, waits_s: float
) -> None:
    bench = Bench(grace_max=grace_max)
    bench.parts = [Part(NAME, "uid", 1, grace_s=grace_s)]
    bench.left = "told"
    assert bench.run(decision()) == ([], [])
    bench.clock.advance(waits_s - 1.0)
    assert bench.run()[0] == []
    bench.clock.advance(1.0)
    assert bench.run()[0] == UNCONFIRMED


@pytest.mark.parametrize("grace_s", [601.0, 3600.0, 31_536_000.0, math.inf])
def test_a_target_with_a_longer_grace_period_is_left_alone_and_counted(grace_s: float) -> None:
    bench = Bench()
    others = [Part(HolderName("kubernetes", "ml", "launcher"), "uid-2", 0, grace_s=grace_s)]
    bench.parts = [Part(NAME, "uid", 1, grace_s=600.0), *others]
    bench.rest = {"launcher": Work(0.0, 0.0)}
    assert bench.run(decision()) == ([], ["grace"])
    assert (bench.spared, bench.acted) == (["grace"], [])


def test_gpus_of_an_action_reduce_the_demand_until_it_is_unconfirmed() -> None:
    bench = Bench(hour_max=16)
    bench.waiting = {"pool": 1.0}
    bench.left = "pod a has a finalizer"
    first, second = (decision(pod, f"batch/v1/Job/{pod}") for pod in "ab")
    assert bench.run(first, second) == ([], ["no_demand"])
    bench.clock.advance(UNCONFIRMED_S)
    assert bench.run(later(bench, second)) == (UNCONFIRMED, []), "the GPUs did not come free"
    assert bench.acted == ["batch/v1/Job/a", "batch/v1/Job/b"]


def test_gpus_of_an_open_action_reduce_the_demand_also_if_the_demand_falls_and_rises_again() -> None:
    """The first job that waited got other GPUs. The second one gets those of the action."""
    bench = Bench(hour_max=16)
    bench.waiting = {"pool": 2.0}
    bench.left = "told"
    first, second = (decision(pod, f"batch/v1/Job/{pod}") for pod in "ab")
    assert bench.run(first) == ([], [])
    for waiting in (1.0, 1.0):
        bench.waiting = {"pool": waiting}
        assert bench.run(second) == ([], ["no_demand"])
    bench.left = ""
    assert bench.run()[0] == DONE
    assert bench.run(second)[0] == DONE, "its GPU is free, and a job still waits"


def test_a_target_too_large_for_the_journal_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    monkeypatch.setattr(journal_module, "TEXT_MAX", 200)
    assert bench.run(decision()) == ([], ["size"])
    assert bench.acted == [] and bench.entries() == ()


class Queue:
    """A pool of GPUs with a queue, and a reconciler that sees both late. Restarts lose everything but the journal."""

    def __init__(self) -> None:
        self.clock = ManualClock(wall=WALL)
        self.freed = FreedGpus(self.clock)
        self.entries: list[Entry] = []
        self.jobs: list[int] = []  # that wait
        self.ever = 0  # GPUs of all jobs that have waited
        self.demand = [0]
        self.seen = 0

    def cycle(self, gpus: int) -> None:
        """Look at the demand, and take a group of holders back if it is needed."""
        self.freed.follow(self.entries, self.clock.wall())
        now = {"pool": float(self.demand[self.seen])}
        self.freed.observe(now)
        wanted = self.freed.wanted([now], gpus)
        if wanted:
            number = len(self.entries)
            entry = journal_entry(number, gpus=gpus, waited_for=tuple(wanted.items()))
            self.entries.append(entry._replace(wall=self.clock.wall()))
            self.freed.follow(self.entries, self.clock.wall())

    def step(self, kind: str, number: int) -> None:
        if kind == "wait":
            self.jobs.append(number)
            self.ever += number
        elif kind == "start" and self.jobs:  # on GPUs that were taken back, or others; or it is withdrawn
            self.jobs.pop(number % len(self.jobs))
        elif kind == "see":
            self.seen = min(len(self.demand) - 1, self.seen + number)
        elif kind == "restart":
            self.freed = FreedGpus(self.clock)
        elif kind in ("ending", "done", "unconfirmed") and self.entries:
            at = number % len(self.entries)
            if self.entries[at].is_open:
                self.entries[at] = self.entries[at]._replace(told=kind)
        elif kind == "cycle":
            self.cycle(number)
        self.demand.append(sum(self.jobs))
        self.clock.advance(60.0)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["wait", "start", "see", "see", "restart", "ending", "done", "unconfirmed", *["cycle"] * 4]),
        st.integers(1, 8),
    ),
    max_size=60,
)


@settings(max_examples=500)
@given(STEPS)
def test_waiting_jobs_never_cost_more_than_their_own_number_of_gpus(steps: Sequence[tuple[str, int]]) -> None:
    queue = Queue()
    for kind, number in steps:
        queue.step(kind, number)
        cost = sum(entry.gpus for entry in queue.entries if entry.told != "unconfirmed")
        assert cost <= queue.ever, (kind, number)


@settings(max_examples=200)
@given(STEPS, st.integers(1, 8))
def test_one_job_that_waits_for_hours_never_costs_more_than_its_own_number_of_gpus(
    steps: Sequence[tuple[str, int]], gpus: int
) -> None:
    """It may be unschedulable, so GPUs that came free do not help it."""
    queue = Queue()
    queue.step("wait", gpus)
    queue.seen = len(queue.demand) - 1
    for kind, number in steps:
        if kind not in ("wait", "start"):
            queue.step(kind, number)
        assert sum(entry.gpus for entry in queue.entries if entry.told != "unconfirmed") <= gpus
    for _ in range(20):
        queue.step("cycle", 1)
    assert sum(entry.gpus for entry in queue.entries if entry.told != "unconfirmed") == gpus, "and as many are taken"
