"""Marks without evidence: how old the evidence is, as the live objects say, and what they say besides."""

from __future__ import annotations

from collections.abc import Collection

import pytest
from tests.testbed.marker_book import POLICY, UNDERUSED, WALL, A, Bench, Book

from gpu_exporter.reconciler.cycle import RENEWALS_MAX
from gpu_exporter.reconciler.evidence.records import Evidence, HolderName
from gpu_exporter.reconciler.marks import MarkError, Refused
from gpu_exporter.reconciler.plan import RENEW_SHARE


@pytest.mark.parametrize("silence", ["no series", "no answer"])
def test_silence_withdraws_after_its_time_and_support_renews_it(silence: str) -> None:
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
    """A new process every minute, none of which lives for policy.unsupported_max."""
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


def test_renewals_are_rare_and_bounded_and_the_oldest_come_first() -> None:
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


def test_a_renewal_that_fails_costs_no_mark_and_a_throttled_one_ends_them() -> None:
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
    """Its owner removed the annotations, or an older release wrote it: it is adopted or goes, and never stays for good."""
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


def test_the_clock_of_another_host_may_be_a_little_ahead() -> None:
    book = Book()
    bench = Bench(book)
    book.marks, book.observed = {A: "underused"}, {A: WALL + POLICY.fresh_min}
    assert bench.run() == []
    bench.runs = {A: (UNDERUSED,)}
    assert bench.run() == []


@pytest.mark.parametrize("reason", ["not_running", "replaced", "terminating"])
@pytest.mark.parametrize("silence", ["no series", "no answer", "unknown"])
def test_without_evidence_the_live_object_is_still_looked_at(reason: str, silence: str) -> None:
    book = Book()
    bench = Bench(book)
    book.marks[A] = "underused"
    bench.error = "Prometheus is down" if silence == "no answer" else ""
    bench.runs = {A: (float("nan"),)} if silence == "unknown" else {}
    assert bench.run() == []
    book.unable[A] = reason
    assert bench.run() == ["withdraw a"]
    assert (bench.writes, book.marks) == (["withdrawn"], {})


def test_what_needs_no_evidence_is_withdrawn_before_the_source_is_asked() -> None:
    """And no other mark is set on such a holder in the same cycle, whatever the source says then."""

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
    assert bench.run() == ["withdraw a", "withdraw b", "ask", "withdraw c"]  # of c the answer might have said more
    assert bench.cycle.standing == {kept: "candidate"}

    book.marks[late], book.observed[late] = "candidate", WALL
    bench.error = "Prometheus is down"
    assert bench.run() == ["ask"]
    bench.clock.advance(POLICY.unsupported_max)
    assert bench.run() == ["withdraw d", "withdraw c", "ask"]


def test_a_process_that_dies_of_its_evidence_withdraws_all_the_same() -> None:
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


def test_a_single_cycle_waits_for_its_evidence_and_withdraws_what_that_does_not_support() -> None:
    book = Book()
    bench = Bench(book, once=True)
    supported, _, old = names = [HolderName("kubernetes", "ml", name) for name in "abc"]
    book.marks = dict.fromkeys(names, "underused")
    book.observed[old] = WALL - POLICY.unsupported_max
    bench.runs = {supported: (UNDERUSED,), old: (UNDERUSED,)}
    assert bench.run() == ["withdraw b", "renew c"]
    assert book.marks == {supported: "underused", old: "underused"}
