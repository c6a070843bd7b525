"""The learned power of a board at rest."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_exporter.agent.devices.protocol import Traffic
from gpu_exporter.agent.sampling.activity.witnesses import ActivityRules, PowerFloor, TrafficRate

RULES = ActivityRules(interval_s=1.0, gap_intervals=3, power_floor_max_ratio=0.3, power_active_step=0.25)
V100_CONTEXT, V100_LIMIT = 82.0, 300.0


@pytest.mark.parametrize("position", range(8))
def test_one_power_reading_of_zero_does_not_lower_the_floor(position: int) -> None:
    """A V100 with a context draws 82 W at rest. With a floor of 0 it would always count as active."""
    floor = PowerFloor(RULES)
    readings = [V100_CONTEXT] * position + [0.0] + [V100_CONTEXT] * 20
    judged = [floor.is_active(power, V100_LIMIT) for power in readings]
    assert not any(judged[position + 2 :])


def test_a_lasting_rest_lowers_the_floor_and_no_work_raises_it() -> None:
    floor = PowerFloor(RULES)
    assert [floor.is_active(power, V100_LIMIT) for power in (80.0, 80.0, 30.0, 30.0)] == [False, False, None, False]
    floor = PowerFloor(RULES)
    for power in (80.0, 40.0, 40.0):
        floor.is_active(power, V100_LIMIT)
    at_rest = 40.0 + 0.25 * (V100_LIMIT - 40.0)
    for power in (at_rest + 1.0, at_rest + 1.0, at_rest + 1.0, at_rest + 1.0):
        assert floor.is_active(power, V100_LIMIT)
    assert not floor.is_active(at_rest, V100_LIMIT)


def test_before_three_power_readings_the_lowest_is_used_but_not_remembered() -> None:
    floor = PowerFloor(RULES)
    assert not floor.is_active(40.0, V100_LIMIT)
    assert floor.is_active(106.0, V100_LIMIT)  # 40 + 65 is the step
    floor = PowerFloor(RULES)
    for power in (10.0, 80.0, 80.0):
        floor.is_active(power, V100_LIMIT)
    assert not floor.is_active(100.0, V100_LIMIT)  # 80 + 55; from 10 W it would be active


def test_the_floor_is_never_above_its_share_of_the_limit() -> None:
    floor = PowerFloor(RULES)
    for _ in range(5):
        floor.is_active(299.0, V100_LIMIT)
    assert floor.is_active(90.0 + 52.5 + 0.1, V100_LIMIT)
    assert not floor.is_active(90.0 + 52.5, V100_LIMIT)


@given(st.lists(st.floats(1.0, 700.0), min_size=3, max_size=30))
def test_a_power_reading_is_active_exactly_above_the_step_over_the_lowest_median(readings: list[float]) -> None:
    floor = PowerFloor(RULES)
    judged = [floor.is_active(power, 700.0) for power in readings]
    medians = [sorted(readings[i : i + 3])[1] for i in range(len(readings) - 2)]
    for position, lowest in enumerate(itertools.accumulate(medians, min), start=2):
        learned = min(lowest, 210.0)
        is_wrong = readings[position] < 0.5 * learned
        assert judged[position] is (None if is_wrong else readings[position] > learned + 0.25 * (700.0 - learned))


@pytest.mark.parametrize(
    ("first", "second", "rate"),
    [
        ((0.0, 0.0), (30.0, 10.0), 20.0),  # 40 bytes in 2 s
        ((5.0, 5.0), (5.0, 5.0), 0.0),
        ((5.0, 5.0), (4.0, 50.0), None),  # one counter wrapped
        ((5.0, 5.0), (50.0, 4.0), None),
    ],
)
def test_traffic_is_the_mean_of_the_bytes_of_both_directions(
    first: tuple[float, float], second: tuple[float, float], rate: float | None
) -> None:
    traffic = TrafficRate()
    assert traffic.step(Traffic(*first), 10.0) is None
    assert traffic.step(Traffic(*second), 12.0) == rate


def test_traffic_is_unknown_after_a_missing_reading_and_without_elapsed_time() -> None:
    traffic = TrafficRate()
    traffic.step(Traffic(0.0, 0.0), 10.0)
    assert traffic.step(None, 11.0) is None
    assert traffic.step(Traffic(9.0, 9.0), 12.0) is None
    assert traffic.step(Traffic(19.0, 9.0), 12.0) is None
    assert traffic.step(Traffic(29.0, 9.0), 13.0) == 10.0
