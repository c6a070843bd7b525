"""The ledger's arithmetic: the rules of the ledger, one by one."""

from __future__ import annotations

import pytest
from tests.unit.ledger.ledger_bench import JOB, POD, START, UNIT, WALL, Bench

from gpu_exporter.agent.ledger.accounts import ConfirmedAllocation
from gpu_exporter.common.model.holders import Allocation, HolderKey
from gpu_exporter.common.model.readings import Activity, Span


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_busy_time_is_the_integral_of_utilization(bench: Bench) -> None:
    bench.observe(10, 0.5)
    bench.observe(10, 1.0)
    totals = bench.ledger.unit_totals(UNIT, bench.now, bench.wall)
    assert totals is not None
    assert (totals.busy_s, totals.observed_s, totals.idle_s) == pytest.approx((15.0, 20.0, 0.0))


def test_time_is_never_counted_twice(bench: Bench) -> None:
    for _ in range(2):
        bench.ledger.record(Activity(UNIT, (Span(START, START + 10, 1.0),), 1))
    bench.ledger.record(Activity(UNIT, (Span(START + 5, START + 15, 1.0),), 1))
    totals = bench.ledger.unit_totals(UNIT, START + 15, WALL)
    assert totals is not None
    assert totals.observed_s == pytest.approx(15.0)


def test_time_before_the_exporters_start_is_not_counted(bench: Bench) -> None:
    bench.ledger.record(Activity(UNIT, (Span(START - 20, START - 10, 0.0), Span(START - 2, START + 1, 0.0)), 2))
    totals = bench.ledger.unit_totals(UNIT, START + 1, WALL)
    assert totals is not None
    assert totals.idle_s == pytest.approx(1.0)


def test_zero_utilization_with_another_active_witness_is_neither_busy_nor_idle(bench: Bench) -> None:
    bench.poll(POD)
    bench.run(15, 0.0, POD, other=("pcie",))
    bench.run(5, 0.0, POD, other=("pcie", "power"))
    totals = bench.totals(POD)
    assert (totals.busy_s, totals.idle_s, totals.idle_run_s) == (0.0, 0.0, 0.0)
    assert totals.observed_s == pytest.approx(20.0)


def test_a_unit_reports_which_witness_kept_it_from_being_idle(bench: Bench) -> None:
    assert bench.unit() is None
    bench.run(10, 0.0, POD)
    assert (bench.unit().other_s, bench.unit().active_by) == ({}, ())
    bench.run(15, 0.0, POD, other=("pcie",))
    bench.run(5, 0.0, POD, other=("power", "pcie"))
    seen = bench.unit()
    assert seen.other_s == pytest.approx({"pcie": 15.0, "power": 5.0})
    assert seen.active_by == ("power", "pcie")
    bench.run(5, 0.5, POD, other=("pcie",))  # busy time is not other activity
    bench.run(5, 0.0, POD)
    assert (bench.unit().other_s, bench.unit().active_by) == (seen.other_s, ("utilization",))
    late = Span(START + 12.0, START + 13.0, 0.0, ("encoder",))  # of an earlier time
    bench.ledger.record(Activity(UNIT, (late,), 3))
    assert (bench.unit().other_s, bench.unit().active_by) == (seen.other_s, ("utilization",))


def test_a_holder_is_charged_from_the_first_poll_that_shows_it(bench: Bench) -> None:
    bench.observe(7, 1.0)
    bench.poll(POD)
    bench.run(10, 1.0, POD)
    assert bench.totals(POD).busy_s == pytest.approx(10.0)
    assert bench.totals(POD).held_s == pytest.approx(10.0)


def test_the_interval_of_a_change_is_charged_to_no_holder(bench: Bench) -> None:
    other = POD._replace(key=HolderKey("kubernetes", "uid-2/main"))
    bench.poll(POD)
    bench.run(10, 1.0, POD)
    bench.observe(5, 1.0)
    bench.poll(other)
    bench.run(10, 1.0, other)
    assert bench.totals(other).busy_s == pytest.approx(10.0)
    assert bench.ledger.holder_totals(Allocation(UNIT, POD), bench.now, bench.wall) is None


