"""Idle runs, changes of holders, and what is kept of holders that are gone."""

from __future__ import annotations

import math

import pytest
from tests.unit.ledger.ledger_bench import JOB, POD, START, UNIT, Bench

from gpu_exporter.agent.ledger.ledger import KEEP_ABSENT, KEEP_ABSENT_S, WAIT_S, ConfirmedAllocation
from gpu_exporter.agent.ledger.records import HolderPresence
from gpu_exporter.common.model.holders import Allocation, HolderKey
from gpu_exporter.common.model.readings import Activity, Span
from gpu_exporter.common.model.totals import HolderTotals
from gpu_exporter.common.model.units import UnitId

OTHER = POD._replace(key=HolderKey("kubernetes", "uid-2/main"))


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_the_interval_in_which_a_second_holder_leaves_is_charged_to_neither_holder(bench: Bench) -> None:
    bench.poll(POD, OTHER)
    bench.observe(5, 1.0)  # it is unknown whose work this was
    bench.poll(POD)
    assert bench.totals(POD).observed_s == 0.0
    bench.run(10, 0.5, POD)
    assert (bench.totals(POD).observed_s, bench.totals(POD).busy_s) == pytest.approx((10.0, 5.0))


def test_the_interval_in_which_a_second_holder_starts_is_charged_to_neither_holder(bench: Bench) -> None:
    bench.poll(POD)
    bench.observe(5, 1.0)
    bench.poll(POD, OTHER)
    assert bench.totals(POD).observed_s == bench.totals(OTHER).observed_s == 0.0


def test_held_time_grows_while_the_holder_is_not_shown_so_coverage_falls(bench: Bench) -> None:
    bench.poll(POD)
    bench.run(100, 0.5, POD)
    for _ in range(10):
        bench.observe(5, 0.5)
        bench.poll()
    bench.run(50, 0.5, POD)
    totals = bench.totals(POD)
    assert totals.held_s == pytest.approx(200.0)
    assert totals.observed_s == pytest.approx(145.0)  # without the 50 s, and without the interval of its return


@pytest.mark.parametrize("ratio", [0.0, 1.0])
@pytest.mark.parametrize("polls", [1, 3, 20])
def test_a_holder_that_returns_does_not_keep_its_earlier_idle_run(bench: Bench, ratio: float, polls: int) -> None:
    """The work during the holder's absence is unknown."""
    bench.poll(POD)
    bench.run(600, 0.0, POD)
    for _ in range(polls):
        bench.observe(5, ratio)
        bench.poll()
    bench.run(20, 0.0, POD)
    assert (bench.totals(POD).idle_run_s or 0.0) <= 25.0


def flap(bench: Bench, on_s: int, off_s: int, times: int) -> None:
    bench.poll(POD)
    for _ in range(times):
        bench.run(on_s, 0.0, POD)
        bench.silence(off_s)


def test_an_idle_run_with_much_unknown_time_ends_although_no_gap_is_long(bench: Bench) -> None:
    flap(bench, on_s=70, off_s=50, times=60)
    bench.run(70, 0.0, POD)
    run = bench.totals(POD).idle_run_s
    assert run is not None
    assert run <= 3 * 70.0


def test_an_idle_run_with_little_unknown_time_continues(bench: Bench) -> None:
    flap(bench, on_s=600, off_s=50, times=12)
    bench.run(5, 0.0, POD)
    assert bench.totals(POD).idle_run_s == pytest.approx(12 * 600 + 5, abs=12 * 16)


def test_unknown_time_of_an_earlier_idle_run_does_not_count_in_the_next(bench: Bench) -> None:
    flap(bench, on_s=70, off_s=50, times=1)
    bench.run(5, 1.0, POD)
    bench.run(70, 0.0, POD)
    bench.silence(50)
    bench.run(70, 0.0, POD)
    assert bench.totals(POD).idle_run_s == pytest.approx(140.0, abs=6.0)


def test_an_idle_run_has_the_lowest_number_of_witnesses(bench: Bench) -> None:
    bench.poll(POD)
    bench.observe(5, 0.0, witnesses=4)
    bench.poll(POD)
    assert bench.totals(POD).idle_run_witnesses == 4
    bench.observe(5, 0.0, witnesses=1)
    bench.poll(POD)
    for _ in range(20):
        bench.observe(5, 0.0, witnesses=5)
        bench.poll(POD)
    assert bench.totals(POD).idle_run_witnesses == 1
    bench.run(5, 0.5, POD)
    assert bench.totals(POD).idle_run_witnesses == 0
    bench.run(10, 0.0, POD)
    assert bench.totals(POD).idle_run_witnesses == 3


