"""What a cycle does with marks that stand and decisions that come, without any scheduler."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import pytest

from gpu_exporter.defaults import Policy
from gpu_exporter.reconciler.cycle import Cycle, plan
from gpu_exporter.reconciler.evidence import Evidence, EvidenceError, HolderEvidence, HolderName, UnitEvidence
from gpu_exporter.reconciler.marks import Mark, MarkError, Refused
from gpu_exporter.reconciler.policy import Decision, decide
from gpu_exporter.reconciler.telemetry import Telemetry

POLICY = Policy()
WALL = 1_000_000.0
A, B = HolderName("kubernetes", "ml", "a"), HolderName("slurm", "", "7")


class Book:
    """Marks in memory, with the answers that a test wants."""

    def __init__(self, scheduler: str = "kubernetes") -> None:
        self.scheduler = scheduler
        self.marks: dict[HolderName, str] = {}
        self.ended: set[HolderName] = set()
        self.refuse: dict[HolderName, str] = {}
        self.fail: Exception | None = None
        self.fail_list: Exception | None = None
        self.calls: list[str] = []

    def list_marks(self) -> Sequence[Mark]:
        if self.fail_list:
            raise self.fail_list
        return [Mark(name, stage, "uid", name in self.ended) for name, stage in self.marks.items()]

    def check(self, mark: Mark, decision: Decision, wall: float) -> None:
        self._object_to(decision)

    def _object_to(self, decision: Decision) -> None:
        if decision.name in self.refuse:
            raise Refused(self.refuse[decision.name], "refused")

    def write(self, decision: Decision, wall: float) -> None:
        self.calls.append(f"write {decision.name.name} {decision.stage}")
        self._object_to(decision)
        if self.fail:
            raise self.fail
        self.marks[decision.name] = decision.stage

    def withdraw(self, mark: Mark, reason: str, wall: float) -> None:
        self.calls.append(f"withdraw {mark.name.name}")
        if self.fail:
            raise self.fail
        del self.marks[mark.name]


class Bench:
    """One cycle over one or more books; evidence as idle runs of each holder's units."""

    def __init__(self, *books: Book, policy: Policy = POLICY) -> None:
        self.books = books
        self.runs: dict[HolderName, Sequence[float]] = {}
        self.error = ""
        self.asked: Collection[HolderName] = ()
        self.writes: list[str] = []
        self.skips: list[str] = []
        self.now, self.wall = 0.0, WALL
        self.cycle = Cycle(self, books, policy, self, lambda: self.now, lambda: self.wall)

    def count_write(self, result: str) -> None:
        self.writes.append(result)

    def count_skip(self, reason: str) -> None:
        self.skips.append(reason)

    def read_evidence(self, marked: Collection[HolderName] = ()) -> Evidence:
        self.asked = marked
        if self.error:
            raise EvidenceError(self.error)
        return Evidence(WALL, tuple(holder(name, runs) for name, runs in self.runs.items()))

    def run(self) -> list[str]:
        for book in self.books:
            book.calls.clear()
        self.writes.clear()
        self.skips.clear()
        self.problem = self.cycle.run()
        return [call for book in self.books for call in book.calls]


def holder(name: HolderName, runs: Sequence[float]) -> HolderEvidence:
    units = tuple(
        UnitEvidence("n", str(i), f"GPU-{i}", "", WALL - 90_000, run, 1.0, 1.0, 2) for i, run in enumerate(runs)
    )
    return HolderEvidence(name, "", units, len(units), frozenset({"uid"}))


CANDIDATE, UNDERUSED = POLICY.candidate_after + 1, POLICY.underused_after + 1


def test_underused_falls_at_once_whatever_limits_or_refuses_the_next_mark() -> None:
    book = Book()
    bench = Bench(book, policy=POLICY._replace(new_marks_max=1))
    other = HolderName("kubernetes", "ml", "other")
    book.marks[A] = "underused"
    bench.runs = {A: (UNDERUSED, 0.0), other: (9 * UNDERUSED,)}
    assert bench.run() == ["withdraw a", "write other underused"]
    assert bench.skips == ["limit"]
    assert A not in book.marks
    assert bench.run() == ["write a partial"]


