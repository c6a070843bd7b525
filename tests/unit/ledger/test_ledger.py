"""The ledger's arithmetic: the rules of the ledger, one by one."""

from __future__ import annotations

from typing import Any

import pytest

from gpu_exporter.ledger.accounts import ConfirmedAllocation, UnitAccount
from gpu_exporter.ledger.ledger import Ledger, LedgerRules
from gpu_exporter.model.holders import Allocation, Holder, HolderKey
from gpu_exporter.model.readings import Activity, Span
from gpu_exporter.model.totals import HolderTotals
from gpu_exporter.model.units import UnitId

UNIT = UnitId("GPU-0")
RULES = LedgerRules(
    poll_interval_s=5.0, stale_after_polls=3, low_ratio=0.1, high_ratio=0.7, idle_run_unknown_reset_s=60.0
)
START = 1_000.0
WALL = 1_700_000_000.0
POD = Holder(HolderKey("kubernetes", "uid-1/main"), namespace="ml", pod="train-0", container="main")
JOB = Holder(HolderKey("slurm", "lab/7/0/100"), job_id="7")


class Bench:
    """A ledger with the rhythm of a node: one span every second, one poll every five seconds."""

    def __init__(self) -> None:
        self.ledger = Ledger(RULES, START)
        self.now = START

    def observe(self, seconds: int, ratio: float, *, other: tuple[str, ...] = (), witnesses: int = 3) -> None:
        for _ in range(seconds):
            self.now += 1.0
            span = Span(self.now - 1.0, self.now, ratio, other)
            self.ledger.record(Activity(UNIT, (span,), witnesses))

    def silence(self, seconds: float) -> None:
        self.now += seconds

    def poll(
        self, *holders: Holder, confirmed: float | None = None, start: float | None = None, renewed_s: float = 0.0
    ) -> None:
        when = self.now if confirmed is None else confirmed
        held = [ConfirmedAllocation(Allocation(UNIT, h), when, start, renewed_s=renewed_s) for h in holders]
        self.ledger.charge_poll(self.now, self.wall, held)

    def run(self, seconds: int, ratio: float, *holders: Holder, other: tuple[str, ...] = ()) -> None:
        for _ in range(0, seconds, 5):
            self.observe(5, ratio, other=other)
            self.poll(*holders)

    def unit(self) -> Any:
        return self.ledger.unit_totals(UNIT, self.now, self.wall)

    @property
    def wall(self) -> float:
        return WALL + self.now - START

    def totals(self, holder: Holder) -> HolderTotals:
        totals = self.ledger.holder_totals(Allocation(UNIT, holder), self.now, self.wall)
        assert totals is not None
        return totals


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
    bench.ledger.record(Activity(UNIT, (Span(START - 20, START - 10, 0.0), Span(START - 2, START + 1, 0.0)), 1))
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


def test_a_holder_that_its_source_left_out_for_a_moment_continues_its_account(bench: Bench) -> None:
    bench.poll(POD)
    bench.run(100, 0.5, POD)
    bench.observe(5, 0.5)
    bench.poll()
    bench.observe(5, 0.5)
    bench.poll(POD)
    assert bench.totals(POD).busy_s == pytest.approx(50.0)
    assert bench.totals(POD).idle_run_s == 0.0
    assert bench.totals(POD).start_wall == pytest.approx(WALL)
    named = POD._replace(key=HolderKey("kubernetes", "ml/train-0/main"), identity="name")
    bench.poll(named)
    bench.run(10, 0.5, named)
    bench.poll()
    bench.observe(5, 0.5)
    bench.poll(named)
    assert bench.totals(named).busy_s == 0.0  # it may be another pod with that name


def test_readings_that_arrive_after_a_holders_last_poll_are_still_charged_to_it(bench: Bench) -> None:
    """Because of a long cycle and the lag of the driver's ring, the pod has left the list when its last seconds are
    read.
    """
    bench.poll(POD)
    bench.run(10, 1.0, POD)
    bench.silence(5.0)
    bench.poll(POD)
    bench.silence(5.0)
    bench.poll()
    late = Span(bench.now - 10.0, bench.now - 2.0, 1.0)  # five seconds of its time, three unattributed
    bench.ledger.record(Activity(UNIT, (late,), 3))
    bench.silence(5.0)
    bench.poll()
    bench.poll(POD)
    assert bench.totals(POD).busy_s == pytest.approx(15.0)


def test_readings_that_arrive_much_later_are_unattributed(bench: Bench) -> None:
    bench.poll(POD)
    bench.run(10, 1.0, POD)
    bench.silence(5.0)
    bench.poll(POD)
    left = bench.now
    bench.silence(5.0)
    bench.poll()
    bench.silence(15.0)
    bench.poll()
    bench.ledger.record(Activity(UNIT, (Span(left - 5.0, left, 1.0),), 3))
    bench.poll()
    bench.poll(POD)
    assert bench.totals(POD).busy_s == pytest.approx(10.0)


