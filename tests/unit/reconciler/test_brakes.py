"""Brakes: they prevent marks on GPUs that are idle for a reason that is not their owner's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.testbed.marker_book import CANDIDATE, POLICY, UNDERUSED, WALL, Bench, Book, holder

from gpu_exporter.common.clock import ManualClock
from gpu_exporter.common.errors import AnswerError
from gpu_exporter.reconciler.decision.brakes import TOGETHER_MIN, TOGETHER_S, find_bursts
from gpu_exporter.reconciler.decision.policy import Decision, decide_holder, windows_of
from gpu_exporter.reconciler.decision.surroundings import Exemption, Surroundings
from gpu_exporter.reconciler.evidence.records import HolderName, Unseen
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
    assert bench.problem == "", "evidence is complete"
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
    bench.run()
    assert bench.cycle.frozen == {}, "59 of 1200 outside the largest group are less than 5 %"
    bench.allocations = 1000
    bench.run()
    assert bench.cycle.frozen["correlated"].text.startswith("60 of 1000 GPUs")


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


def test_a_missing_exporter_freezes_the_holders_that_it_showed_and_no_others(caplog: pytest.LogCaptureFixture) -> None:
    book, bench = small(3)
    bench.exporters = 1  # of a hundred, in the last hour
    bench.unseen = [Unseen(f"n{i}", name, "uid") for i in range(7) for name in PODS[:2]]
    assert bench.run() == [f"write {PODS[2].name} candidate"]
    freeze = bench.cycle.frozen["exporters"]
    assert set(freeze.names or ()) == set(PODS[:2])
    assert freeze.text.startswith("no data from n0, n1, n2, n3, n4 and 2 more, where 2 holders may still run")
    assert "; ".join(each.reason for each in bench.cycle.decisions).count(freeze.text) == 2
    assert (bench.problem, caplog.text.count(freeze.text)) == ("", 1), "the evidence is complete"
    bench.run()
    assert caplog.text.count("frozen") == 1
    book.gone = {(PODS[0], "uid")}
    bench.run()
    assert caplog.text.count("where 1 holder may still run") == 1
    assert set(book.marks) == {PODS[0], PODS[2]}


def test_an_exporter_whose_holders_have_ended_is_away_and_they_are_asked_for_once() -> None:
    book, bench = small(1)
    other = HolderName("slurm", "", "7")
    bench.unseen = [Unseen("n1", PODS[1], "uid"), Unseen("n2", PODS[1], "new"), Unseen("n3", other, "5")]
    book.gone = {(PODS[1], "uid")}
    assert len(bench.run()) == 1
    assert set(bench.cycle.frozen["exporters"].names or ()) == {PODS[1], other}, (
        "the jobs of this site cannot be listed"
    )
    book.gone.add((PODS[1], "new"))
    bench.run()
    bench.run()
    assert book.asked_living == [{(PODS[1], "uid"), (PODS[1], "new")}, {(PODS[1], "new")}]
    bench.unseen = bench.unseen[:2]
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


def test_only_holders_that_became_idle_in_a_burst_or_shortly_before_or_after_are_frozen() -> None:
    book, bench = small(20, 2 * CANDIDATE)
    names = [HolderName("kubernetes", f"team-{at}", f"other-{at}") for at in range(6)]
    for name, later_s in zip(names, (-1801.0, -1800.0, -900.0, 900.0, 901.0, 1801.0), strict=True):
        bench.runs[name] = [2 * CANDIDATE - later_s]
    bench.run()
    assert set(bench.cycle.frozen["correlated"].names or ()) == {*PODS[:20], *names[1:4]}
    assert set(book.marks) == {names[0], *names[4:]}


def test_each_reason_names_the_limit_of_its_burst_and_the_end_of_the_delay() -> None:
    _, bench = small(12, CANDIDATE + 7200)
    bench.runs |= {name: [CANDIDATE] for name in PODS[20:40]} | {PODS[50]: [CANDIDATE + 3600]}
    bench.allocations, bench.usual_at = 200, lambda wall: 3.0 if wall < WALL - 9000 else None
    bench.run()
    reasons = {decision.name: decision.reason for decision in bench.cycle.decisions}
    assert "more than 9 GPUs became idle within 15m (3 are usual at that hour)" in reasons[PODS[0]]
    assert "more than 10 GPUs became idle within 15m, perhaps because of one fault" in reasons[PODS[20]]
    assert reasons[PODS[20]].endswith("perhaps because of one fault; it is marked after at most 5h of idle time")
    assert reasons[PODS[50]] == "its one GPU idle for 120 min"
    assert bench.cycle.frozen["correlated"].text == "32 of 200 GPUs became idle at about the same time"


def idle(name: str, since: float, units: int, group: str) -> Decision:
    made = holder(HolderName("kubernetes", "ml", name), [80_000.0] * units)
    found = decide_holder(made, WALL, POLICY, windows_of(POLICY))
    return found._replace(idle_since_wall=since, around=Surroundings(group=group))


@given(
    st.lists(st.tuples(st.integers(0, 9000), st.integers(0, 4), st.integers(1, 9)), max_size=40),
    st.integers(0, 400),
)
def test_bursts_cover_each_window_with_too_many_gpus_and_at_most_15_minutes_before_and_after(
    begun: list[tuple[int, int, int]], allocations: int
) -> None:
    """The simple check takes quadratic time."""
    limit = max(TOGETHER_MIN, POLICY.freeze_share * allocations)
    within_any, near = set[int](), set[int]()
    for last, _, _ in begun:
        within = [each for each in begun if last - TOGETHER_S <= each[0] <= last]
        total = sum(units for _, _, units in within)
        largest = max(sum(units for _, of, units in within if of == group) for _, group, _ in within)
        if total - largest > limit:
            within_any |= {since for since, _, _ in within}
            near |= {since for since, _, _ in begun if last - 2 * TOGETHER_S <= since <= last + TOGETHER_S}
    rows = [(float(since), idle(f"p{at}", since, units, f"g{group}")) for at, (since, group, units) in enumerate(begun)]
    bursts = find_bursts(rows, allocations, POLICY)
    covered = {since for since, _, _ in begun if any(burst.covers(since) for burst in bursts)}
    assert within_any <= covered <= near


def test_more_than_three_times_the_usual_number_is_a_fault_although_below_the_share() -> None:
    _, bench = small(20)
    bench.allocations = 1000  # the share allows 50 GPUs
    hours: list[float] = []

    def usual(wall: float) -> float:
        hours.append(wall)
        return days

    bench.usual_at, days = usual, 6.0
    bench.run()
    assert bench.cycle.frozen["correlated"].text.startswith("20 of 1000 GPUs")
    assert set(hours) == {WALL - CANDIDATE}, "the hour at which they became idle, not the present one"
    days = 7.0
    assert (bench.run(), len(bench.cycle.frozen)) == ([], 1), "a burst of an earlier cycle still counts"
    bench.restart()
    assert (len(bench.run()), bench.cycle.frozen) == (20, {})


def test_a_tenant_that_sets_and_removes_an_opt_out_makes_no_label_of_another_flap() -> None:
    book = Book()
    bench = Bench(book)
    bench.allocations = 100
    other = HolderName("kubernetes", "other", "job")
    own = [HolderName("kubernetes", "own", f"p{number}") for number in range(10)]
    changes = 0
    for minute in range(1, 8 * 60):
        bench.clock.advance(60.0)
        bench.runs = {name: [60.0 * minute] for name in (other, *own)}
        wish = Surroundings(exemption=Exemption("pod", "asked")) if minute // 12 % 2 else Surroundings()
        book.around = dict.fromkeys(own, wish)
        before = book.marks.get(other)
        bench.run()
        changes += book.marks.get(other) != before
    assert changes <= 3, "a mark before the first burst, its withdrawal, and the mark after it"
    assert book.marks[other] == "underused"


def test_a_burst_is_remembered_while_its_holders_are_unknown_for_a_moment() -> None:
    book = Book()
    bench = Bench(book)
    bench.allocations = 100
    other = HolderName("kubernetes", "other", "job")
    own = [HolderName("kubernetes", "own", f"p{number}") for number in range(10)]
    bench.runs = {name: [CANDIDATE] for name in (other, *own)}
    assert bench.run() == []
    bench.runs = {}
    bench.clock.advance(60.0)
    bench.run()
    bench.runs = {other: [CANDIDATE + 120.0]}
    bench.clock.advance(60.0)
    assert (bench.run(), other in book.marks) == ([], False)


def test_a_second_burst_soon_after_the_first_covers_its_own_holders() -> None:
    book = Book()
    bench = Bench(book)
    bench.allocations = 100
    late = HolderName("kubernetes", "late", "job")
    wall_s = CANDIDATE + 1000.0  # the idle runs begin at 0 s, 290 s and 1,180 s: only the second burst covers the last
    runs = {0.0: "first", 290.0: "second"}
    bench.runs = {
        HolderName("kubernetes", f"{name}-{number}", "job"): [wall_s - at + 180.0]
        for at, name in runs.items()
        for number in range(10)
    }
    bench.runs[late] = [wall_s - 1180.0 + 180.0]
    assert bench.run() == []
    bench.clock.advance(30.0)
    assert (bench.run(), late in book.marks) == ([], False)


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
