"""GPM ratios: within their range, and from cycle counters if the driver has them."""

from __future__ import annotations

import pytest

from gpu_exporter.agent.collectors.contract import Cycle, Totals
from gpu_exporter.agent.collectors.gpm import OUT_OF_RANGE, STUCK, refine
from gpu_exporter.agent.devices.protocol import Gpm


def make_cycle(totals: Totals | None = None) -> Cycle:
    return Cycle(None, {}, lambda: 0.0, totals or Totals())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("reported", "used", "counted"),
    [(1.29, 1.0, 1), (-0.2, None, 1), (1.0004, 1.0, 0), (-0.0004, 0.0, 0), (0.5, 0.5, 0)],
)
def test_values_out_of_range_are_clamped_or_unknown_and_counted(
    reported: float, used: float | None, counted: int
) -> None:
    cycle = make_cycle()
    refined = refine(cycle, "", Gpm(1.0, graphics=reported))
    assert refined.graphics == used
    assert refined.missing is (used is None)
    assert cycle.remarks == [OUT_OF_RANGE] * counted
    assert cycle.errors == []


@pytest.mark.parametrize("pipe", ["fp64", "fp32", "fp16"])
def test_a_pipe_that_is_no_witness_of_idleness_makes_no_time_unknown(pipe: str) -> None:
    cycle = make_cycle()
    refined = refine(cycle, "", Gpm(1.0, graphics=0.0, **{pipe: -5.0}))
    assert (refined.missing, getattr(refined, pipe), refined.graphics) == (False, None, 0.0)
    assert cycle.remarks == [OUT_OF_RANGE]


def test_sm_activity_comes_from_the_cycle_counters_if_available() -> None:
    totals = Totals()
    first = Gpm(1.0, sm=0.9, elapsed_cycles=1000.0, active_cycles=100.0)
    assert refine(make_cycle(totals), "", first).sm == 0.9  # no earlier reading to compare with
    later = first._replace(sm=0.1, elapsed_cycles=3000.0, active_cycles=600.0)
    assert refine(make_cycle(totals), "", later).sm == 0.25
    # The counters may cover more time than the window: the higher value counts.
    busier = first._replace(sm=0.9, elapsed_cycles=4000.0, active_cycles=650.0)
    assert refine(make_cycle(totals), "", busier).sm == 0.9
    # A driver that was loaded again counts from 0: the ratio of the window is used once.
    assert refine(make_cycle(totals), "", first._replace(elapsed_cycles=10.0, active_cycles=1.0)).sm == 0.9


def test_two_subjects_have_separate_counters() -> None:
    totals = Totals()
    gpm = Gpm(1.0, sm=0.9, elapsed_cycles=1000.0, active_cycles=100.0)
    refine(make_cycle(totals), "MIG-1", gpm)
    other = gpm._replace(sm=0.2, elapsed_cycles=5000.0, active_cycles=5000.0)
    assert refine(make_cycle(totals), "MIG-2", other).sm == 0.2


@pytest.mark.parametrize("active", [None, 100.0])
def test_a_window_without_an_increase_of_the_cycle_counter_is_discarded(active: float | None) -> None:
    """Its values do not matter: both of its samples are the same."""
    totals = Totals()
    gpm = Gpm(1.0, graphics=0.4, sm=0.3, dram=0.2, pcie=1e9, elapsed_cycles=1000.0, active_cycles=active)
    first = refine(make_cycle(totals), "MIG-1", gpm)
    assert (first.graphics, first.missing) == (0.4, True)  # nothing shows yet that the counter increases
    cycle = make_cycle(totals)
    assert refine(cycle, "MIG-1", gpm) == Gpm(1.0, missing=True)
    assert (cycle.remarks, cycle.gpm_stuck) == ([STUCK], {"MIG-1"})
    cycle = make_cycle(totals)
    assert refine(cycle, "MIG-2", gpm).graphics == 0.4  # another subject
    later = refine(cycle, "MIG-1", gpm._replace(elapsed_cycles=1001.0))
    assert (later.graphics, later.missing) == (0.4, False)
    assert not cycle.gpm_stuck