def test_a_refusal_while_a_mark_stands_withdraws_it_and_sets_no_other() -> None:
    book = Book()
    bench = Bench(book)
    book.marks[A] = "candidate"
    book.refuse[A] = "gpus"
    bench.runs = {A: (UNDERUSED,)}
    assert bench.run() == ["withdraw a"]
    assert bench.run() == ["write a underused"]
    assert (bench.skips, book.marks) == (["gpus"], {})


def test_marked_holders_are_asked_for_and_activity_is_told_from_silence() -> None:
    book = Book()
    bench = Bench(book)
    book.marks[A] = "underused"
    assert bench.run() == []  # no series of it
    assert list(bench.asked) == [A]
    bench.runs = {A: (3.0,)}
    assert bench.run() == ["withdraw a"]


@pytest.mark.parametrize("silence", ["no series", "no answer"])
def test_silence_withdraws_after_its_time_and_support_renews_it(silence: str) -> None:
    book = Book()
    bench = Bench(book)
    bench.runs = {A: (UNDERUSED,)}
    bench.run()
    bench.now = 1000.0
    bench.run()
    bench.runs = {}
    bench.error = "" if silence == "no series" else "Prometheus is down"
    bench.now = 1000.0 + POLICY.unsupported_max - 1
    assert bench.run() == []
    bench.now += 1
    assert bench.run() == ["withdraw a"]


def test_where_marks_cannot_be_listed_nothing_is_written_and_no_time_is_forgotten() -> None:
    pods, jobs = Book(), Book("slurm")
    bench = Bench(pods, jobs)
    bench.runs = {A: (UNDERUSED,), B: (UNDERUSED,)}
    pods.fail_list = MarkError("error", "refused")
    assert bench.run() == ["write 7 underused"]
    assert bench.problem == "kubernetes marks cannot be read: refused"
    assert bench.cycle.standing == {B: "underused"}
    pods.fail_list = None
    bench.run()
    bench.runs = {}
    pods.fail_list = MarkError("error", "refused")
    bench.now = POLICY.unsupported_max - 1
    assert bench.run() == []
    assert bench.cycle.standing == {A: "underused", B: "underused"}
    pods.fail_list = None
    bench.now += 1
    assert bench.run() == ["withdraw a", "withdraw 7"]


def test_a_fault_with_one_holder_costs_no_other_its_withdrawal() -> None:
    pods, jobs = Book(), Book("slurm")
    bench = Bench(pods, jobs)
    pods.marks[A], jobs.marks[B] = "underused", "underused"
    pods.fail = ValueError("odd")
    bench.runs = {A: (0.0,), B: (0.0,)}
    assert bench.run() == ["withdraw a", "withdraw 7"]
    assert bench.writes == ["error", "withdrawn"]
    assert bench.cycle.standing == {A: "underused"}


def test_a_throttled_write_ends_the_writes_of_the_cycle() -> None:
    book = Book()
    bench = Bench(book)
    book.fail = MarkError("throttled", "429")
    other = HolderName("kubernetes", "ml", "b")
    bench.runs = {A: (UNDERUSED,), other: (UNDERUSED,)}
    assert bench.run() == ["write a underused"]
    assert bench.writes == ["throttled"]


def test_the_mark_of_what_ended_goes() -> None:
    book = Book()
    bench = Bench(book)
    book.marks[A] = "underused"
    book.ended.add(A)
    bench.runs = {A: (UNDERUSED,)}
    assert bench.run() == ["withdraw a"]


