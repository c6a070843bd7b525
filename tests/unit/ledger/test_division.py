"""A shared GPU: what its holders did, what is unattributed, and that no working holder counts as idle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_exporter.agent.ledger.accounts import ConfirmedAllocation
from gpu_exporter.agent.ledger.ledger import Ledger, LedgerRules
from gpu_exporter.agent.ledger.records import HolderPresence
from gpu_exporter.common.model.holders import Allocation, AllocationId, Holder, HolderKey
from gpu_exporter.common.model.readings import Activity, Span, Split
from gpu_exporter.common.model.totals import HolderTotals, UnitTotals
from gpu_exporter.common.model.units import UnitId

UNIT = UnitId("GPU-0")
START, WALL = 1_000.0, 1_700_000_000.0
RULES = LedgerRules(
    poll_interval_s=5.0, stale_after_polls=3, low_ratio=0.1, high_ratio=0.7, idle_run_unknown_reset_s=60.0
)
A, B, C = (
    Holder(HolderKey("kubernetes", f"uid-{name}/main"), namespace="ml", pod=name, container="main") for name in "abc"
)


class Shared:
    """A ledger with one shared GPU: one span every second, one period and one poll every five seconds."""

    def __init__(self, *holders: Holder) -> None:
        self.ledger = Ledger(RULES, START)
        self.now = START
        self.holders = holders
        self.joules = 0.0
        self.ledger.record_energy(UNIT, self.now, 0.0, 400.0)
        self.poll()

    def poll(self, *holders: Holder) -> None:
        held = [
            ConfirmedAllocation(Allocation(UNIT, holder, "time_slice", 0.5), self.now, None)
            for holder in holders or self.holders
        ]
        self.ledger.charge_poll(self.now, WALL + self.now - START, held)

    def observe(self, unit: Sequence[float], other: tuple[str, ...] = (), watts: float = 100.0) -> None:
        """Record the utilization of the whole GPU, second by second."""
        for ratio in unit:
            self.now += 1.0
            span = Span(self.now - 1.0, self.now, ratio, other)
            self.ledger.record(Activity(UNIT, (span,), 3))
            self.joules += watts
            self.ledger.record_energy(UNIT, self.now, self.joules, 400.0)

    def period(
        self,
        unit: float | Sequence[float],
        ratios: Mapping[Holder, float] | None,
        others: float | None = None,
        other: tuple[str, ...] = (),
        watts: float = 100.0,
    ) -> None:
        """Five seconds and a poll. Without `ratios`, the driver reports nothing about processes."""
        values = [unit] * 5 if isinstance(unit, float) else unit
        begin = self.now
        self.observe(values, other, watts)
        if ratios is not None:
            split = Split(begin, self.now, {holder.key: ratio for holder, ratio in ratios.items()}, others, 0.06)
            self.ledger.record_split(UNIT, split)
        self.poll()

    def totals(self, holder: Holder) -> HolderTotals:
        totals = self.ledger.holder_totals(Allocation(UNIT, holder), self.now, WALL + self.now - START)
        assert totals is not None
        return totals

    def unit(self) -> UnitTotals:
        totals = self.ledger.unit_totals(UNIT, self.now, WALL + self.now - START)
        assert totals is not None
        return totals

    def settle(self) -> None:
        """Poll until every reading is charged to a holder or unattributed."""
        for _ in range(4):
            self.period(0.0, {}, watts=0.0)


def test_each_holder_is_charged_for_the_busy_time_of_its_own_processes() -> None:
    shared = Shared(A, B)
    for _ in range(4):
        shared.period(0.9, {A: 0.6, B: 0.3})
    for holder, ratio in ((A, 0.6), (B, 0.3)):
        totals = shared.totals(holder)
        assert (totals.busy_s, totals.observed_s, totals.idle_s) == pytest.approx((20 * ratio, 20.0, 0.0))
        assert totals.idle_run_s == 0.0
    assert shared.unit().unattributed_s == 0.0


def test_a_holder_is_idle_beside_busy_neighbours() -> None:
    shared = Shared(A, B)
    for _ in range(4):
        shared.period(0.9, {A: 0.88})
    idle = shared.totals(B)
    assert (idle.idle_s, idle.idle_run_s, idle.busy_s) == pytest.approx((20.0, 20.0, 0.0))
    assert idle.idle_run_witnesses == 2
    shared.period(0.9, {A: 0.8, B: 0.005})
    assert shared.totals(B).idle_run_s == 0.0


def test_time_in_which_the_gpu_is_at_rest_within_a_period_is_idle_for_each_holder() -> None:
    shared = Shared(A, B)
    shared.period([1.0, 0.0, 0.5, 0.5, 0.0], {A: 0.2, B: 0.2})
    for holder in (A, B):
        totals = shared.totals(holder)
        assert (totals.busy_s, totals.idle_s, totals.observed_s) == pytest.approx((1.0, 2.0, 5.0))
        assert totals.idle_run_s == pytest.approx(1.0)
    assert shared.totals(A).low_s == pytest.approx(2.0)


def test_a_gap_in_the_known_time_of_the_gpu_is_charged_to_no_holder() -> None:
    shared = Shared(A, B)
    begin = shared.now
    shared.observe([0.5] * 8)
    shared.now += 1.0
    shared.observe([0.5])
    shared.ledger.record_split(UNIT, Split(begin, shared.now, {A.key: 0.5}, None, 0.06))
    shared.poll()
    assert (shared.totals(A).observed_s, shared.totals(B).idle_s) == pytest.approx((9.0, 9.0))


def test_time_of_a_gpu_at_rest_is_idle_for_every_holder_without_a_report_about_processes() -> None:
    shared = Shared(A, B)
    for _ in range(4):
        shared.period(0.0, None)
    for holder in (A, B):
        assert (shared.totals(holder).idle_run_s, shared.totals(holder).idle_run_witnesses) == (20.0, 3)


def test_without_a_report_about_processes_work_is_unknown_and_unattributed() -> None:
    shared = Shared(A, B)
    for _ in range(4):
        shared.period(0.5, None)
    shared.settle()
    for holder in (A, B):
        totals = shared.totals(holder)
        assert (totals.busy_s, totals.observed_s, totals.held_s) == pytest.approx((0.0, 20.0, 40.0))
    assert shared.unit().unattributed_s == pytest.approx(10.0)


def test_activity_that_may_be_a_holders_own_ends_its_idle_run() -> None:
    """Unknown time alone would be bridged: a holder that works five seconds every minute would be idle for hours."""
    for ratios, others, unit in (
        (None, None, 0.5),  # the driver reports no processes
        ({A: 0.2}, 0.3, 0.5),  # a process without a holder
        ({A: 0.2}, None, 0.5),  # less than the GPU's own utilization
        ({A: 0.2, B: 0.005}, None, 0.0),  # B is listed, although the GPU reports no utilization
        ({}, 0.01, 0.0),
    ):
        shared = Shared(A, B)
        for _ in range(6):
            shared.period(0.0, {})
        assert shared.totals(B).idle_run_s == 30.0
        shared.period(unit, ratios, others)
        assert shared.totals(B).idle_run_s == 0.0, (ratios, others)
        shared.period(0.0, {})
        assert shared.totals(B).idle_run_s == 5.0


@pytest.mark.parametrize("jitter", [-2e-5, 2e-5])
def test_borders_of_periods_and_spans_may_differ_by_microseconds(jitter: float) -> None:
    shared = Shared(A, B)
    for _ in range(6):
        begin = shared.now
        shared.observe([0.5] * 5)
        split = Split(begin + jitter, shared.now - jitter, {A.key: 0.5}, None, 0.06)
        shared.ledger.record_split(UNIT, split)
        shared.poll()
    shared.observe([0.0] * 5)
    shared.poll()
    assert shared.totals(B).idle_run_s == pytest.approx(35.0, abs=0.01)


def test_activity_while_no_source_confirms_the_holders_ends_their_idle_runs() -> None:
    """The activity is early in an outage, and its readings are dropped before a source answers again."""
    for outage in (16, 40):
        shared = Shared(A, B)
        for _ in range(20):
            shared.period(0.0, {})
        confirmed = shared.now
        shared.observe([0.5] * 3 + [0.0] * (outage - 3))
        for at in range(int(confirmed) + 5, int(shared.now), 5):
            held = [ConfirmedAllocation(Allocation(UNIT, h, "time_slice", 0.5), confirmed, None) for h in (A, B)]
            shared.ledger.charge_poll(float(at), WALL, held)
        shared.poll()
        for holder in (A, B):
            assert (shared.totals(holder).idle_run_s or 0.0) <= outage - 3.0


def test_activity_ends_the_idle_run_of_an_absent_sharer() -> None:
    shared = Shared(A, B)
    for _ in range(6):
        shared.period(0.0, {})
    shared.ledger.holdings[UNIT, B.key].presence = HolderPresence.ABSENT  # as after a restart
    shared.observe([0.5])
    assert shared.ledger.holdings[UNIT, B.key].account.idle_run_s == 0.0


def test_no_holder_is_idle_while_a_process_without_a_holder_works() -> None:
    """Such a process is an MPS server, a container that a job has started, or a pid that cannot be looked up."""
    shared = Shared(A, B)
    for _ in range(4):
        shared.period(0.8, {A: 0.3}, others=0.5)
    assert (shared.totals(B).observed_s, shared.totals(B).idle_run_s) == (0.0, 0.0)
    assert shared.totals(A).busy_s == pytest.approx(20 * 0.3)
    shared.settle()
    assert shared.unit().unattributed_s == pytest.approx(20 * 0.5)


def test_no_holder_is_idle_if_the_driver_leaves_a_working_process_out() -> None:
    shared = Shared(A, B)
    shared.period(0.8, {A: 0.7})
    assert shared.totals(B).observed_s == 0.0  # a tenth of the work is unattributed
    shared.period(0.8, {})
    assert shared.totals(B).observed_s == 0.0
    shared.period(0.04, {})
    assert shared.totals(B).observed_s == 0.0  # a small amount of work must also be explained
    shared.period(0.8, {A: 0.75})
    assert shared.totals(B).idle_s == 5.0


@pytest.mark.parametrize(
    ("ratios", "others", "found"), [({A: 0.9, B: 0.6}, None, (1.5, 1.0, 0.0)), ({A: 0.6}, 0.4, (1.5, 0.0, 1.0))]
)
def test_shares_that_exceed_the_gpus_utilization_are_scaled_down(
    ratios: dict[Holder, float], others: float | None, found: tuple[float, ...]
) -> None:
    shared = Shared(A, B)
    shared.period(0.5, ratios, others=others)
    shared.settle()
    busy = shared.totals(A).busy_s, shared.totals(B).busy_s, shared.unit().unattributed_s
    assert busy == pytest.approx(found)


def test_the_newest_utilization_of_a_sharer_expires() -> None:
    shared = Shared(A, B)
    shared.period(0.8, {A: 0.5, B: 0.3})
    newest = {holder: shared.ledger.newest_ratio(Allocation(UNIT, holder), shared.now) for holder in (A, B, C)}
    assert newest == {A: pytest.approx(0.5), B: pytest.approx(0.3), C: None}
    shared.period(0.0, {})
    assert shared.ledger.newest_ratio(Allocation(UNIT, A), shared.now) == 0.0
    for _ in range(4):
        shared.period(0.8, None)
    assert shared.ledger.newest_ratio(Allocation(UNIT, A), shared.now) is None


def test_activity_of_another_witness_belongs_to_neighbours_only_if_they_worked() -> None:
    shared = Shared(A, B)
    shared.period(0.0, {A: 0.005}, other=("decoder",))
    assert (shared.totals(B).idle_s, shared.totals(A).idle_s, shared.totals(A).observed_s) == (5.0, 0.0, 5.0)
    shared.period(0.0, {}, other=("decoder",))
    assert shared.totals(B).observed_s == 5.0


def test_activity_without_a_known_holder_ends_the_idle_run_of_each_holder() -> None:
    shared = Shared(A, B)
    shared.period(0.0, None)
    shared.ledger.record(Activity(UNIT, (Span(shared.now, shared.now, 0.0, ("power",)),), 0))
    assert (shared.totals(A).idle_run_s, shared.totals(B).idle_run_s) == (0.0, 0.0)


def test_a_period_that_ends_after_the_poll_waits_for_the_next_poll() -> None:
    shared = Shared(A, B)
    begin = shared.now
    shared.observe([0.6] * 4)
    confirmed = shared.now
    shared.observe([0.6] * 2)
    shared.ledger.record_split(UNIT, Split(begin, shared.now, {A.key: 0.6}, None, 0.06))
    held = [ConfirmedAllocation(Allocation(UNIT, h, "time_slice", 0.5), confirmed, None) for h in (A, B)]
    shared.ledger.charge_poll(shared.now, WALL, held)
    assert (shared.totals(A).observed_s, shared.totals(B).observed_s) == (0.0, 0.0)
    shared.poll()
    assert (shared.totals(A).busy_s, shared.totals(B).idle_s) == pytest.approx((3.6, 6.0))


def test_shares_are_not_compared_if_little_is_known_about_the_gpu_itself() -> None:
    shared = Shared(A, B)
    begin = shared.now
    shared.observe([0.6] * 3)
    shared.now += 2.0
    shared.ledger.record_split(UNIT, Split(begin, shared.now, {A.key: 0.6}, None, 0.06))
    shared.poll()
    assert (shared.totals(A).observed_s, shared.totals(B).observed_s) == (0.0, 0.0)


def test_the_last_holder_of_a_shared_gpu_is_not_charged_for_the_holder_that_left() -> None:
    shared = Shared(A, B)
    shared.period(0.9, {A: 0.9})
    shared.period(0.9, {A: 0.9})
    shared.holders = (B,)
    shared.period(0.9, {}, others=0.9)
    assert shared.totals(B).busy_s == 0.0
    assert shared.totals(B).idle_s == 10.0


def test_energy_is_divided_by_busy_time_and_energy_at_rest_by_the_number_of_holders() -> None:
    shared = Shared(A, B)
    for _ in range(4):
        shared.period(0.0, {}, watts=50.0)  # power of the board at rest
    for holder in (A, B):
        assert shared.totals(holder).energy_j == pytest.approx(20 * 50 / 2)
    for _ in range(4):
        shared.period(0.8, {A: 0.6, B: 0.2}, watts=250.0)
    assert shared.totals(A).energy_j == pytest.approx(500 + 20 * (25 + 200 * 0.75))
    assert shared.totals(B).energy_j == pytest.approx(500 + 20 * (25 + 200 * 0.25))


Periods = st.lists(
    st.tuples(
        st.lists(st.sampled_from((0.0, 0.01, 0.3, 0.5, 1.0)), min_size=5, max_size=5),
        st.none() | st.dictionaries(st.sampled_from((A, B, C)), st.sampled_from((0.005, 0.1, 0.4, 1.0))),
        st.none() | st.sampled_from((0.1, 0.9)),
        st.sampled_from((50.0, 100.0, 400.0)),
        st.sets(st.sampled_from((A, B, C))),
    ),
    max_size=8,
)


@given(Periods)
def test_holders_and_unattributed_work_add_up_to_the_gpus_work(
    periods: list[tuple[list[float], dict[Holder, float] | None, float | None, float, set[Holder]]],
) -> None:
    """For any sequence of holders, no second and no joule is lost, or counted twice."""
    shared = Shared(A, B)
    seen: dict[HolderKey, list[float]] = {}
    for unit, ratios, others, watts, holders in periods:
        shared.holders = tuple(sorted(holders, key=lambda holder: holder.pod)) or (A,)
        shared.period(unit, ratios, others, watts=watts)
        for holder in shared.holders:
            totals = shared.totals(holder)
            assert totals.busy_s + totals.idle_s <= totals.observed_s + 1e-9 <= totals.held_s + 2e-9
    shared.settle()
    for holder in (A, B, C):
        account = shared.ledger.holders().get((UNIT, holder.key))
        if account is not None:
            seen[holder.key] = [account.busy_s, account.energy_j or 0.0]
    unit_totals = shared.unit()
    assert sum(busy for busy, _ in seen.values()) + unit_totals.unattributed_s == pytest.approx(unit_totals.busy_s)
    waiting = sum(charge.joules - charge.booked_j for charge in shared.ledger.units[UNIT].wait().energy)
    joules = sum(energy for _, energy in seen.values()) + (unit_totals.unattributed_j or 0.0) + waiting
    assert joules == pytest.approx(shared.joules)


def test_readings_that_arrive_after_the_poll_are_charged_at_the_next_poll() -> None:
    """The driver's ring lags by one second."""
    shared = Shared(A, B)
    for _ in range(4):
        begin = shared.now - 1.0
        shared.observe([0.0] * 4 + [0.5])
        shared.now += 1.0  # the poll is later than the newest reading
        shared.ledger.record_split(UNIT, Split(begin + 1.0, shared.now - 1.0, {A.key: 0.1}, None, 0.06))
        shared.poll()
        shared.now -= 1.0
    shared.now += 1.0
    shared.poll()
    assert (shared.totals(A).observed_s, shared.totals(B).idle_s) == pytest.approx((20.0, 20.0))


