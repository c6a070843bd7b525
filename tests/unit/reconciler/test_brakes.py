"""Brakes: they prevent marks on GPUs that are idle for a reason that is not their owner's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.testbed.marker_book import CANDIDATE, POLICY, UNDERUSED, WALL, Bench, Book, holder

from gpu_exporter.common.clock import ManualClock
from gpu_exporter.common.errors import AnswerError
from gpu_exporter.reconciler.decision.brakes import TOGETHER_MIN, TOGETHER_S, freeze_together, idle_together
from gpu_exporter.reconciler.decision.policy import decide_holder, windows_of
from gpu_exporter.reconciler.decision.surroundings import Surroundings
from gpu_exporter.reconciler.evidence.records import HolderEvidence, HolderName, pools_of
from gpu_exporter.reconciler.evidence.usual import AGAIN_S, HOUR_S, HOURS_MAX, Usual

PODS = [HolderName("kubernetes", f"team-{i % 5}", f"pod-{i}") for i in range(60)]
PER_NAMESPACE = POLICY.new_marks_namespace_max


def small(count: int, run_s: float = CANDIDATE) -> tuple[Book, Bench]:
    """A cluster with 100 held GPUs. `count` of them became idle at the same time."""
    book = Book()
    bench = Bench(book)
    bench.allocations = 100
    bench.runs = {name: [run_s] for name in PODS[:count]}
    return book, bench


def test_many_gpus_that_became_idle_together_freeze_marks_until_freeze_max_is_over() -> None:
    _, bench = small(20)
    assert bench.run() == []
    assert set(bench.cycle.frozen) == {"correlated"}
    assert "frozen: 20 of 100 GPUs became idle within 15m" in bench.problem
    bench.runs = {name: [POLICY.candidate_after + POLICY.freeze_max] for name in bench.runs}
    assert len(bench.run()) == 20
    assert (bench.cycle.frozen, bench.problem) == ({}, "")


def test_few_gpus_and_many_gpus_one_after_the_other_do_not_freeze_marks() -> None:
    _, bench = small(9)  # each is a group, so 8 of them are outside the largest group
    assert len(bench.run()) == 9
    _, bench = small(10)
    assert bench.run() == []
    _, bench = small(20)
    bench.runs = {name: [CANDIDATE + 130.0 * i] for i, name in enumerate(bench.runs)}  # 7 within 15 minutes
    assert len(bench.run()) == 20


def test_in_a_large_cluster_more_gpus_may_become_idle_together() -> None:
    _, bench = small(60)
    bench.allocations = 1200
    assert bench.cycle.run() == "", "59 of 1200 outside the largest group are less than 5 %"
    bench.allocations = 1000
    assert bench.cycle.run().startswith("frozen: 60 of 1000 GPUs")


def test_gpus_of_one_group_that_become_idle_together_do_not_freeze_marks() -> None:
    book, bench = small(20)
    book.around = dict.fromkeys(bench.runs, Surroundings("batch/v1/Job/train"))
    bench.runs = {HolderName("kubernetes", "ml", name.name): run for name, run in bench.runs.items()}
    book.around = dict.fromkeys(bench.runs, Surroundings("batch/v1/Job/train"))
    assert len(bench.run()) == PER_NAMESPACE
    assert bench.cycle.frozen == {}


def test_existing_marks_go_after_ten_minutes_of_a_freeze_and_at_once_when_the_holder_works() -> None:
    book, bench = small(20, UNDERUSED)
    names = list(bench.runs)
    for name in names:
        book.marks[name], book.observed[name] = "underused", bench.clock.wall()
    assert bench.run() == []
    bench.runs[names[0]] = [3.0]
    assert bench.run() == [f"withdraw {names[0].name}"]
    bench.clock.advance(POLICY.unsupported_max - 1)
    assert bench.run() == []
    bench.clock.advance(1.0)
    assert len(bench.run()) == 19
    assert book.marks == {}
    bench.runs = {name: [3.0] for name in names[1:]}  # the storage works again
    assert bench.run() == []
    assert bench.cycle.frozen == {}


@pytest.mark.parametrize(("exporters", "frozen"), [(80, set()), (79, {"exporters"})])
def test_no_holder_is_marked_while_many_exporters_of_the_last_hour_are_gone(exporters: int, frozen: set[str]) -> None:
    book, bench = small(0)
    bench.run()
    bench.exporters, bench.runs = exporters, {PODS[0]: [CANDIDATE]}
    assert (len(bench.run()), set(bench.cycle.frozen)) == (0 if frozen else 1, frozen)
    bench.clock.advance(3601.0)  # they are gone for good
    bench.run()
    assert (set(bench.cycle.frozen), set(book.marks)) == (set(), {PODS[0]})


@pytest.mark.parametrize(("before", "now", "holds"), [(4, 3, False), (3, 2, False), (2, 1, True), (4, 2, True)])
def test_a_single_missing_exporter_of_three_or_more_does_not_freeze_marks(before: int, now: int, holds: bool) -> None:
    _, bench = small(0)
    for exporters in (before, now):
        bench.exporters = exporters
        bench.run()
    assert ("exporters" in bench.cycle.frozen) is holds


def test_the_highest_number_of_exporters_is_remembered() -> None:
    _, bench = small(0)
    for exporters in (50, 100, 90, 60):
        bench.exporters = exporters
        bench.run()
        bench.clock.advance(60.0)
    assert set(bench.cycle.frozen) == {"exporters"}
    bench.exporters = 100
    bench.run()
    assert bench.cycle.frozen == {}


def test_missing_evidence_freezes_marks_with_reason_source() -> None:
    _, bench = small(1)
    bench.error = "Prometheus is down"
    bench.run()
    assert set(bench.cycle.frozen) == {"source"}
    bench.error = ""
    bench.run()
    assert bench.cycle.frozen == {}


def test_the_marks_of_one_namespace_are_limited_per_cycle() -> None:
    _, bench = small(0)
    bench.allocations = 10_000
    bench.runs = {HolderName("kubernetes", "ml", f"pod-{i:02}"): [CANDIDATE + 20 - i] for i in range(12)}
    bench.runs[HolderName("kubernetes", "other", "pod")] = [CANDIDATE]
    calls = bench.run()
    assert len(calls) == PER_NAMESPACE + 1
    assert calls.count("write pod candidate") == 1
    assert bench.skips == ["limit"] * 2
    assert len(bench.run()) == 2


def of(pool: str, namespaces: int, count: int, run_s: float = CANDIDATE) -> list[HolderEvidence]:
    """Holders of one GPU each, in one pool and in several namespaces, all idle since the same moment."""
    names = [HolderName("kubernetes", f"{pool}-{at % namespaces}", f"p{at}") for at in range(count)]
    return [holder(name, [run_s])._replace(facts={"resource": frozenset({pool})}) for name in names]


def frozen_of(*holders: list[HolderEvidence]) -> set[str] | None:
    """The namespaces that are frozen; None for everything."""
    lot = [each for some in holders for each in some]
    decisions = [decide_holder(each, WALL, POLICY, windows_of(POLICY)) for each in lot]
    pools = {each.name: pools_of(each) for each in lot}
    names = freeze_together(decisions, pools, 200, POLICY).names
    return None if names is None else {name.namespace for name in names}


@pytest.mark.parametrize(
    ("holders", "frozen"),
    [
        ([of("a", 1, 20)], {"a-0"}),  # a site with one namespace, or only one namespace is idle
        ([of("a", 1, 20), of("b", 3, 3)], {"a-0"}),
        ([of("a", 1, 20), of("b", 1, 20)], None),
        ([of("a", 2, 40)], {"a-0", "a-1"}),
        ([of("a", 1, 20), of("b", 1, 3)], {"a-0"}),
        ([of("a", 1, 10), of("b", 1, 2)], set()),  # each tenant has too few GPUs
        ([of("a", 1, 5), of("b", 1, 40)], {"b-0"}),
        ([of("a", 1, 6), of("b", 1, 40)], {"b-0"}),  # in two pools
        ([of("a", 1, 9), of("b", 1, 9)], None),
        ([of("a", 5, 40), of("b", 2, 6)], {f"a-{at}" for at in range(5)}),
        ([of("a", 5, 40), of("b", 1, 20)], None),
        ([of("a", 5, 40), of("b", 5, 40)], None),
        ([of("a", 5, 3)], set()),
    ],
)
def test_a_fault_freezes_the_affected_tenant_or_pool_and_a_fault_in_two_pools_freezes_everything(
    holders: list[list[HolderEvidence]], frozen: set[str] | None
) -> None:
    assert frozen_of(*holders) == frozen


def test_one_tenant_whose_gpus_became_idle_together_does_not_freeze_other_tenants() -> None:
    _, bench = small(3)
    bench.runs |= {HolderName("kubernetes", "hoard", f"p{at}"): [CANDIDATE] for at in range(30)}
    assert sorted(bench.run()) == [f"write pod-{at} candidate" for at in range(3)]
    assert "They belong to hoard, so only this tenant is frozen" in bench.cycle.frozen["correlated"].text


@given(
    st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 4), st.integers(1, 9)), max_size=40),
    st.integers(0, 400),
)
def test_idle_together_finds_the_same_gpus_as_a_check_of_every_window(
    begun: list[tuple[int, int, int]], allocations: int
) -> None:
    """The simple check takes quadratic time."""
    decisions = [
        decide_holder(holder(HolderName("kubernetes", f"ns-{group}", f"p{i}"), [80_000.0] * units), WALL, POLICY, windows_of(POLICY))
        ._replace(idle_since_wall=WALL - POLICY.candidate_after - since, around=Surroundings(group=f"g{group}"))
        for i, (since, group, units) in enumerate(begun)
    ]  # fmt: skip
    limit = max(TOGETHER_MIN, POLICY.freeze_share * allocations)
    worst = 0
    for last, _, _ in begun:
        within = [(group, units) for since, group, units in begun if last <= since <= last + TOGETHER_S]
        total = sum(units for _, units in within)
        largest = max(sum(units for of, units in within if of == group) for group, _ in within)
        worst = max(worst, total if total - largest > limit else 0)
    found = idle_together(decisions, allocations, POLICY)
    assert (found.gpus if found else 0) == worst


def test_more_than_three_times_the_usual_number_is_a_fault_although_below_the_share() -> None:
    _, bench = small(20)
    bench.allocations = 1000  # the share allows 50 GPUs
    hours: list[float] = []

    def usual(wall: float) -> float:
        hours.append(wall)
        return days

    bench.usual_at, days = usual, 6.0
    bench.run()
    assert bench.problem.startswith("frozen: 20 of 1000 GPUs became idle within 15m, in several groups (6 are usual")
    assert set(hours) == {WALL - CANDIDATE}, "the hour at which they became idle, not the present one"
    days = 7.0
    assert (len(bench.run()), bench.problem) == (20, "")


def test_the_usual_number_is_not_asked_for_few_gpus_and_allows_no_more_than_the_share() -> None:
    _, bench = small(9)
    bench.allocations, bench.usual_at = 1000, pytest.fail
    assert len(bench.run()) == 9
    _, bench = small(20)  # of 100 GPUs: all users of this small site go home at once
    bench.usual_at = lambda _: 20.0
    assert bench.run() == []


def test_the_usual_number_is_asked_for_once_per_hour_and_again_after_a_failure() -> None:
    clock, asked, answer = ManualClock(wall=WALL), list[float](), [3.0, 1.0, 900.0, 2.0]

    def read_days(hour: float) -> list[float]:
        asked.append(hour)
        if not answer:
            raise AnswerError("too many samples")
        return answer

    usual = Usual(read_days, clock)
    hour = WALL - WALL % HOUR_S
    assert [usual.at(hour), usual.at(hour + HOUR_S - 1)] == [2.5, 2.5]
    assert asked == [hour]
    answer = answer[1:]
    assert usual.at(hour - 1) is None, "three days are too few"
    assert asked == [hour, hour - HOUR_S]
    answer = []
    assert [usual.at(hour + HOUR_S), usual.at(hour + HOUR_S)] == [None, None]
    answer = [5.0] * 7
    clock.advance(AGAIN_S - 1)
    assert usual.at(hour + HOUR_S) is None
    clock.advance(1)
    assert usual.at(hour + HOUR_S) == 5.0
    assert len(asked) == 4
    for back in range(2, HOURS_MAX + 2):
        usual.at(hour - back * HOUR_S)
    assert len(asked) == 4 + HOURS_MAX
    usual.at(hour)
    assert len(asked) == 5 + HOURS_MAX, "old hours are forgotten"