def test_unknown_is_silence_and_not_activity() -> None:
    book = Book()
    book.marks[A] = "underused"
    stale = holder(A, (UNDERUSED,))
    stale = stale._replace(units=(stale.units[0]._replace(sample_age_s=9999.0),))
    (decision,) = decide(Evidence(WALL, (stale,)), POLICY)
    assert decision.stage == "unknown"
    (mark,) = book.list_marks()
    assert plan([decision], [mark], lambda _: False).withdrawals == []
    assert [w.mark for w in plan([decision], [mark], lambda _: True).withdrawals] == [mark]


BUSY, IDLE = {"idle_run_s": 3.0}, {"idle_run_s": UNDERUSED}


@pytest.mark.parametrize(
    "other",
    [
        {**IDLE, "sample_age_s": 200.0},
        {**IDLE, "coverage": 0.5},
        {"idle_run_s": None},
        {**IDLE, "start_wall": None},
    ],
)
def test_known_activity_ends_underused_whatever_is_not_known_of_the_other_gpus(other: dict[str, float]) -> None:
    both = holder(A, (0.0, 0.0))
    both = both._replace(units=(both.units[0]._replace(**BUSY), both.units[1]._replace(**other)))
    (decision,) = decide(Evidence(WALL, (both,)), POLICY)
    for stage, falls in (("underused", True), ("candidate", True), ("partial", decision.stage == "active")):
        work = plan([decision], [Mark(A, stage, "uid")], lambda _: False)
        assert bool(work.withdrawals) == falls, (stage, decision)


def test_old_evidence_sets_no_mark_however_long_the_cycle_took() -> None:
    third = HolderName("kubernetes", "ml", "c")

    class Slow(Book):
        def withdraw(self, mark: Mark, reason: str, wall: float) -> None:
            super().withdraw(mark, reason, wall)
            bench.wall += POLICY.fresh_min

    book = Slow()
    bench = Bench(book)
    book.marks[third] = "underused"
    bench.runs = {A: (UNDERUSED,), third: (0.0,)}
    assert bench.run() == ["withdraw c"]
    assert bench.skips == ["stale"]


def test_withdrawals_come_before_marks_are_looked_at_again() -> None:
    class Log(Book):
        def check(self, mark: Mark, decision: Decision, wall: float) -> None:
            self.calls.append(f"check {decision.name.name}")

    book = Log()
    bench = Bench(book)
    other = HolderName("kubernetes", "ml", "b")
    book.marks = {A: "underused", other: "underused"}
    bench.runs = {A: (UNDERUSED,), other: (0.0,)}
    assert bench.run() == ["withdraw b", "check a"]


def test_what_is_unforeseen_in_the_evidence_is_a_problem_and_no_end() -> None:
    book = Book()
    bench = Bench(book)
    bench.runs = {A: "odd"}  # type: ignore[dict-item]
    book.marks[A] = "underused"
    assert bench.run() == []
    assert bench.problem.startswith("unforeseen TypeError")
    bench.now = POLICY.unsupported_max
    assert bench.run() == ["withdraw a"]


def test_a_withdrawal_that_fails_is_a_problem_of_the_cycle() -> None:
    book = Book()
    bench = Bench(book)
    book.marks[A] = "underused"
    book.fail = MarkError("error", "403")
    bench.runs = {A: (0.0,)}
    bench.run()
    assert bench.problem == "1 marks could not be withdrawn"


def test_stages_that_others_wrote_make_no_series() -> None:
    telemetry = Telemetry()
    telemetry.note_cycle(0.0, True, {A: "evil0", B: "underused"})
    value = telemetry.registry.get_sample_value
    assert value("gpu_reconciler_labelled", {"stage": "other"}) == 1
    assert value("gpu_reconciler_labelled", {"stage": "underused"}) == 1
    assert value("gpu_reconciler_labelled", {"stage": "evil0"}) is None


def test_two_pods_under_one_name_are_unknown() -> None:
    both = holder(A, (UNDERUSED,))._replace(incarnations=frozenset({"old", "new"}))
    (decision,) = decide(Evidence(WALL, (both,)), POLICY)
    assert (decision.stage, decision.incarnation) == ("unknown", "")
