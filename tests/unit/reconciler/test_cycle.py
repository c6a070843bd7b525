"""How a cycle handles existing marks and new decisions, without a real scheduler."""

from __future__ import annotations

import math

import pytest
from tests.testbed.marker_book import CANDIDATE, POLICY, UNDERUSED, WALL, A, B, Bench, Book, holder

from gpu_exporter.reconciler.decision.policy import Decision, decide
from gpu_exporter.reconciler.evidence.records import Evidence, HolderName
from gpu_exporter.reconciler.marks import Mark, MarkError
from gpu_exporter.reconciler.plan import plan


def test_a_mark_underused_falls_at_once_even_if_the_lower_mark_is_limited() -> None:
    book = Book()
    bench = Bench(book, policy=POLICY._replace(new_marks_max=1))
    other = HolderName("kubernetes", "ml", "other")
    book.marks[A] = "underused"
    bench.runs = {A: (UNDERUSED, 0.0), other: (9 * UNDERUSED,)}
    assert bench.run() == ["withdraw a", "write other underused"]
    assert bench.skips == ["limit"]
    assert A not in book.marks
    assert bench.run() == ["write a partial"]


def test_only_holders_that_were_marked_underused_before_the_cycle_may_be_acted_on() -> None:
    book = Book()
    bench = Bench(book, policy=POLICY._replace(new_marks_max=1))
    other = HolderName("kubernetes", "ml", "other")
    book.marks[A] = "candidate"
    bench.runs = {A: (UNDERUSED,), other: (9 * UNDERUSED,)}
    bench.run()
    assert (book.marks[A], bench.skips, bench.given) == ("candidate", ["limit"], []), "its mark could not rise"
    bench.run()
    assert [each.name for each in bench.given] == [other], "the other holder was marked in the last cycle"
    book.refuse[other] = "gpus"
    bench.run()
    assert [each.name for each in bench.given] == [A], "a mark that its live object must not carry is withdrawn"
    bench.error = "Prometheus is down"
    bench.run()
    assert bench.given == []


def test_a_refusal_withdraws_an_existing_mark_and_sets_no_other_mark() -> None:
    book = Book()
    bench = Bench(book)
    book.marks[A] = "candidate"
    book.refuse[A] = "gpus"
    bench.runs = {A: (UNDERUSED,)}
    assert bench.run() == ["withdraw a"]
    assert bench.run() == ["write a underused"]
    assert (bench.skips, book.marks) == (["gpus"], {})


def test_marked_holders_are_asked_for_and_only_activity_withdraws_a_mark_at_once() -> None:
    book = Book()
    bench = Bench(book)
    book.marks[A] = "underused"
    assert bench.run() == []  # the holder has no series
    assert list(bench.asked) == [A]
    bench.runs = {A: (3.0,)}
    assert bench.run() == ["withdraw a"]


def test_a_mark_remains_while_its_rise_is_refused() -> None:
    """The pod is idle from its start: its GPU was allocated before its container could work."""
    book = Book()
    bench = Bench(book)
    bench.runs, book.able_s[A] = {A: (CANDIDATE,)}, POLICY.candidate_after
    assert bench.run() == ["write a candidate"]
    bench.runs, book.able_s[A] = {A: (UNDERUSED,)}, UNDERUSED - 900
    assert bench.run() == ["write a underused"]
    assert (book.marks, bench.skips) == ({A: "candidate"}, ["restarted"])
    book.able_s[A] = UNDERUSED
    assert bench.run() == ["write a underused"]
    assert book.marks == {A: "underused"}
    book.able_s[A] = UNDERUSED - 900  # it was restarted, so the conditions of its present stage are not met
    assert bench.run() == ["withdraw a"]


def test_a_mark_that_was_refused_or_has_risen_is_not_renewed_in_the_same_cycle() -> None:
    book, other = Book(), HolderName("kubernetes", "ml", "b")
    bench = Bench(book)
    book.marks = {A: "candidate", other: "underused"}
    book.refuse[other] = "gpus"
    bench.runs = {A: (UNDERUSED,), other: (UNDERUSED,)}
    bench.clock.advance(POLICY.unsupported_max - 1)
    assert bench.run() == ["withdraw b", "write a underused"]
    assert bench.run() == ["write b underused"]


