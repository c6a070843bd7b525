"""A marker with marks in memory, and cycles over it: a scheduler for tests of the reconciler's cycle."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from gpu_exporter.common.clock import ManualClock
from gpu_exporter.common.config.defaults import Policy
from gpu_exporter.common.config.rules import PolicyRule
from gpu_exporter.common.errors import AnswerError
from gpu_exporter.reconciler.actions.record import Record
from gpu_exporter.reconciler.cycle import CycleHooks, ReconcileCycle
from gpu_exporter.reconciler.decision.outcomes import RUNS
from gpu_exporter.reconciler.decision.policy import Decision
from gpu_exporter.reconciler.decision.rulebook import Rulebook
from gpu_exporter.reconciler.decision.surroundings import Incarnation, Surroundings, Unreadable
from gpu_exporter.reconciler.evidence.records import (
    Evidence,
    HolderEvidence,
    HolderName,
    UnitEvidence,
    Unseen,
    nothing_usual,
)
from gpu_exporter.reconciler.judge import judge_of
from gpu_exporter.reconciler.marks import Mark, Refused
from gpu_exporter.reconciler.pause import PauseSource

POLICY = Policy()
WALL = 1_000_000.0
A, B = HolderName("kubernetes", "ml", "a"), HolderName("slurm", "", "7")


class Book:
    """Marks in memory, with scripted answers."""

    rest_s = 0.0

    def __init__(self, scheduler: str = "kubernetes") -> None:
        self.scheduler = scheduler
        self.marks: dict[HolderName, str] = {}
        self.observed: dict[HolderName, float | None] = {}
        self.ended: set[HolderName] = set()
        self.refuse: dict[HolderName, str] = {}
        self.able_s: dict[HolderName, float] = {}  # how long the holder has been able to work
        self.alone: dict[
            HolderName, Decision | None
        ] = {}  # the decision with which a mark without evidence was checked
        self.unable: dict[HolderName, str] = {}  # the reason for a refusal by the live object
        self.fail: Exception | None = None
        self.fail_list: Exception | None = None
        self.calls: list[str] = []
        self.around: dict[HolderName, Surroundings | Unreadable] = {}
        self.fates: dict[HolderName, str] = {}
        self.gone: set[Incarnation] = set()
        self.asked_living: list[set[Incarnation]] = []
        self.surveyed: list[tuple[list[HolderName], list[HolderName]]] = []

    def survey(
        self, names: Collection[HolderName], fresh: Collection[HolderName], wall: float
    ) -> Mapping[HolderName, Surroundings | Unreadable]:
        self.surveyed.append((sorted(names), sorted(fresh)))
        return {name: self.around.get(name, Surroundings()) for name in names}

    def find_living(self, holders: Collection[Incarnation]) -> Collection[Incarnation]:
        self.asked_living.append(set(holders))
        return {each for each in holders if each not in self.gone}

    def read_fate(self, name: HolderName, incarnation: str) -> str:
        return self.fates.get(name, RUNS)

    foreign = 0
    odd: Mapping[tuple[str, str], int] = {}

    def list_marks(self) -> Sequence[Mark]:
        if self.fail_list:
            raise self.fail_list
        return [
            Mark(name, stage, "uid", name in self.ended, None, self.observed.get(name, WALL))
            for name, stage in self.marks.items()
        ]

    def _require(self, *facts: object) -> None:
        """Check that the cycle passed all arguments; an exception here would only end in its log."""
        if None in facts or "None" in facts:
            self.calls.append(f"incomplete: {facts}")

    def check(self, mark: Mark, decision: Decision, wall: float) -> None:
        self._require(mark, decision, wall)
        self._object_to(decision)

    def check_alone(self, mark: Mark, decision: Decision | None, needed_s: float, wall: float) -> None:
        self._require(mark, needed_s, wall)
        self.alone[mark.name] = decision
        if mark.name in self.unable:
            raise Refused(self.unable[mark.name], "refused")
        if self.able_s.get(mark.name, needed_s) < needed_s:
            raise Refused("restarted", "started within the idle time")

    def _object_to(self, decision: Decision) -> None:
        if decision.name in self.refuse:
            raise Refused(self.refuse[decision.name], "refused")
        if self.able_s.get(decision.name, decision.needed_s) < decision.needed_s:
            raise Refused("restarted", "started within the idle time")

    def inspect(self, decision: Decision, wall: float) -> None:
        self.calls.append(f"inspect {decision.name.name}")
        if self.fail:
            raise self.fail
        self._object_to(decision)

    def label(self, decision: Decision) -> str:
        return f"mark={decision.stage}"

    def renew(self, mark: Mark, decision: Decision) -> None:
        self.calls.append(f"renew {mark.name.name}")
        if self.fail:
            raise self.fail
        self.marks[mark.name] = mark.stage  # replaced as a whole, as on a job: the written text contains the stage
        self.observed[mark.name] = decision.observed_wall

    def write(self, decision: Decision, wall: float) -> str:
        self.calls.append(f"write {decision.name.name} {decision.stage}")
        self._object_to(decision)
        if self.fail:
            raise self.fail
        self.marks[decision.name] = decision.stage
        self.observed[decision.name] = decision.observed_wall
        return "label"

    def withdraw(self, mark: Mark, reason: str, wall: float) -> None:
        self._require(reason, wall)
        self.calls.append(f"withdraw {mark.name.name}")
        if self.fail:
            raise self.fail
        del self.marks[mark.name]


class Bench:
    """Runs cycles over one or more books; the evidence is the idle runs of each holder's units."""

    record: Record | None = None

    def __init__(self, *books: Book, policy: Policy = POLICY, once: bool = False) -> None:
        self.once = once
        self.books = books
        self.runs: dict[HolderName, Sequence[float]] = {}
        self.error = ""
        self.asked: Collection[HolderName] = ()
        self.reads = 0
        self.exporters, self.allocations = 100, 10_000
        self.unseen: Sequence[Unseen] = ()
        self.only_asked = False  # whether holders that are not idle are returned only on request
        self.writes: list[str] = []
        self.skips: list[str] = []
        self.given: list[Decision] = []  # decisions that may lead to an action
        self.clock = ManualClock(wall=WALL)
        self.policy = policy
        self.rules: Sequence[PolicyRule] = ()
        self.pauses: Sequence[PauseSource] = ()
        self.sharing: Mapping[HolderName, str] = {}
        self.usual_at: Callable[[float], float | None] = nothing_usual
        self.may_write: Callable[[], bool] = lambda: True
        self.restart()

    def restart(self) -> None:
        """Start a new process: only the books remain."""
        judge = judge_of(self, self.books, Rulebook(self.policy, self.rules), self.pauses, self.record)
        self.cycle = ReconcileCycle(
            judge,
            self.books,
            self.policy,
            self,  # type: ignore[arg-type]  # in place of Telemetry: a cycle only counts
            self.clock,
            CycleHooks(may_write=lambda: self.may_write(), act=self.given.extend),
            once=self.once,
        )

    def count_write(self, result: str) -> None:
        self.writes.append(result)

    def count_skip(self, reason: str) -> None:
        self.skips.append(reason)

    def read_evidence(self, marked: Collection[HolderName] = ()) -> Evidence:
        self.asked = marked
        self.reads += 1
        if self.error:
            raise AnswerError(self.error)
        wall = self.clock.wall()
        shown = {
            name: runs
            for name, runs in self.runs.items()
            if not self.only_asked or name in marked or max(runs) >= self.policy.candidate_after
        }
        found = tuple(holder(name, runs, wall) for name, runs in shown.items())
        return Evidence(
            wall,
            found,
            self.exporters,
            self.allocations,
            usual_at=self.usual_at,
            sharing=self.sharing,
            unseen=self.unseen,
        )

    def read_holders(self, names: Collection[HolderName]) -> Evidence:
        evidence = self.read_evidence(names)
        return evidence._replace(holders=tuple(each for each in evidence.holders if each.name in names))

    def run(self) -> list[str]:
        for book in self.books:
            book.calls.clear()
        self.writes.clear()
        self.skips.clear()
        self.given.clear()
        self.problem = self.cycle.run()
        return [call for book in self.books for call in book.calls]


def holder(name: HolderName, runs: Sequence[float], wall: float = WALL) -> HolderEvidence:
    units = tuple(
        UnitEvidence("n", str(i), f"GPU-{i}", "", wall - 90_000, run, 1.0, 1.0, 2) for i, run in enumerate(runs)
    )
    return HolderEvidence(name, "", units, len(units), frozenset({"uid"}))


CANDIDATE, UNDERUSED = POLICY.candidate_after + 1, POLICY.underused_after + 1
