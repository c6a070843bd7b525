"""Properties of the ledger that hold for any sequence of events."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_exporter.agent.ledger.accounts import ConfirmedAllocation
from gpu_exporter.agent.ledger.ledger import Ledger, LedgerRules
from gpu_exporter.common.model.holders import Allocation, Holder, HolderKey
from gpu_exporter.common.model.readings import Activity, Span
from gpu_exporter.common.model.units import UnitId

UNIT = UnitId("GPU-0")
RULES = LedgerRules(5.0, 3, 0.1, 0.7, 60.0)
HOLDERS = [Holder(HolderKey("kubernetes", f"uid-{i}/main")) for i in range(3)]
RATIOS = st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0])
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("span"), st.floats(-3, 8), st.floats(0, 4), RATIOS, st.booleans()),
        st.tuples(st.just("poll"), st.floats(0, 30), st.sets(st.integers(0, 2), max_size=2)),
        st.tuples(st.just("wait"), st.floats(0, 90)),
    ),
    max_size=80,
)


@settings(max_examples=150, deadline=None)
@given(EVENTS)
def test_totals_never_fall_and_parts_never_exceed_the_whole(events: list[tuple]) -> None:
    start = now = 1_000.0
    ledger = Ledger(RULES, start)
    last_unit = (0.0, 0.0, 0.0)
    last: dict[HolderKey, tuple[float, ...]] = {}
    truly_idle = 0.0
    for event in events:
        if event[0] == "span":
            _, offset, length, ratio, other = event
            now += max(0.0, offset)
            begin = now + min(0.0, offset)
            if ratio == 0.0 and not other:
                truly_idle += length
            ledger.record(Activity(UNIT, (Span(begin, begin + length, ratio, ("power",) if other else ()),), 2))
            now = max(now, begin + length)
        elif event[0] == "poll":
            _, lag, indexes = event
            shown = [
                ConfirmedAllocation(Allocation(UNIT, HOLDERS[i]), max(start, now - lag), None) for i in sorted(indexes)
            ]
            ledger.charge_poll(now, 1e9 + now, shown)
        else:
            now += event[1]
        unit = ledger.unit_totals(UNIT, now, 1e9 + now)
        if unit is not None:
            present = (unit.busy_s, unit.observed_s, unit.idle_s)
            assert all(a >= b for a, b in zip(present, last_unit, strict=True))
            assert unit.busy_s + unit.idle_s <= unit.observed_s + 1e-6
            assert unit.observed_s <= now - start + 1e-6
            assert unit.idle_s <= truly_idle + 1e-6
            assert unit.busy_s + unit.idle_s + sum(unit.other_s.values()) <= unit.observed_s + 1e-6
            last_unit = present
        for holder in HOLDERS:
            totals = ledger.holder_totals(Allocation(UNIT, holder), now, 1e9 + now)
            if totals is None:
                continue
            counters = (totals.held_s, totals.busy_s, totals.observed_s, totals.idle_s, totals.low_s, totals.high_s)
            assert all(a >= b for a, b in zip(counters, last.get(holder.key, (0.0,) * 6), strict=True))
            assert totals.observed_s <= totals.held_s + 1e-6
            assert totals.busy_s + totals.idle_s <= totals.observed_s + 1e-6
            assert (totals.idle_run_s or 0.0) <= totals.idle_s + 1e-6
            assert totals.idle_s <= totals.low_s + 1e-6
            last[holder.key] = counters
