"""The parts of the search: power at rest, the median of work, the spread of power, steps of ten seconds."""

from __future__ import annotations

import pytest

from gpu_exporter.common.model.readings import Effort, Span
from gpu_exporter.diagnosis.stalls.floor import BoardFloor
from gpu_exporter.diagnosis.stalls.hour import WorkHour
from gpu_exporter.diagnosis.stalls.power import PowerStep, PowerSteps, Spread
from gpu_exporter.diagnosis.stalls.rules import resting_power
from gpu_exporter.diagnosis.stalls.work import WorkHistory


def test_the_floor_is_the_lowest_median_of_three_and_never_rises() -> None:
    floor = BoardFloor()
    floor.learn(70.0)
    floor.learn(71.0)
    assert floor.seen_w is None
    floor.learn(10.0)  # one wrong reading
    assert floor.seen_w == 70.0
    for watts in (133.0, 134.0, 135.0, 136.0):
        floor.learn(watts)
    assert floor.seen_w == 70.0
    for _ in range(3):
        floor.learn(65.0)
    assert floor.seen_w == 65.0


def test_the_median_of_work_is_the_lower_edge_of_its_bin() -> None:
    work = WorkHistory()
    assert work.median_w() is None
    work.add(650.0, 100.0, 700.0)
    work.add(305.0, 101.0, 700.0)
    assert (work.median_w(), work.total_s) == (294.0, 201.0)
    work.add(5000.0, 1000.0, 700.0)  # more than any board draws
    assert work.median_w() == 99 * 14.0


def test_the_spread_leaves_out_a_twentieth_on_each_side_and_what_is_old() -> None:
    spread = Spread(300.0)
    assert (spread.width(), spread.mean()) == (0.0, None)
    for i in range(19):
        spread.add(i, 100.0 + i % 2)
    spread.add(19.0, 500.0)
    assert spread.width() == 1.0, "one of twenty"
    spread.add(20.0, 500.0)
    assert spread.width() == 400.0, "two of twenty-one"
    spread.add(330.0, 90.0)
    assert (spread.width(), spread.mean()) == (0.0, 90.0)


def test_a_step_has_the_mean_power_and_the_utilization_of_ten_seconds() -> None:
    steps = PowerSteps()
    assert steps.add(Effort(0.0, 5.0, 100.0), [Span(0.0, 5.0, 0.5)]) is None
    assert steps.add(Effort(5.0, 10.0, 200.0), [Span(5.0, 10.0, 1.0)]) == PowerStep(0.0, 10.0, 150.0, (0.5, 1.0))
    steps.add(Effort(10.0, 15.0, 100.0), [])
    steps.add(Effort(15.0, 20.0), [])  # no power: these ten seconds are no step
    assert steps.add(Effort(20.0, 30.0, 80.0), []) == PowerStep(20.0, 30.0, 80.0, None)
    steps.add(Effort(30.0, 35.0, 80.0), [])
    assert steps.add(Effort(60.0, 70.0, 90.0), [Span(60.0, 70.0, 0.0, ("power",))]) == PowerStep(60, 70, 90, (0.0, 1.0))


@pytest.mark.parametrize(
    ("name", "watts"),
    [
        ("Tesla V100-SXM2-32GB", 40.0),
        ("NVIDIA A100-SXM4-80GB", 55.0),
        ("NVIDIA H100 80GB HBM3", 70.0),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H200", 78.0),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA GH200", None),
        ("NVIDIA GH200 480GB", 73.0),
        ("NVIDIA GH200 144G HBM3e", None),
        ("NVIDIA B200", 136.0),
        ("NVIDIA GB200", 156.0),
        ("NVIDIA B300 SXM6 AC", 135.0),
        ("NVIDIA GB300", 171.0),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", None),
        ("", None),
    ],
)
def test_only_published_boards_have_a_power_at_rest_before_they_were_seen(name: str, watts: float | None) -> None:
    assert resting_power(name) == watts


def test_the_hour_of_work_is_known_after_an_hour_and_only_with_sm_activity() -> None:
    hour = WorkHour(3600.0)
    for i in range(720):
        assert i * 5 >= 3240 or hour.means() is None
        hour.add(Effort(i * 5.0, i * 5.0 + 5.0, sm=0.2, dram=0.1), [Span(i * 5.0, i * 5.0 + 5.0, 0.8)])
    means = hour.means()
    assert means is not None
    assert means == pytest.approx((0.8, 0.2, 0.1))
    for i in range(720, 900):
        hour.add(Effort(i * 5.0, i * 5.0 + 5.0), [Span(i * 5.0, i * 5.0 + 5.0, 0.8)])
    assert hour.means() is None, "a quarter of the hour has no SM activity"
