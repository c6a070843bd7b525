"""How often a policy is wrong: who is counted, and when."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from tests.testbed.marker_book import CANDIDATE, POLICY, UNDERUSED, WALL, A, B, Bench, Book, holder

from gpu_exporter.clock import ManualClock
from gpu_exporter.config.rules import Match, PolicyRule
from gpu_exporter.reconciler.evidence import HolderName
from gpu_exporter.reconciler.policy import Decision, decide_holder, windows_of
from gpu_exporter.reconciler.regret import REGRET_S, WATCHED_MAX, Regrets
from gpu_exporter.reconciler.surroundings import Exemption, Surroundings
from gpu_exporter.reconciler.telemetry import Telemetry


class Tally:
    def __init__(self) -> None:
        self.underused: Counter[tuple[str, str]] = Counter()
        self.regrets: Counter[tuple[str, str]] = Counter()

    def count_underused(self, policy: str, kind: str) -> None:
        self.underused[policy, kind] += 1

    def count_regret(self, policy: str, kind: str) -> None:
        self.regrets[policy, kind] += 1


class Watched(Bench):
    """Cycles that look for regret; what works is shown only when it is asked for, as a PromQL API does."""

    def __init__(self, *books: Book) -> None:
        self.tally = Tally()
        super().__init__(*books)
        self.only_asked = True

    def restart(self) -> None:
        self.regrets = Regrets(self.tally, self.clock)
        super().restart()

    def counts(self) -> tuple[int, int]:
        return sum(self.tally.underused.values()), sum(self.tally.regrets.values())


@pytest.fixture
def bench() -> Watched:
    made = Watched(Book())
    made.run()  # it is not the first cycle
    return made


def test_work_within_an_hour_is_regretted_once(bench: Watched) -> None:
    for run, counts in ((UNDERUSED, (1, 0)), (UNDERUSED, (1, 0)), (5.0, (1, 1)), (5.0, (1, 1)), (UNDERUSED, (2, 1))):
        bench.clock.advance(90.0)
        bench.runs = {A: (run,)}
        bench.run()
        assert bench.counts() == counts


@pytest.mark.parametrize(("after_s", "regrets"), [(REGRET_S - 1, 1), (REGRET_S + 1, 0)])
def test_work_that_begins_later_is_none(bench: Watched, after_s: float, regrets: int) -> None:
    bench.runs = {A: (UNDERUSED,)}
    bench.run()
    bench.clock.advance(after_s)
    bench.runs = {A: (5.0,)}
    bench.run()
    assert bench.counts() == (1, regrets)


def test_a_holder_that_is_marked_and_then_works_is_asked_for_after_its_mark_is_gone(bench: Watched) -> None:
    bench.runs = {A: (UNDERUSED,)}
    bench.run()
    bench.books[0].marks.clear()  # e.g. its owner removed it
    bench.clock.advance(90.0)
    bench.runs = {A: (5.0,)}
    bench.run()
    assert A in bench.asked
    assert bench.counts() == (1, 1)


def test_one_of_its_gpus_at_work_is_work_and_the_end_of_the_holder_is_none(bench: Watched) -> None:
    bench.runs = {A: (UNDERUSED, UNDERUSED), B: (UNDERUSED,)}
    bench.run()
    bench.clock.advance(90.0)
    bench.runs = {A: (UNDERUSED, 5.0)}
    bench.run()
    assert bench.counts() == (2, 1)


def test_what_is_underused_when_a_reconciler_starts_is_not_counted() -> None:
    bench = Watched(Book())
    bench.runs = {A: (UNDERUSED,)}
    bench.run()
    bench.run()
    assert bench.counts() == (0, 0)
    bench.runs = {A: (5.0,)}
    bench.run()
    assert bench.counts() == (0, 0)


def test_a_candidate_is_not_counted_and_a_short_unknown_does_not_count_twice(bench: Watched) -> None:
    bench.runs = {A: (CANDIDATE,)}
    bench.run()
    assert bench.counts() == (0, 0)
    bench.runs = {A: (UNDERUSED,)}
    bench.run()
    for _ in range(3):
        bench.exporters = 10  # most are gone: a brake holds
        bench.clock.advance(REGRET_S + 1)
        bench.run()
        bench.exporters = 100
        bench.run()
    assert bench.counts() == (1, 0)


def test_work_that_begins_at_once_is_seen_in_one_of_the_next_cycles(bench: Watched) -> None:
    bench.runs = {A: (UNDERUSED,)}
    bench.run()
    for _ in range(4):
        bench.clock.advance(30.0)
        bench.runs = {A: (5.0,)}
        bench.run()
    assert bench.counts() == (1, 1)


def test_a_wish_or_time_that_is_not_known_is_no_work_and_no_end(bench: Watched) -> None:
    bench.runs = {A: (UNDERUSED,)}
    bench.run()
    wish = Surroundings(idle_after_s=4 * 3600.0, idle_after_by=Exemption("pod", "idle-after is 4h"))
    for around, run in ((wish, UNDERUSED + 90), (Surroundings(), math.nan), (Surroundings(), UNDERUSED + 270)):
        bench.clock.advance(90.0)
        bench.books[0].around = {A: around}
        bench.runs = {A: (run,)}
        bench.run()
        assert bench.counts() == (1, 0)


def decided(name: HolderName, run: float = UNDERUSED, uid: str = "uid") -> Decision:
    return decide_holder(holder(name, [run]), WALL, POLICY, windows_of(POLICY))._replace(incarnation=uid)


def test_another_pod_of_the_same_name_is_another_holder() -> None:
    tally = Tally()
    regrets = Regrets(tally, ManualClock())
    regrets.note([])
    regrets.note([decided(A)])
    regrets.note([decided(A, 5.0, uid="other")._replace(observed_wall=WALL + 90)])
    assert sum(tally.regrets.values()) == 0


def test_counts_are_by_the_policy_that_decided_and_the_class() -> None:
    tally = Tally()
    regrets = Regrets(tally, ManualClock())
    regrets.note([])
    rule = PolicyRule("lab", Match(), ())
    regrets.note([decided(A)._replace(rule=rule, around=Surroundings(kind="batch")), decided(B)])
    assert tally.underused == {("lab", "batch"): 1, ("policy", "unclear"): 1}
    regrets.note([decided(A, 5.0)._replace(observed_wall=WALL + 90), decided(B)])
    assert tally.regrets == {("lab", "batch"): 1}


def test_so_many_are_watched_at_most() -> None:
    tally = Tally()
    regrets = Regrets(tally, ManualClock())
    regrets.note([])
    regrets.note([decided(HolderName("kubernetes", "ml", f"p{i}")) for i in range(WATCHED_MAX + 5)])
    assert (sum(tally.underused.values()), len(regrets.watched())) == (WATCHED_MAX + 5, WATCHED_MAX)


def test_the_metrics_of_regret_begin_with_the_first_decision() -> None:
    telemetry = Telemetry()
    telemetry.count_underused("lab", "batch")
    labels = {"policy": "lab", "class": "batch"}
    values = [
        telemetry.registry.get_sample_value(f"gpu_reconciler_{name}_total", labels) for name in ("underused", "regrets")
    ]
    assert values == [1.0, 0.0]
    telemetry.count_regret("lab", "batch")
    assert telemetry.registry.get_sample_value("gpu_reconciler_regrets_total", labels) == 1.0
