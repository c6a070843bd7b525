"""Which blocks of a gauge are at zero, and which ten-minute windows have work."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from gpu_exporter.reports.backtest.gauges import find_zeros, see_hour
from gpu_exporter.reports.backtest.tracks import UnitTrack
from gpu_exporter.reports.history.asking import Labels
from gpu_exporter.reports.usage.cells import Unit
from gpu_exporter.reports.usage.sources.zeros import FirstPass

SERIES: Labels = (("UUID", "GPU-0"),)
Values = Mapping[float, float]


def base(*, has_engine: bool = True, is_engine: bool = False) -> FirstPass:
    return FirstPass("m", is_engine, {SERIES: {}}, {}, {}, {}, {SERIES: {}} if has_engine else {}, {}, {}, {})


@pytest.mark.parametrize(
    ("kind", "work", "engine", "zeros", "busy"),
    [
        (base(), {0.0: 0.0}, {0.0: 0.005}, {0.0: 0.005}, set[float]()),
        (base(), {0.0: 1.0, 120.0: 0.0}, {0.0: 0.0, 120.0: 0.0}, {120.0: 0.0}, {0.0}),  # only the utilization shows it
        (base(), {0.0: 0.0, 720.0: 0.0}, {0.0: 0.0, 720.0: 0.02}, {0.0: 0.0}, {600.0}),  # only the engine shows it
        (base(), {0.0: 0.0}, {}, {}, set[float]()),  # without the engine's sample, nothing is proven
        (base(), {}, {0.0: 0.0}, {}, set[float]()),
        (base(has_engine=False), {0.0: 0.0, 120.0: 3.0}, {}, {0.0: 0.0}, {0.0}),
        (base(has_engine=False), {0.0: -1.0}, {}, {}, set[float]()),  # invalid
        (base(has_engine=False, is_engine=True), {0.0: 0.005, 600.0: 0.02}, {}, {0.0: 0.005}, {600.0}),
    ],
)
def test_a_block_is_at_zero_if_each_metric_of_its_series_is(
    kind: FirstPass, work: Values, engine: Values, zeros: Values, busy: set[float]
) -> None:
    assert find_zeros(kind, SERIES, work, engine) == (zeros, busy)


@pytest.mark.parametrize(("busy", "expected"), [(None, [True, True]), ({600.0}, [False, True]), ((), [False, False])])
def test_a_window_without_all_samples_is_busy_if_a_sample_shows_work(
    busy: set[float] | None, expected: list[bool]
) -> None:
    track = UnitTrack(Unit("", "n0", "GPU-0"))
    see_hour(track, (0.0, 20.0, 30.0), {0.0: 10.0, 600.0: 10.0}, busy)
    assert [part.is_busy for part in track.parts.values()] == expected