def test_a_slurm_job_is_charged_from_its_start(bench: Bench) -> None:
    bench.poll()
    bench.observe(5, 1.0)
    bench.poll(JOB, start=bench.now - 3.0)
    bench.run(10, 1.0, JOB)
    assert bench.totals(JOB).busy_s == pytest.approx(13.0)


def test_a_slurm_job_is_never_charged_for_the_time_of_the_previous_job(bench: Bench) -> None:
    """The controller's clock may be off: time that one job was confirmed to hold does not belong to the next job."""
    second = JOB._replace(key=HolderKey("slurm", "lab/8/0/200"), job_id="8")
    bench.poll(JOB)
    bench.run(20, 1.0, JOB)
    bench.observe(5, 1.0)
    bench.poll(second, start=bench.now - 12.0)
    bench.run(10, 1.0, second)
    assert bench.totals(second).busy_s == pytest.approx(15.0)


def test_a_slurm_job_is_never_charged_before_the_exporters_start(bench: Bench) -> None:
    bench.observe(5, 0.0)
    bench.poll(JOB, start=START - 3_600)
    assert bench.totals(JOB).idle_run_s <= 5.0
    assert bench.totals(JOB).held_s <= 5.0


def test_a_new_incarnation_under_the_same_name_starts_at_zero(bench: Bench) -> None:
    again = POD._replace(key=HolderKey("kubernetes", "uid-2/main"))
    bench.poll(POD)
    bench.run(300, 0.0, POD)
    bench.poll(again)
    bench.run(10, 0.0, again)
    assert bench.totals(again).idle_run_s <= 10.0


def test_an_unconfirmed_mapping_keeps_its_holder_but_charges_nothing(bench: Bench) -> None:
    bench.poll(POD)
    bench.run(20, 0.0, POD)
    confirmed = bench.now
    for _ in range(6):
        bench.observe(5, 0.0)
        bench.poll(POD, confirmed=confirmed)
    before = bench.totals(POD)
    assert before.idle_s == pytest.approx(20.0)
    bench.poll(POD)  # the source answers again after more than three polls: the time in between is unconfirmed
    assert bench.totals(POD).idle_s == pytest.approx(20.0)
    assert bench.totals(POD).held_s == pytest.approx(50.0)


def test_a_short_outage_of_the_source_loses_nothing(bench: Bench) -> None:
    bench.poll(POD)
    bench.run(20, 0.0, POD)
    confirmed = bench.now
    bench.observe(5, 0.0)
    bench.poll(POD, confirmed=confirmed)
    bench.observe(5, 0.0)
    bench.poll(POD)
    assert bench.totals(POD).idle_s == pytest.approx(30.0)


def test_samples_that_arrive_after_their_poll_are_charged_at_the_next_poll(bench: Bench) -> None:
    bench.poll(POD)
    for _ in range(10):
        bench.now += 5.0
        late = bench.now - 0.5  # the driver's last sample ended half a second before the poll
        bench.ledger.record(Activity(UNIT, (Span(bench.now - 5.5, late, 0.0),), 3))
        bench.poll(POD)
    assert bench.totals(POD).observed_s == pytest.approx(49.5)


def test_the_idle_run_survives_a_short_gap_without_growing_by_it(bench: Bench) -> None:
    bench.poll(POD)
    bench.run(100, 0.0, POD)
    for _ in range(10):
        bench.silence(5)
        bench.poll(POD)
    bench.run(10, 0.0, POD)
    assert bench.totals(POD).idle_run_s == pytest.approx(110.0)


