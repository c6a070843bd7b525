"""The ledger at the edges of a holding: gaps, late readings, restarts, rare confirmations."""

from __future__ import annotations

import pytest
from tests.unit.ledger.ledger_bench import (
    JOB,
    LATER,
    MORE,
    OTHER_UNIT,
    POD,
    START,
    UNIT,
    WALL,
    Bench,
    run_renewed,
)

from gpu_exporter.agent.ledger.accounts import ConfirmedAllocation, UnitAccount
from gpu_exporter.common.model.holders import Allocation, HolderKey
from gpu_exporter.common.model.readings import Activity, Span
from gpu_exporter.common.model.units import UnitId


@pytest.fixture
def bench() -> Bench:
    return Bench()


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


def test_a_job_that_began_without_polls_is_held_from_its_start(bench: Bench) -> None:
    bench.run(10, 0.5, JOB)
    bench.silence(200.0)
    bench.poll(MORE, start=bench.now - 100.0)
    assert (bench.totals(MORE).held_s, bench.totals(MORE).observed_s) == (100.0, 0.0)


def test_a_job_is_not_charged_from_a_question_that_was_asked_before_its_start(bench: Bench) -> None:
    """The prolog's files are read after a slow list of steps."""
    bench.observe(20, 0.5)
    bench.poll(JOB, confirmed=bench.now - 9.0, start=bench.now - 4.0)
    assert bench.totals(JOB).held_s == 0.0
    bench.run(10, 0.5, JOB)
    assert bench.totals(JOB).held_s == 14.0


@pytest.mark.parametrize(("asked_s_ago", "held_s"), [(0.0, 25.0), (20.0, 30.0)])
def test_a_job_is_held_from_its_start_unless_the_gpu_was_free_when_the_sources_were_asked(
    bench: Bench, asked_s_ago: float, held_s: float
) -> None:
    bench.observe(60, 0.5)
    start = bench.now - 20.0
    bench.ledger.charge_poll(bench.now, bench.wall, [], asked=bench.now - asked_s_ago)
    bench.silence(10.0)
    bench.poll(MORE, start=start)
    assert bench.totals(MORE).held_s == held_s


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