def test_the_evidence_of_a_mark_is_renewed_while_its_rise_is_refused() -> None:
    book = Book()
    bench = Bench(book)
    book.marks, book.able_s = {A: "candidate"}, {A: POLICY.candidate_after}
    bench.runs = {A: (UNDERUSED,)}
    bench.clock.advance(POLICY.unsupported_max - 1)
    assert bench.run() == ["write a underused", "renew a"]


def test_a_refusal_is_logged_when_it_changes_and_counted_in_every_cycle(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    book = Book()
    bench = Bench(book)
    bench.runs = {A: (UNDERUSED,)}
    for reason in ("gpus", "gpus", "critical", "gpus"):
        book.refuse[A] = reason
        bench.run()
        assert bench.skips == [reason]
    assert caplog.messages == ["ml/a: not marked underused: refused"] * 3


def test_a_holder_whose_scheduler_has_no_marker_is_counted_and_is_no_problem() -> None:
    book = Book()
    bench = Bench(book)
    bench.runs = {A: (UNDERUSED,), B: (UNDERUSED,), HolderName("slurm", "", "8"): (0.0,)}
    assert bench.run() == ["write a underused"]
    assert (bench.skips, bench.problem) == (["no_marker"], "")


def test_an_unforeseen_error_does_not_leave_a_cycle_and_the_next_cycle_goes_on() -> None:
    class Broken(Bench):
        def count_write(self, result: str) -> None:
            raise KeyError(result)

    book = Book()
    bench = Broken(book)
    bench.runs = {A: (UNDERUSED,)}
    assert bench.run() == ["write a underused"]
    assert bench.problem == "internal error (KeyError: 'written'): report it with the traceback in the log"
    bench.runs = {A: (0.0,)}
    assert bench.run() == ["withdraw a"]


def test_if_marks_cannot_be_listed_nothing_is_written_and_marks_keep_their_age() -> None:
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
    bench.clock.advance(POLICY.unsupported_max - 1)
    assert bench.run() == []
    assert bench.cycle.standing == {A: "underused", B: "underused"}
    pods.fail_list = None
    bench.clock.advance(1)
    assert bench.run() == ["withdraw a", "withdraw 7"]


def test_an_error_with_one_holder_does_not_prevent_the_withdrawal_of_other_marks() -> None:
    pods, jobs = Book(), Book("slurm")
    bench = Bench(pods, jobs)
    pods.marks[A], jobs.marks[B] = "underused", "underused"
    pods.fail = ValueError("odd")
    bench.runs = {A: (0.0,), B: (0.0,)}
    assert bench.run() == ["withdraw a", "withdraw 7"]
    assert bench.writes == ["error", "withdrawn"]
    assert bench.cycle.standing == {A: "underused"}


@pytest.mark.parametrize(
    ("result", "written"), [("throttled", ["write a underused"]), ("error", ["write a underused", "write b underused"])]
)
def test_only_a_throttled_write_ends_the_writes_of_the_cycle(result: str, written: list[str]) -> None:
    book = Book()
    bench = Bench(book)
    book.fail = MarkError(result, "odd")
    bench.runs = {A: (UNDERUSED,), HolderName("kubernetes", "ml", "b"): (UNDERUSED,)}
    assert bench.run() == written
    assert bench.writes == [result] * len(written)


def test_a_refusal_does_not_prevent_other_marks() -> None:
    book, other = Book(), HolderName("kubernetes", "ml", "b")
    bench = Bench(book)
    book.refuse[A] = "gpus"
    bench.runs = {A: (UNDERUSED,), other: (UNDERUSED,)}
    assert bench.run() == ["write a underused", "write b underused"]
    assert book.marks == {other: "underused"}


def test_every_mark_beyond_the_limit_is_counted() -> None:
    bench = Bench(Book(), policy=POLICY._replace(new_marks_max=1))
    bench.runs = {HolderName("kubernetes", "ml", name): (UNDERUSED,) for name in "abc"}
    assert bench.run() == ["write a underused"]
    assert bench.skips == ["limit", "limit"]


def test_the_mark_with_the_oldest_evidence_is_renewed_first() -> None:
    book = Book()
    bench = Bench(book)
    bench.run()
    bench.clock.advance(POLICY.unsupported_max - 1)
    ages = {"a": 0.0, "b": -30.0, "c": 20.0}
    for name, age in ages.items():
        book.marks[holder := HolderName("kubernetes", "ml", name)] = "underused"
        book.observed[holder], bench.runs[holder] = WALL + age, (UNDERUSED,)
    book.fail = MarkError("throttled", "429")
    assert bench.run() == ["renew b"]
    book.fail = None
    assert bench.run() == ["renew b", "renew a", "renew c"]


def test_the_mark_on_a_holder_that_ended_is_withdrawn() -> None:
    book = Book()
    bench = Bench(book)
    book.marks[A] = "underused"
    book.ended.add(A)
    bench.runs = {A: (UNDERUSED,)}
    assert bench.run() == ["withdraw a"]


def test_a_decision_unknown_counts_as_missing_evidence_and_not_as_activity() -> None:
    book = Book()
    book.marks[A] = "underused"
    stale = holder(A, (UNDERUSED,))
    stale = stale._replace(units=(stale.units[0]._replace(sample_age_s=9999.0),))
    (decision,) = decide(Evidence(WALL, (stale,)), POLICY)
    assert decision.stage == "unknown"
    (mark,) = book.list_marks()
    assert plan([decision], [mark], WALL, POLICY).withdrawals == []
    assert [w.mark for w in plan([decision], [mark], WALL + POLICY.unsupported_max, POLICY).withdrawals] == [mark]


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
def test_activity_of_one_gpu_ends_a_mark_even_if_other_gpus_are_unknown(other: dict[str, float]) -> None:
    both = holder(A, (0.0, 0.0))
    both = both._replace(units=(both.units[0]._replace(**BUSY), both.units[1]._replace(**other)))
    (decision,) = decide(Evidence(WALL, (both,)), POLICY)
    for stage, falls in (("underused", True), ("candidate", True), ("partial", decision.stage == "active")):
        work = plan([decision], [Mark(A, stage, "uid", observed_wall=WALL)], WALL, POLICY)
        assert bool(work.withdrawals) == falls, (stage, decision)
        for withdrawal in work.withdrawals:
            assert withdrawal.mark.name == A
            assert "is active" in withdrawal.reason or decision.reason == withdrawal.reason


def test_evidence_that_became_old_during_a_slow_cycle_sets_no_mark() -> None:
    third = HolderName("kubernetes", "ml", "c")

    class Slow(Book):
        def withdraw(self, mark: Mark, reason: str, wall: float) -> None:
            super().withdraw(mark, reason, wall)
            bench.clock.advance(POLICY.fresh_min)

    book = Slow()
    bench = Bench(book)
    book.marks[third] = "underused"
    bench.runs = {A: (UNDERUSED,), third: (0.0,)}
    assert bench.run() == ["withdraw c"]
    assert bench.skips == ["stale"]


def test_withdrawals_come_before_the_checks_of_other_marks() -> None:
    class Log(Book):
        def check(self, mark: Mark, decision: Decision, wall: float) -> None:
            self.calls.append(f"check {decision.name.name}")

    book = Log()
    bench = Bench(book)
    other = HolderName("kubernetes", "ml", "b")
    book.marks = {A: "underused", other: "underused"}
    bench.runs = {A: (UNDERUSED,), other: (0.0,)}
    assert bench.run() == ["withdraw b", "check a"]


def test_an_unforeseen_error_in_the_evidence_is_a_problem_and_does_not_end_the_cycles() -> None:
    book = Book()
    bench = Bench(book)
    bench.runs = {A: "odd"}  # type: ignore[dict-item]
    book.marks[A] = "underused"
    assert bench.run() == []
    assert bench.problem.startswith("internal error (TypeError: ")
    bench.clock.advance(POLICY.unsupported_max)
    assert bench.run() == ["withdraw a"]


def test_a_failed_withdrawal_is_a_problem_of_the_cycle() -> None:
    book = Book()
    bench = Bench(book)
    book.marks[A] = "underused"
    book.fail = MarkError("error", "403")
    bench.runs = {A: (0.0,)}
    bench.run()
    assert bench.problem == "1 marks could not be withdrawn"


def test_a_holder_whose_series_name_two_pod_uids_is_unknown() -> None:
    both = holder(A, (UNDERUSED,))._replace(incarnations=frozenset({"old", "new"}))
    (decision,) = decide(Evidence(WALL, (both,)), POLICY)
    assert (decision.stage, decision.incarnation) == ("unknown", "")


def test_a_mark_with_an_unknown_decision_is_checked_against_this_decision() -> None:
    """The decision may name another pod with the same name."""
    book = Book()
    bench = Bench(book)
    book.marks[A] = "candidate"
    bench.runs[A] = [math.nan]
    bench.run()
    decision = book.alone[A]
    assert decision is not None
    assert (decision.stage, decision.incarnation) == ("unknown", "uid")


def test_a_throttling_server_gets_no_writes_for_a_while_and_other_servers_do_not_wait() -> None:
    pods, jobs = Book(), Book("slurm")
    bench = Bench(pods, jobs)
    bench.runs = {A: (UNDERUSED,)}
    pods.fail = MarkError("throttled", "429", patience_s=90.0)
    assert bench.run() == ["write a underused"]
    bench.clock.advance(60.0)
    bench.runs = {A: (UNDERUSED,), B: (UNDERUSED,)}
    assert bench.run() == ["write 7 underused"]
    assert bench.skips == ["throttled"]
    bench.clock.advance(30.0)
    pods.fail = None
    assert bench.run() == ["write a underused"]


def test_throttling_does_not_delay_a_withdrawal() -> None:
    book = Book()
    bench = Bench(book)
    other = HolderName("kubernetes", "ml", "b")
    bench.runs = {A: (UNDERUSED,)}
    bench.run()
    bench.runs = {A: (UNDERUSED,), other: (UNDERUSED,)}
    book.fail = MarkError("throttled", "429", patience_s=90.0)
    assert bench.run() == ["write b underused"]
    book.fail = None
    bench.runs = {A: (0.0,), other: (UNDERUSED,)}
    assert bench.run() == ["withdraw a"]


def test_a_tenant_that_removes_its_marks_uses_up_no_marks_of_others() -> None:
    book = Book()
    bench = Bench(book, policy=POLICY._replace(new_marks_hour_max=6, new_marks_max=2))
    own = [HolderName("kubernetes", "own", f"p{number}") for number in range(2)]
    others = [HolderName("kubernetes", "other", f"p{number}") for number in range(4)]
    bench.runs = {**{name: [90_000.0] for name in own}, **{name: [8_000.0] for name in others}}
    for _ in range(4):
        for name in own:
            book.marks.pop(name, None)
        bench.run()
        bench.clock.advance(60.0)
    assert {name for name in others if name in book.marks} == set(others)
    assert set(own) & set(book.marks), "they are marked again as soon as others leave room"


def test_a_tenant_with_many_idle_holders_delays_marks_of_others_by_an_hour_at_most() -> None:
    """It removes its marks in every cycle, and has been idle for longer than all others."""
    book = Book()
    bench = Bench(book, policy=POLICY._replace(new_marks_hour_max=6, new_marks_max=3))
    own = [HolderName("kubernetes", "own", f"p{number}") for number in range(8)]
    others = [HolderName("kubernetes", "other", f"p{number}") for number in range(2)]
    for minute in range(65):
        for name in own:
            book.marks.pop(name, None)
        bench.runs = {name: [90_000.0] for name in own}
        if minute >= 3:
            bench.runs |= {name: [8_000.0] for name in others}
        bench.run()
        bench.clock.advance(60.0)
    assert set(others) <= set(book.marks)


def test_new_marks_are_limited_per_hour_too() -> None:
    book = Book()
    bench = Bench(book, policy=POLICY._replace(new_marks_hour_max=3, new_marks_max=2))
    names = [HolderName("kubernetes", "ml", f"p-{i}") for i in range(6)]
    bench.runs = dict.fromkeys(names, (UNDERUSED,))
    written = []
    for minute in (0, 1, 2, 59, 60, 61, 62):
        bench.clock.advance(WALL + 60.0 * minute - bench.clock.wall())
        written.append(len([call for call in bench.run() if call.startswith("write")]))
    assert written == [2, 1, 0, 0, 2, 1, 0]
