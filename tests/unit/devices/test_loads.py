"""Load curves, compared with their definition."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_exporter.agent.devices.loads import Constant, Curve, Load, Square, mean


@pytest.mark.parametrize(
    ("load", "start", "end", "expected"),
    [
        (Constant(0.4), 3, 9, 0.4),
        (Square(0.0, 0.9, 10, 0.3), 0, 10, 0.27),
        (Square(0.0, 1.0, 10, 0.5), 0, 5, 1.0),
        (Square(0.0, 1.0, 10, 0.5), 5, 10, 0.0),
        (Curve([(0, 0), (10, 1)]), 0, 10, 0.5),
        (Curve([(0, 0), (10, 1)]), 10, 20, 1.0),
        (Curve([(0, 0.8), (10, 0.8), (10, 0)]), 10, 20, 0.0),
        (Curve([(0, 0.8), (10, 0.8), (10, 0)]), 5, 15, 0.4),
    ],
)
def test_the_mean_of_each_kind_of_load(load: Load, start: float, end: float, expected: float) -> None:
    assert mean(load, start, end) == pytest.approx(expected)


LOADS = st.one_of(
    st.builds(Constant, st.floats(0, 1)),
    st.builds(Square, st.floats(0, 0.5), st.floats(0.5, 1), st.floats(0.1, 100), st.floats(0.01, 0.99)),
    st.lists(st.tuples(st.floats(0, 100), st.floats(0, 1)), min_size=1, max_size=6).map(lambda p: Curve(sorted(p))),
)


@given(LOADS, st.floats(0, 500), st.floats(0, 500))
def test_an_integral_grows_by_at_most_the_elapsed_time(load: Load, a: float, b: float) -> None:
    start, end = sorted((a, b))
    assert -1e-6 <= load.integral(end) - load.integral(start) <= end - start + 1e-6
