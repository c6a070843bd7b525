"""The slope that `make soak` fits, and its interval."""

from __future__ import annotations

import random

import pytest
from tests.bench.soak import fit, student

DAY = [second / 1440 for second in range(1440)]


@pytest.mark.parametrize(("degrees", "quantile"), [(4, 2.776), (5, 2.571), (10, 2.228), (38, 2.024), (1e9, 1.960)])
def test_quantiles_are_those_of_the_table(degrees: float, quantile: float) -> None:
    assert student(degrees) == pytest.approx(quantile, rel=0.01)


@pytest.mark.parametrize("kept", [0.0, 0.9, 0.99])
def test_the_interval_contains_the_slope_in_nine_of_ten_runs_at_least(kept: float) -> None:
    """Noise of which each second keeps a part of the last one: 0.99 is correlated over more than a batch."""
    draw, inside = random.Random(7), 0
    for _ in range(200):
        noise, values = 0.0, []
        for day in DAY:
            noise = kept * noise + draw.gauss(0, 1)
            values.append(50 + 3 * day + noise)
        line = fit(DAY, values)
        assert line.low <= line.per_day <= line.high
        inside += line.low <= 3 <= line.high
    assert inside >= 180


def test_constant_figures_have_no_slope_and_no_interval() -> None:
    assert fit(DAY, [13.0] * len(DAY)) == pytest.approx((0, 0, 0), abs=1e-6)


def test_a_leak_of_two_mebibytes_a_day_is_found_below_the_noise_of_a_heap() -> None:
    draw = random.Random(7)
    line = fit(DAY, [50 + 2 * day + draw.choice((0, 0.5)) for day in DAY])
    assert 1 < line.low < 2 < line.high