def test_overlapping_periods_count_once() -> None:
    shared = Shared(A, B)
    shared.observe([0.5] * 5)
    for begin, end in ((0.0, 3.0), (1.0, 5.0), (2.0, 4.0)):
        shared.ledger.record_split(UNIT, Split(START + begin, START + end, {A.key: 0.5}, None, 0.06))
    shared.poll()
    assert (shared.totals(A).busy_s, shared.totals(A).observed_s) == pytest.approx((2.5, 5.0))
    assert shared.totals(B).idle_s == pytest.approx(5.0)


def test_the_end_of_a_long_idle_run_asks_for_a_state_write() -> None:
    shared = Shared(A, B)
    for _ in range(12):
        shared.period(0.5, {A: 0.5})
    assert not shared.ledger.long_run_ended  # B's run is 60 s, which a restart may lose
    shared.period(0.5, {A: 0.5})
    shared.period(0.5, {A: 0.4, B: 0.1})
    assert shared.ledger.long_run_ended


def test_late_readings_of_a_holder_that_has_left_are_still_charged_to_it() -> None:
    shared = Shared(A, B)
    shared.period(0.0, None)
    shared.now += 5.0
    shared.poll()
    shared.now -= 5.0
    shared.holders = (A,)
    shared.observe([0.0] * 5)  # of the time before that poll
    shared.poll()
    assert shared.ledger.holdings[UNIT, B.key].account.idle_s == pytest.approx(10.0)