def test_a_unit_with_activity_dated_in_the_future_still_reports_what_keeps_it_from_being_idle(bench: Bench) -> None:
    """A state file of a machine whose clock was ahead."""
    account = UnitAccount(covered_until=START, last_active=START + 60.0)
    bench.ledger.restore({UNIT: account}, {})
    bench.observe(10, 0.0, other=("pcie",))
    assert (bench.unit().other_s, bench.unit().active_by) == ({"pcie": 10.0}, ())


def test_energy_is_charged_to_the_holder_of_the_time(bench: Bench) -> None:
    bench.poll(POD)
    joules = 0.0
    bench.ledger.record_energy(UNIT, bench.now, joules, 400.0)
    for _ in range(4):
        bench.observe(5, 1.0)
        joules += 500.0
        bench.ledger.record_energy(UNIT, bench.now, joules, 400.0)
        bench.poll(POD)
    assert bench.totals(POD).energy_j == pytest.approx(2_000.0)


def test_an_energy_counter_that_fell_adds_nothing(bench: Bench) -> None:
    bench.poll(POD)
    for joules in (1_000.0, 10.0, 20.0):
        bench.observe(5, 1.0)
        bench.ledger.record_energy(UNIT, bench.now, joules, 400.0)
        bench.poll(POD)
    assert bench.totals(POD).energy_j == pytest.approx(10.0)


def test_last_active_is_the_start_until_there_is_activity(bench: Bench) -> None:
    bench.poll(POD)
    bench.run(20, 0.0, POD)
    assert bench.totals(POD).last_active_wall == bench.totals(POD).start_wall
    bench.run(5, 0.5, POD)
    assert bench.totals(POD).last_active_wall == pytest.approx(bench.wall)


OTHER_UNIT = UnitId("GPU-1")
MORE = Holder(HolderKey("slurm", "lab/8/0/100"), job_id="8")
LATER = Holder(HolderKey("slurm", "lab/9/0/100"), job_id="9")


def test_activity_ends_the_idle_runs_of_its_own_unit_only(bench: Bench) -> None:
    """For any order of the holders."""
    allocations = [Allocation(OTHER_UNIT, MORE), Allocation(UNIT, POD)]
    for _ in range(20):
        bench.observe(5, 0.0)
        idle = Activity(OTHER_UNIT, (Span(bench.now - 5.0, bench.now, 0.0),), 3)
        bench.ledger.record(idle)
        confirmed = [ConfirmedAllocation(allocation, bench.now, None) for allocation in allocations]
        bench.ledger.charge_poll(bench.now, bench.wall, confirmed)
    bench.observe(1, 1.0)
    runs = [bench.ledger.holder_totals(each, bench.now, bench.wall) for each in allocations]
    assert [totals.idle_run_s for totals in runs if totals is not None] == [pytest.approx(95.0, abs=5.1), 0.0]


def test_activity_dates_the_holder_before_the_next_poll(bench: Bench) -> None:
    bench.run(20, 0.0, POD)
    bench.observe(1, 1.0)
    assert bench.totals(POD).last_active_wall == bench.wall


def test_a_job_is_charged_from_no_earlier_than_another_holder_was_last_seen_on_its_gpu(bench: Bench) -> None:
    bench.run(10, 0.5, JOB)
    bench.silence(4.0)
    bench.poll(JOB, MORE, start=bench.now - 3.0)  # JOB still holds the GPU
    assert bench.totals(MORE).held_s == 0.0
    bench.silence(4.0)
    confirmed = [
        ConfirmedAllocation(Allocation(UNIT, JOB), bench.now, None),
        ConfirmedAllocation(Allocation(UNIT, MORE), bench.now - 2.0, None),
    ]
    bench.ledger.charge_poll(bench.now, bench.wall, confirmed)
    bench.silence(3.0)
    bench.poll(LATER, start=bench.now - 4.0)  # of the two holders that are gone, the last one seen counts
    assert bench.totals(LATER).held_s == 3.0


def test_a_job_that_began_without_polls_is_charged_only_for_time_that_could_be_confirmed(bench: Bench) -> None:
    bench.run(10, 0.5, JOB)
    bench.silence(200.0)
    bench.poll(MORE, start=bench.now - 100.0)
    assert bench.totals(MORE).held_s == RULES.longest_unconfirmed_s()


def test_a_job_whose_end_is_reported_late_is_charged_for_all_of_its_time(bench: Bench) -> None:
    """The job's start and end are dated. Its time without readings is held, and not known."""
    bench.run(10, 0.5, JOB)
    bench.silence(200.0)
    late = MORE._replace(user="ada")
    ended = [ConfirmedAllocation(Allocation(UNIT, late), bench.now - 40.0, bench.now - 100.0)]
    bench.ledger.charge_poll(bench.now, bench.wall, [], ended)
    tenants = {tenant.user: totals for tenant, totals in bench.ledger.tenants.totals()}
    assert tenants["ada"].held_s == 60.0