class Container:
    """Polls of one holder whose container started at a moment of the ledger's clock, or has not started."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.begun = math.inf

    def run(self, seconds: int, ratio: float = 0.0) -> HolderTotals:
        for _ in range(0, seconds, 5):
            self.bench.observe(5, ratio)
            entry = ConfirmedAllocation(Allocation(UNIT, POD), self.bench.now, None, self.begun)
            self.bench.ledger.charge_poll(self.bench.now, self.bench.wall, [entry])
        return self.bench.totals(POD)


def test_time_before_the_container_began_is_idle_time_but_not_an_idle_run(bench: Bench) -> None:
    container = Container(bench)
    staging = container.run(900)
    assert (staging.idle_run_s, staging.idle_s) == (None, pytest.approx(895.0))
    container.begun = bench.now - 2.0
    assert container.run(100).idle_run_s == pytest.approx(100.0, abs=3.0)


def test_a_restart_of_the_container_restarts_the_idle_run(bench: Bench) -> None:
    container = Container(bench)
    container.begun = bench.now
    assert container.run(600).idle_run_s == pytest.approx(595.0)
    container.begun += 0.4  # read again from a wall clock that moved
    assert container.run(100).idle_run_s == pytest.approx(695.0)
    container.begun = bench.now
    assert container.run(50).idle_run_s == pytest.approx(50.0)


def test_absent_holders_are_kept_for_a_while_and_in_limited_number(bench: Bench) -> None:
    def pod(number: int) -> object:
        return POD._replace(key=HolderKey("kubernetes", f"uid-{number}/main"))

    for number in range(200):
        bench.observe(5, 0.0)
        bench.poll(pod(number))
    assert len(bench.ledger.holders(HolderPresence.LEAVING, HolderPresence.ABSENT)) == KEEP_ABSENT
    bench.observe(5, 0.0)
    bench.poll(pod(198))  # one of the last absent holders continues its account
    assert bench.totals(pod(198)).held_s == pytest.approx(10.0)
    for _ in range(200):
        bench.observe(5, 0.0)
        bench.poll(pod(198))
    assert len(bench.ledger.holders(HolderPresence.LEAVING, HolderPresence.ABSENT)) == 0  # KEEP_ABSENT_S is over


def test_removed_instances_are_forgotten_and_gpus_are_not(bench: Bench) -> None:
    for number in range(50):
        unit = UnitId("GPU-0", f"MIG-{number}")
        bench.observe(1, 0.0)
        bench.ledger.record(Activity(unit, (Span(bench.now - 1.0, bench.now, 0.0),), 3))
    bench.silence(KEEP_ABSENT_S)
    bench.poll()
    assert set(bench.ledger.units) == {UNIT, UnitId("GPU-0", "MIG-49")}


@pytest.mark.parametrize(
    ("before_s", "held_s", "known_s"), [(7.0, 7.0, 7.0), (14.0, 14.0, 14.0), (50.0, 50.0, 15.0), (-5.0, 0.0, 0.0)]
)
def test_a_slurm_job_is_held_from_its_start_and_known_no_earlier_than_a_poll_can_confirm(
    bench: Bench, before_s: float, held_s: float, known_s: float
) -> None:
    """`start` may be in the future, because the controller has its own clock."""
    bench.observe(100, 1.0)
    bench.poll(JOB, start=bench.now - before_s)
    totals = bench.totals(JOB)
    assert (totals.held_s, totals.busy_s) == pytest.approx((held_s, known_s))


def test_energy_of_the_interval_in_which_a_job_began_is_divided_by_time(bench: Bench) -> None:
    bench.ledger.record_energy(UNIT, bench.now, 0.0, 400.0)
    bench.observe(10, 1.0)
    bench.ledger.record_energy(UNIT, bench.now, 100.0, 400.0)
    bench.poll(JOB, start=bench.now - 4.0)
    assert bench.totals(JOB).energy_j == pytest.approx(40.0)
    bench.observe(5, 1.0)
    bench.ledger.record_energy(UNIT, bench.now, 150.0, 400.0)
    bench.poll(JOB, confirmed=bench.now - 1.0)
    assert bench.totals(JOB).energy_j == pytest.approx(80.0)
    bench.poll(JOB)
    assert bench.totals(JOB).energy_j == pytest.approx(90.0)


def test_a_sample_is_charged_for_the_part_that_the_holder_held(bench: Bench) -> None:
    bench.now += 10.0
    bench.poll(POD)
    bench.now += 4.0
    bench.ledger.record(Activity(UNIT, (Span(START + 6.0, START + 16.0, 0.5),), 3))
    bench.poll(POD)  # held from 10 to 14
    assert (bench.totals(POD).observed_s, bench.totals(POD).busy_s) == pytest.approx((4.0, 2.0))
    bench.now += 6.0
    bench.poll(POD)  # the remaining part of the sample, to 16
    assert (bench.totals(POD).observed_s, bench.totals(POD).busy_s) == pytest.approx((6.0, 3.0))


def test_idle_time_before_activity_that_came_later_is_in_no_idle_run(bench: Bench) -> None:
    bench.poll(POD)
    bench.observe(4, 0.0)
    bench.ledger.record(Activity(UNIT, (Span(bench.now, bench.now, 0.0, ("power",)),), 3))
    bench.observe(1, 0.0)
    bench.poll(POD)
    totals = bench.totals(POD)
    assert (totals.idle_s, totals.idle_run_s) == pytest.approx((5.0, 1.0))


def test_time_below_the_low_ratio_and_from_the_high_ratio_is_counted(bench: Bench) -> None:
    bench.poll(POD)
    for ratio in (0.0, 0.09, 0.1, 0.5, 0.69, 0.7, 1.0):
        bench.run(10, ratio, POD)
    totals = bench.totals(POD)
    assert (totals.low_s, totals.high_s) == pytest.approx((20.0, 20.0))


def test_a_single_holder_of_a_time_slice_is_not_charged(bench: Bench) -> None:
    """Other holders may start and end between two polls."""
    for _ in range(5):
        bench.observe(5, 1.0)
        entry = ConfirmedAllocation(Allocation(UNIT, POD, share="time_slice"), bench.now, None)
        bench.ledger.charge_poll(bench.now, bench.wall, [entry])
    assert bench.totals(POD).observed_s == 0.0
    assert bench.totals(POD).held_s == pytest.approx(20.0)


def test_the_start_is_the_schedulers_or_else_the_first_confirmation(bench: Bench) -> None:
    known = JOB._replace(start_wall=1_600_000_000.0)
    bench.now += 100.0
    bench.poll(known)
    assert bench.totals(known).start_wall == 1_600_000_000.0
    bench.poll(POD, confirmed=bench.now - 3.0)
    assert bench.totals(POD).start_wall == pytest.approx(bench.wall - 3.0)


def test_a_unit_without_any_reading_has_no_last_activity(bench: Bench) -> None:
    bench.poll(POD)
    bench.silence(5)
    bench.poll(POD)
    assert bench.totals(POD).last_active_wall is None
    assert not bench.totals(POD).known


def test_readings_wait_for_the_slowest_holder_of_their_unit(bench: Bench) -> None:
    """The readings of each of two units are cleared by its own holders."""
    second = UnitId("GPU-1")
    for _ in range(3):
        bench.observe(5, 1.0)
        bench.ledger.record(Activity(second, (Span(bench.now - 5.0, bench.now, 0.5),), 3))
        bench.ledger.charge_poll(
            bench.now,
            bench.wall,
            [
                ConfirmedAllocation(Allocation(UNIT, POD), bench.now, None),
                ConfirmedAllocation(Allocation(second, JOB), bench.now - 4.0, None),
            ],
        )
    lagging = bench.ledger.holder_totals(Allocation(second, JOB), bench.now, bench.wall)
    assert lagging is not None
    assert (lagging.observed_s, lagging.busy_s) == pytest.approx((10.0, 5.0))


def test_readings_without_a_poll_do_not_accumulate(bench: Bench) -> None:
    for second in range(5_000):
        bench.observe(1, 0.0)
        bench.ledger.record_energy(UNIT, bench.now, float(second), 400.0)
    pending = bench.ledger.units[UNIT].wait()
    assert len(pending.spans) <= WAIT_S + 1
    assert len(pending.energy) <= WAIT_S + 1


def test_the_longest_idle_run_that_ended_with_work_is_remembered(bench: Bench) -> None:
    for idle_s in (30, 70, 20):
        bench.run(idle_s, 0.0, POD)
        bench.run(5, 0.9, POD)
    assert bench.totals(POD).longest_gap_s == pytest.approx(70.0, abs=6.0)
    bench.run(300, 0.0, POD)  # this run has not ended
    assert bench.totals(POD).longest_gap_s == pytest.approx(70.0, abs=6.0)


def test_no_remembered_idle_run_contains_much_unknown_time(bench: Bench) -> None:
    bench.run(5, 0.9, POD)
    flap(bench, on_s=200, off_s=500, times=3)
    bench.run(5, 0.9, POD)
    assert 0.0 <= bench.totals(POD).longest_gap_s <= 200.0
