"""Outcomes of decisions: which groups are counted, and the outcome of each."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.testbed.marker_book import CANDIDATE, POLICY, UNDERUSED, WALL, A, B, Bench, Book, holder
from tests.testbed.proven import Tally

from gpu_exporter.common.config.rules import Match, PolicyRule
from gpu_exporter.reconciler.actions.record import Record
from gpu_exporter.reconciler.decision.outcomes import (
    ENDED,
    HOLDERS_MAX,
    LATE_S,
    LOST,
    REGRET,
    REGRET_S,
    RIGHT,
    RUNS,
    UNKNOWN,
    Account,
    Watches,
)
from gpu_exporter.reconciler.decision.policy import Decision, decide_holder, windows_of
from gpu_exporter.reconciler.decision.surroundings import Exemption, Member, Surroundings, Unreadable
from gpu_exporter.reconciler.evidence.records import HolderName, Unseen


class Watched(Bench):
    """Cycles that watch decisions. As with a PromQL API, a holder that works is shown only if it is asked for."""

    def __init__(self, *books: Book) -> None:
        self.tally = Tally()
        self.gaps: dict[HolderName, float] = {}
        super().__init__(*books)
        self.only_asked = True

    def restart(self) -> None:
        self.record = Record(None, self.tally, self.clock, 86_400.0)
        super().restart()

    def read_evidence(self, marked: Any = ()) -> Any:
        evidence = super().read_evidence(marked)
        holders = tuple(
            each._replace(units=tuple(u._replace(longest_gap_s=self.gaps.get(each.name, 0.0)) for u in each.units))
            for each in evidence.holders
        )
        return evidence._replace(holders=holders)

    def works(self, name: HolderName, *runs: float) -> None:
        """Let a holder work now. Its exporter publishes the idle run before as its longest gap."""
        self.gaps[name] = max(self.runs[name])
        self.runs[name] = runs or (5.0,)

    def pass_time(self, seconds: float) -> None:
        """Let time pass without work."""
        self.clock.advance(seconds)
        self.runs = {name: [run + seconds for run in runs] for name, runs in self.runs.items()}
        self.run()

    def counts(self) -> tuple[int, dict[str, int]]:
        return self.tally.counts()


@pytest.fixture
def bench() -> Watched:
    made = Watched(Book())
    made.run()  # so that the tests do not begin with the first cycle
    return made


def test_work_within_the_hour_is_counted_once_as_regret(bench: Watched) -> None:
    bench.runs = {A: [UNDERUSED]}
    bench.run()
    bench.pass_time(90.0)
    assert bench.counts() == (1, {})
    bench.works(A)
    for _ in range(2):
        bench.clock.advance(90.0)
        bench.run()
        assert bench.counts() == (1, {REGRET: 1})
    bench.gaps, bench.runs = {}, {A: [UNDERUSED]}
    bench.run()
    assert bench.counts() == (2, {REGRET: 1})


def test_an_hour_that_was_observed_idle_is_right_and_later_work_does_not_change_that(bench: Watched) -> None:
    bench.runs = {A: [UNDERUSED]}
    bench.run()
    for _ in range(40):
        bench.pass_time(90.0)
    assert bench.counts() == (1, {RIGHT: 1})
    bench.works(A)
    bench.clock.advance(90.0)
    bench.run()
    assert bench.counts() == (1, {RIGHT: 1})


def test_work_that_ended_before_the_next_cycle_is_regret(bench: Watched) -> None:
    """The work began and ended while the reconciler was away."""
    bench.runs = {A: [UNDERUSED]}
    bench.run()
    bench.clock.advance(3000.0)
    bench.works(A, 1200.0)
    bench.run()
    assert bench.counts() == (1, {REGRET: 1})


def test_unobserved_time_is_neither_right_nor_regret(bench: Watched) -> None:
    bench.runs = {A: [UNDERUSED]}
    bench.run()
    bench.clock.advance(600.0)
    bench.runs = {A: [60.0]}  # its exporter was away, and knows nothing about earlier work
    bench.run()
    bench.pass_time(REGRET_S - 600.0 + LATE_S - 1.0)
    assert bench.counts() == (1, {})
    bench.pass_time(1.0)
    assert bench.counts() == (1, {UNKNOWN: 1})


def test_an_idle_run_that_ended_between_two_close_cycles_was_ended_by_work(bench: Watched) -> None:
    """The longest gap does not show this work. But unknown time ends a run only if it lasts for a minute."""
    bench.runs = {A: [UNDERUSED]}
    bench.run()
    bench.clock.advance(600.0)
    bench.runs = {A: [60.0]}
    bench.run()
    bench.clock.advance(30.0)
    bench.runs = {A: [2.0]}
    bench.run()
    assert bench.counts() == (1, {REGRET: 1})


def test_no_outcome_is_lost_if_evidence_is_missing_for_more_than_an_hour(bench: Watched) -> None:
    bench.runs = {A: [UNDERUSED], B: [UNDERUSED]}
    bench.run()
    bench.error = "Prometheus is down"
    for _ in range(50):
        bench.pass_time(90.0)
    bench.error = ""
    bench.works(B, 1000.0)
    bench.run()
    assert bench.counts() == (2, {RIGHT: 1, REGRET: 1}), (
        "the idle runs show it, even after a long time without evidence"
    )


@pytest.mark.parametrize(("fate", "outcome"), [(ENDED, RIGHT), (LOST, UNKNOWN)])
def test_the_outcome_of_a_holder_that_is_gone_depends_on_how_it_ended(bench: Watched, fate: str, outcome: str) -> None:
    bench.runs = {A: [UNDERUSED]}
    bench.run()
    bench.runs = {}
    bench.pass_time(90.0)
    assert bench.counts() == (1, {}), "the holder runs, and its series may come back"
    bench.books[0].fates[A] = fate
    bench.pass_time(90.0)
    assert bench.counts() == (1, {outcome: 1})


def test_the_other_members_of_a_gang_are_watched_after_one_member_has_ended(bench: Watched) -> None:
    pods = [HolderName("kubernetes", "ml", name) for name in ("p", "q")]
    both = tuple(Member(name, "uid", 1) for name in pods)
    bench.books[0].around = dict.fromkeys(pods, Surroundings("batch/v1/Job/train", both, kind="batch"))
    bench.runs = {name: [UNDERUSED] for name in pods}
    bench.run()
    assert bench.counts() == (1, {}), "a Job of two pods is one decision"
    bench.books[0].fates[pods[0]] = ENDED
    del bench.runs[pods[0]]
    bench.pass_time(90.0)
    assert bench.counts() == (1, {})
    bench.works(pods[1])
    bench.run()
    assert bench.counts() == (1, {REGRET: 1})


def test_work_of_a_new_holder_with_the_same_name_is_no_regret() -> None:
    tally = Tally()
    watches = Watches(tally)
    watches.note([], WALL, lambda *_: RUNS)
    watches.note([decided(A)], WALL, lambda *_: RUNS)
    other = decided(A, 5.0, uid="other")._replace(observed_wall=WALL + 90)
    watches.note([other], WALL + 90, lambda *_: RUNS)
    assert tally.counts() == (1, {UNKNOWN: 1})


def test_work_on_one_gpu_of_a_holder_is_regret(bench: Watched) -> None:
    bench.runs = {A: [UNDERUSED, UNDERUSED], B: [UNDERUSED]}
    bench.run()
    bench.clock.advance(90.0)
    bench.works(A, UNDERUSED + 90.0, 5.0)
    bench.run()
    assert bench.counts() == (2, {REGRET: 1})


def test_holders_that_are_underused_in_the_first_cycle_without_a_record_are_not_counted() -> None:
    bench = Watched(Book())
    bench.runs = {A: [UNDERUSED]}
    bench.run()
    bench.run()
    bench.works(A)
    bench.run()
    assert bench.counts() == (0, {})


def test_a_candidate_is_not_counted_and_a_short_unknown_time_does_not_count_a_group_twice(bench: Watched) -> None:
    bench.runs = {A: [CANDIDATE]}
    bench.run()
    assert bench.counts()[0] == 0
    bench.runs = {A: [UNDERUSED]}
    bench.run()
    for around in (Unreadable("the API server was slow", True), Surroundings()) * 3:
        bench.books[0].around = {A: around}
        bench.pass_time(90.0)
        bench.unseen = [Unseen("n1", A, "uid")] if isinstance(around, Unreadable) else []  # a brake is active
    assert bench.counts() == (1, {})


def test_a_wish_of_the_owner_is_neither_work_nor_the_end_of_a_watch(bench: Watched) -> None:
    bench.runs = {A: [UNDERUSED]}
    bench.run()
    wish = Surroundings(idle_after_s=4 * 3600.0, idle_after_by=Exemption("pod", "idle-after is 4h"))
    for around in (wish, Surroundings()):
        bench.books[0].around = {A: around}
        bench.pass_time(90.0)
        assert bench.counts() == (1, {})


def decided(name: HolderName, run: float = UNDERUSED, uid: str = "uid") -> Decision:
    return decide_holder(holder(name, [run]), WALL, POLICY, windows_of(POLICY))._replace(incarnation=uid)


def test_decisions_are_counted_by_policy_class_and_tenant() -> None:
    tally = Tally()
    watches = Watches(tally)
    watches.note([], WALL, lambda *_: RUNS)
    rule = PolicyRule("lab", Match(), ())
    job = decided(HolderName("slurm", "", "4711"))._replace(owner="ada/phys")
    batch = decided(A)._replace(rule=rule, around=Surroundings(kind="batch"))
    watches.note([batch, decided(HolderName("kubernetes", "other", "p")), job], WALL, lambda *_: RUNS)
    assert tally.decided == {
        Account("lab", "batch", A.namespace): 1,
        Account("policy", "unclear", "other"): 1,
        Account("policy", "unclear", "phys"): 1,
    }


def test_the_number_of_watched_holders_is_limited_and_the_outcome_of_others_is_unknown() -> None:
    tally = Tally()
    watches = Watches(tally)
    watches.note([], WALL, lambda *_: RUNS)
    many = [decided(HolderName("kubernetes", "ml", f"p{i}")) for i in range(HOLDERS_MAX + 5)]
    watches.note(many, WALL, lambda *_: RUNS)
    assert (tally.counts(), len(watches.names())) == ((HOLDERS_MAX + 5, {UNKNOWN: 5}), HOLDERS_MAX)


STEPS = st.lists(st.sampled_from(["idle", "work", "away", "gone", "silent"]), min_size=1, max_size=60)


@given(STEPS, st.sampled_from([RUNS, ENDED, LOST]))
def test_every_decision_gets_one_outcome_and_is_never_right_if_the_holder_worked(steps: list[str], fate: str) -> None:
    """The test itself remembers whether the holder worked within the hour after the decision."""
    bench = Watched(Book())
    bench.run()
    bench.runs = {A: [UNDERUSED]}
    bench.run()
    worked = False
    for step in [*steps, *["idle"] * 60]:
        if step == "gone":
            bench.runs, bench.books[0].fates[A] = {}, fate
            break
        bench.error = "down" if step == "silent" else ""
        if step == "work":
            worked = worked or bench.clock.wall() < WALL + REGRET_S - 90.0
            bench.works(A)
        elif step == "away":
            bench.runs[A] = [0.0]
        bench.pass_time(90.0)
    for _ in range(60):
        bench.error = ""
        bench.pass_time(90.0)
    decisions, outcomes = bench.counts()
    assert sum(outcomes.values()) == decisions - len(bench.record.watches.open)
    assert len(bench.record.watches.open) <= 1
    if worked:
        assert outcomes.get(RIGHT, 0) < decisions, (outcomes, steps)