def rings(ledger: Ledger) -> set[AllocationId]:
    """Holders that have their own history."""
    return {each for each, holding in ledger.holdings.items() if holding.ring is not None}


def test_the_history_of_sharers_is_dropped_when_they_leave() -> None:
    shared = Shared(A, B)
    for _ in range(100):
        shared.period(0.5, {A: 0.5})
    pending = shared.ledger.units[UNIT].wait()
    assert max(len(pending.divisions), len(pending.spans) // 5, len(pending.energy) // 5) <= 4
    assert rings(shared.ledger) == {(UNIT, A.key), (UNIT, B.key)}
    shared.holders = (A,)
    for _ in range(5):
        shared.period(0.5, {A: 0.5})
    assert rings(shared.ledger) == {(UNIT, A.key)}


def test_power_at_rest_is_never_above_what_boards_draw() -> None:
    """Holders that are always busy: the board's power at rest is never measured."""
    shared = Shared(A, B)
    for _ in range(4):
        shared.period(0.8, {A: 0.6, B: 0.2}, watts=300.0)
    rest_w = 0.15 * 400.0
    assert shared.totals(A).energy_j == pytest.approx(20 * (rest_w / 2 + (300 - rest_w) * 0.75))


def test_an_energy_counter_that_does_not_move_gives_no_power_at_rest() -> None:
    shared = Shared(A, B)
    shared.period(0.8, {A: 0.8}, watts=0.0)
    for _ in range(2):
        shared.period(0.8, {A: 0.8}, watts=50.0)
    assert shared.totals(B).energy_j == pytest.approx(10 * 50 / 2)
