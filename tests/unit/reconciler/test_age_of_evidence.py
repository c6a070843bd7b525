"""Marks without evidence: the age of the evidence as written on the live objects, and the state of these objects."""

from __future__ import annotations

from collections.abc import Collection

import pytest
from tests.testbed.marker_book import POLICY, UNDERUSED, WALL, A, Bench, Book

from gpu_exporter.reconciler.cycle import RENEWALS_MAX
from gpu_exporter.reconciler.evidence.records import Evidence, HolderName
from gpu_exporter.reconciler.marks import MarkError, Refused
from gpu_exporter.reconciler.plan import RENEW_SHARE


@pytest.mark.parametrize("silence", ["no series", "no answer"])
def test_a_mark_is_withdrawn_after_unsupported_max_without_evidence_and_renewed_with_evidence(silence: str) -> None:
    book = Book()
    bench = Bench(book)
    bench.runs = {A: (UNDERUSED,)}
    bench.run()
    bench.clock.advance(1000.0)
    assert bench.run() == ["renew a"]
    assert (bench.writes, book.observed[A]) == (["renewed"], WALL + 1000.0)
    bench.runs = {}
    bench.error = "" if silence == "no series" else "Prometheus is down"
    bench.clock.advance(POLICY.unsupported_max - 1)
    assert bench.run() == []
    bench.clock.advance(1)
    assert bench.run() == ["withdraw a"]


@pytest.mark.parametrize("silence", ["no series", "no answer"])
def test_restarts_do_not_make_a_mark_younger(silence: str) -> None:
    """A new process starts every minute, so no process lives for policy.unsupported_max."""
    book = Book()
    bench = Bench(book)
    book.marks[A] = "underused"
    bench.error = "" if silence == "no series" else "Prometheus is down"
    seen = []
    for minute in range(1, 11):
        bench.clock.advance(WALL + minute * 60.0 - bench.clock.wall())
        bench.restart()
        seen.append(bench.run())
    assert seen == [*[[]] * 9, ["withdraw a"]]


def test_renewals_are_rare_and_limited_per_cycle_and_the_oldest_mark_comes_first() -> None:
    book = Book()
    bench = Bench(book)
    names = [HolderName("kubernetes", "ml", f"{i:04d}") for i in range(RENEWALS_MAX + 2)]
    for name in names:
        book.marks[name] = "underused"
    book.observed[names[-1]] = WALL - 1
    bench.runs = dict.fromkeys(names, (UNDERUSED,))
    bench.clock.advance(WALL + RENEW_SHARE * POLICY.unsupported_max - 2 - bench.clock.wall())
    assert bench.run() == []
    bench.clock.advance(1)
    assert bench.run() == [f"renew {names[-1].name}"]
    bench.clock.advance(1)
    assert len(bench.run()) == RENEWALS_MAX
    assert len(bench.run()) == 1
    assert bench.run() == []


def test_a_failed_renewal_withdraws_no_mark_and_a_throttled_renewal_ends_the_renewals() -> None:
    book, other = Book(), HolderName("kubernetes", "ml", "b")
    bench = Bench(book)
    bench.run()
    book.marks = {A: "underused", other: "underused"}
    bench.runs = {A: (UNDERUSED,), other: (UNDERUSED,)}
    bench.clock.advance(POLICY.unsupported_max)
    book.fail = MarkError("error", "500")
    assert bench.run() == ["renew a", "renew b"]
    assert (bench.writes, bench.problem) == (["error", "error"], "")
    book.fail = MarkError("throttled", "429")
    assert bench.run() == ["renew a"]
    book.fail = Refused("foreign", "edited")
    assert bench.run() == ["renew a", "renew b"]
    assert book.marks == {A: "underused", other: "underused"}