def test_an_end_that_is_reported_after_the_gpu_changed_hands_takes_no_time_from_the_next_holder(bench: Bench) -> None:
    """The holder until then was counted under another name, or under no name."""
    bench.run(100, 0.5, JOB)
    end = bench.now
    bench.silence(5.0)
    bench.poll()
    ended = [ConfirmedAllocation(Allocation(UNIT, MORE), end, end - 99.0)]
    bench.ledger.charge_poll(bench.now, bench.wall, [], ended)
    held = sum(totals.held_s for _, totals in bench.ledger.tenants.totals())
    assert held <= 105.0


def test_the_start_of_a_pod_is_the_time_of_the_question_to_its_source(bench: Bench) -> None:
    bench.silence(5.0)
    bench.poll(POD, confirmed=bench.now - 2.0)
    assert bench.totals(POD).start_wall == bench.wall - 2.0
    dated = MORE._replace(start_wall=WALL + 0.123456)
    bench.poll(dated)
    assert bench.totals(dated).start_wall == WALL + 0.123


def test_a_start_that_is_no_longer_reported_remains(bench: Bench) -> None:
    allocation = Allocation(UNIT, POD)
    for working in (bench.now, None, bench.now):
        bench.observe(5, 0.0)
        bench.ledger.charge_poll(bench.now, bench.wall, [ConfirmedAllocation(allocation, bench.now, None, working)])
    assert bench.totals(POD).idle_run_s == 10.0


def test_the_records_of_a_removed_instance_are_dropped(bench: Bench) -> None:
    gone, silent = UnitId("GPU-0", "MIG-1"), UnitId("GPU-0", "MIG-2")
    bench.ledger.record(Activity(gone, (Span(bench.now, bench.now + 1.0, 0.0),), 2))
    bench.ledger.record(Activity(silent, (), 2))  # no reading ever covered any time
    bench.silence(2000.0)
    bench.poll()
    assert not {gone, silent} & bench.ledger.units.keys()


def run_renewed(bench: Bench, minutes: int, ratio: float, renewed_s: float = 60.0) -> list[float | None]:
    """A job whose source confirms it every minute, while polls run every 5 s. Returns its idle run after each poll."""
    runs: list[float | None] = []
    for _ in range(minutes):
        confirmed = bench.now
        for _ in range(12):
            bench.poll(JOB, confirmed=confirmed, start=START, renewed_s=renewed_s)
            runs.append(bench.totals(JOB).idle_run_s)
            bench.observe(5, ratio)
    return runs


def test_a_holder_that_is_confirmed_every_minute_is_charged_for_all_its_time(bench: Bench) -> None:
    runs = run_renewed(bench, 10, 0.0)
    totals = bench.totals(JOB)
    assert (totals.held_s, totals.observed_s, totals.idle_s) == (540.0, 540.0, 540.0)  # up to the last confirmation
    assert None not in runs  # time that waits for the next confirmation is not unknown
    run_renewed(bench, 3, 1.0)
    assert bench.totals(JOB).idle_run_s == 0.0
    assert bench.totals(JOB).busy_s == pytest.approx(120.0)


def test_a_holder_that_is_confirmed_every_minute_is_unconfirmed_after_three_minutes(bench: Bench) -> None:
    run_renewed(bench, 5, 0.0)
    confirmed = bench.now
    bench.poll(JOB, confirmed=confirmed, renewed_s=60.0)
    bench.observe(121, 0.0)
    bench.poll(JOB, confirmed=confirmed, renewed_s=60.0)
    assert bench.totals(JOB).idle_run_s is None
    bench.observe(60, 0.0)
    bench.poll(JOB, renewed_s=60.0)
    totals = bench.totals(JOB)
    assert totals.held_s - totals.observed_s == pytest.approx(181.0)  # the time in between is unconfirmed


def test_activity_ends_the_idle_run_of_a_rarely_confirmed_holder_at_once(bench: Bench) -> None:
    run_renewed(bench, 5, 0.0)
    bench.observe(1, 0.5)
    assert bench.totals(JOB).idle_run_s == 0.0


@pytest.mark.parametrize("gap_s", [16, 20, 40, 60, 61])
@pytest.mark.parametrize("leaves", ["the neighbour", "no holder", "both, and one returns"])
@pytest.mark.parametrize("position", [0.0, 0.5, 1.0])
def test_work_while_holders_are_unconfirmed_ends_the_idle_runs_of_all_sharers(
    bench: Bench, gap_s: int, leaves: str, position: float
) -> None:
    """A claim of two pods: no id shows that they share the GPU. One pod leaves while attribution is away, and the other
    pod worked in that time.
    """
    bench.run(300, 0.0, POD, JOB)
    assert bench.totals(POD).idle_run_s == pytest.approx(300, abs=6)
    before = round(position * (gap_s - 5))
    bench.observe(before, 0.0)
    bench.observe(5, 0.9)
    bench.observe(gap_s - 5 - before, 0.0)
    if leaves == "both, and one returns":
        bench.poll()
    bench.poll(*((POD,) if leaves != "no holder" else (POD, JOB)))
    bench.run(30, 0.0, POD)
    since_s = gap_s - 5 - before + 30
    assert bench.totals(POD).idle_run_s <= since_s + 0.001