def test_more_than_a_minute_of_unknown_time_ends_the_idle_run(bench: Bench) -> None:
    bench.poll(POD)
    bench.run(100, 0.0, POD)
    for _ in range(13):
        bench.silence(5)
        bench.poll(POD)
    assert bench.totals(POD).idle_run_s is None  # unknown: 0 would mean that the holder works
    bench.run(10, 0.0, POD)
    assert bench.totals(POD).idle_run_s == pytest.approx(10.0)


def test_activity_ends_the_idle_run_before_the_next_poll(bench: Bench) -> None:
    bench.poll(POD)
    bench.run(100, 0.0, POD)
    bench.observe(1, 0.01)
    assert bench.totals(POD).idle_run_s == 0.0


def test_the_end_of_a_long_idle_run_asks_for_a_state_write(bench: Bench) -> None:
    bench.poll(POD)
    bench.run(100, 0.0, POD)
    assert not bench.ledger.long_run_ended
    bench.run(5, 0.5, POD)
    assert bench.ledger.long_run_ended


def test_activity_that_is_charged_to_no_holder_ends_the_idle_run_for_good(bench: Bench) -> None:
    """The GPU worked while the source was away: the idle run must not return with the source."""
    bench.poll(POD)
    bench.run(100, 0.0, POD)
    confirmed = bench.now
    for ratio in (0.0, 1.0, 0.0, 0.0):
        bench.observe(5, ratio)
        bench.poll(POD, confirmed=confirmed)
        if ratio:
            assert bench.totals(POD).idle_run_s == 0.0
    bench.poll(POD)
    bench.run(10, 0.0, POD)
    assert bench.totals(POD).idle_run_s <= 20.0


def test_activity_that_is_reported_late_ends_the_idle_run(bench: Bench) -> None:
    bench.poll(POD)
    bench.run(100, 0.0, POD)
    late = Span(bench.now - 8.0, bench.now - 5.0, 1.0)  # this time is already booked as idle
    bench.ledger.record(Activity(UNIT, (late,), 2))
    bench.run(5, 0.0, POD)
    assert bench.totals(POD).idle_run_s <= 10.0


def test_activity_without_any_length_ends_the_idle_run(bench: Bench) -> None:
    """Power or a rate above 0 while no span covers the time: nothing is booked, and no time is idle."""
    bench.poll(POD)
    bench.run(100, 0.0, POD)
    bench.ledger.record(Activity(UNIT, (Span(bench.now, bench.now, 0.0, ("power",)),), 0))
    totals = bench.totals(POD)
    assert (totals.idle_run_s, totals.observed_s) == (0.0, 100.0)
    unit = bench.ledger.unit_totals(UNIT, bench.now, bench.wall)
    assert unit is not None
    assert unit.witnesses == 3


def test_activity_before_the_first_poll_after_a_restart_ends_the_restored_idle_run(bench: Bench) -> None:
    bench.poll(POD)
    bench.run(100, 0.0, POD)
    again = Bench()
    again.ledger.restore({}, bench.ledger.holders())
    again.ledger.started = again.now = bench.now + 10
    again.observe(8, 1.0)
    again.poll(POD)
    again.run(5, 0.0, POD)
    assert again.totals(POD).idle_run_s <= 5.0


def test_a_suspended_job_collects_no_idle_time_and_its_idle_run_restarts(bench: Bench) -> None:
    def poll(running: bool) -> None:
        allocation = Allocation(UNIT, JOB, running=running)
        bench.ledger.charge_poll(bench.now, bench.wall, [ConfirmedAllocation(allocation, bench.now, None)])

    poll(True)
    bench.observe(5, 0.0)
    poll(True)
    for _ in range(10):
        bench.observe(5, 0.0)
        poll(False)
    totals = bench.totals(JOB)
    assert (totals.idle_run_s, totals.idle_s) == (None, 5.0)
    bench.observe(5, 0.0)
    poll(True)
    bench.observe(5, 0.0)
    poll(True)
    assert bench.totals(JOB).idle_run_s == pytest.approx(5.0)