def test_a_mark_without_a_time_of_evidence_needs_evidence_now() -> None:
    """Its owner removed the annotations, or an older release wrote it: it is renewed or withdrawn at once."""
    for odd in (None, WALL + POLICY.fresh_min + 1, WALL + 10 * 365 * 86400.0):
        book = Book()
        bench = Bench(book)
        bench.run()
        book.marks, book.observed = {A: "underused"}, {A: odd}
        bench.runs = {A: (UNDERUSED,)}
        assert bench.run() == ["renew a"]
        book.observed = {A: odd}
        bench.runs = {}
        assert bench.run() == ["withdraw a"]


def test_a_time_of_evidence_may_be_slightly_in_the_future() -> None:
    book = Book()
    bench = Bench(book)
    book.marks, book.observed = {A: "underused"}, {A: WALL + POLICY.fresh_min}
    assert bench.run() == []
    bench.runs = {A: (UNDERUSED,)}
    assert bench.run() == []


@pytest.mark.parametrize("reason", ["not_running", "replaced", "terminating"])
@pytest.mark.parametrize("silence", ["no series", "no answer", "unknown"])
def test_without_evidence_the_live_object_is_still_checked(reason: str, silence: str) -> None:
    book = Book()
    bench = Bench(book)
    book.marks[A] = "underused"
    bench.error = "Prometheus is down" if silence == "no answer" else ""
    bench.runs = {A: (float("nan"),)} if silence == "unknown" else {}
    assert bench.run() == []
    book.unable[A] = reason
    assert bench.run() == ["withdraw a"]
    assert (bench.writes, book.marks) == (["withdrawn"], {})


def test_marks_whose_withdrawal_needs_no_evidence_go_before_the_source_is_asked() -> None:
    """In the same cycle no other mark is set on such a holder, even if the source supports it."""

    class Watching(Bench):
        def read_evidence(self, marked: Collection[HolderName] = ()) -> Evidence:
            book.calls.append("ask")
            return super().read_evidence(marked)

    book = Book()
    bench = Watching(book)
    bench.run()
    ended, restarted, late, kept = names = [HolderName("kubernetes", "ml", name) for name in "abcd"]
    book.marks = dict.fromkeys(names, "candidate")
    book.ended, book.unable = {ended}, {restarted: "restarted"}
    book.observed[late] = WALL - POLICY.unsupported_max
    bench.runs = {ended: (UNDERUSED,), restarted: (UNDERUSED,)}
    assert bench.run() == ["withdraw a", "withdraw b", "ask", "withdraw c"]  # the answer might have supported c
    assert bench.cycle.standing == {kept: "candidate"}

    book.marks[late], book.observed[late] = "candidate", WALL
    bench.error = "Prometheus is down"
    assert bench.run() == ["ask"]
    bench.clock.advance(POLICY.unsupported_max)
    assert bench.run() == ["withdraw d", "withdraw c", "ask"]


def test_a_process_that_crashes_while_it_reads_evidence_still_withdraws_old_marks() -> None:
    class Deadly(Bench):
        def read_evidence(self, marked: Collection[HolderName] = ()) -> Evidence:
            raise SystemExit

    book = Book()
    bench = Deadly(book)
    book.marks[A] = "underused"
    for age, left in ((POLICY.unsupported_max - 1, {A: "underused"}), (POLICY.unsupported_max, {})):
        bench.clock.advance(WALL + age - bench.clock.wall())
        bench.restart()
        with pytest.raises(SystemExit):
            bench.run()
        assert book.marks == left


def test_a_single_cycle_waits_for_its_evidence_and_withdraws_unsupported_marks() -> None:
    book = Book()
    bench = Bench(book, once=True)
    supported, _, old = names = [HolderName("kubernetes", "ml", name) for name in "abc"]
    book.marks = dict.fromkeys(names, "underused")
    book.observed[old] = WALL - POLICY.unsupported_max
    bench.runs = {supported: (UNDERUSED,), old: (UNDERUSED,)}
    assert bench.run() == ["withdraw b", "renew c"]
    assert book.marks == {supported: "underused", old: "underused"}
