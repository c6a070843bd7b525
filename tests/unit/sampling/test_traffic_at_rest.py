"""A board whose link carries a little at all times, read as often as the exporter chooses: idle at rest, never with bursts."""

from __future__ import annotations

import bisect
import random
from collections.abc import Sequence

import pytest

from gpu_exporter.agent.collectors import registry
from gpu_exporter.agent.devices.protocol import UtilizationSample
from gpu_exporter.agent.devices.scenario import parse_scenario
from gpu_exporter.agent.devices.simulated import ScenarioTime, SimulatedDevice
from gpu_exporter.agent.runtime.wiring import activity_rules
from gpu_exporter.agent.sampling.sampler import DeviceSampler
from gpu_exporter.common.clock import ManualClock
from gpu_exporter.common.config.defaults import Settings

REST = 3e6  # bytes per second, both directions
LONG_S = 600.0
SCENARIO = parse_scenario({"gpus": [{"model": "A100"}]})  # without GPM, nothing else shows a short kernel
BANDWIDTH = 1.5 * SCENARIO.gpus[0].product.pcie  # of both directions of the simulated counters


class Link:
    """The load of the link: rest, and bursts of `size` bytes within 20 ms at these times."""

    def __init__(self, times: Sequence[float], size: float) -> None:
        self._times, self._size = sorted(times), size

    def integral(self, t: float) -> float:
        done = bisect.bisect_right(self._times, t - 0.02)
        moved = done * self._size
        for begin in self._times[done : done + 2]:
            moved += self._size * max(0.0, min(1.0, (t - begin) / 0.02))
        return (moved + REST * t) / BANDWIDTH


class Board(SimulatedDevice):
    """With a ring for each engine, as recorded on an H200: then long cycles are chosen."""

    def read_engine_samples(self, engine: str, since_wall: float) -> Sequence[UtilizationSample]:
        return [each._replace(ratio=0.0) for each in self.read_utilization_samples(since_wall)]


def longest_idle(times: Sequence[float], size: float, seconds: float = LONG_S) -> tuple[float, float]:
    """Seconds of the longest idle time without a break, and the mean length of a cycle."""
    clock = ManualClock()
    board = Board(ScenarioTime(SCENARIO, clock), SCENARIO.gpus[0])
    board.parts["pcie"] = Link(times, size)
    sampler = DeviceSampler(board, registry.DEFAULT, clock, activity_rules(Settings()))
    begin, run, longest, cycles = clock.monotonic(), 0.0, 0.0, 0
    while clock.monotonic() - begin < seconds:
        activity = sampler.sample().activity
        for span in activity.spans if activity is not None else ():
            run = 0.0 if span.ratio or span.other else run + span.end - span.start
            longest = max(longest, run)
        cycles += 1
        clock.advance(sampler.interval_s)
    return longest, seconds / cycles


def test_a_board_at_rest_is_idle_and_read_seldom() -> None:
    idle_s, cycle_s = longest_idle([], 0.0)
    assert idle_s > LONG_S - 30.0
    assert cycle_s > 4.0


@pytest.mark.parametrize(("every_s", "size"), [(5.0, 12e6), (5.0, 30e6), (2.5, 16e6), (4.0, 12e6), (1.7, 11e6)])
@pytest.mark.parametrize("jitter_s", [0.0, 0.3])
@pytest.mark.parametrize("seed", range(3))
def test_bursts_in_nearly_every_long_cycle_are_never_taken_for_rest(
    every_s: float, size: float, jitter_s: float, seed: int
) -> None:
    draw = random.Random(seed)
    first = draw.uniform(0.0, every_s)
    times = [first + i * every_s + draw.uniform(-jitter_s, jitter_s) for i in range(int(LONG_S / every_s) + 1)]
    assert longest_idle(times, size)[0] < 3 * every_s


def test_bursts_after_rest_and_after_work_end_the_idle_time_soon() -> None:
    for begin, busy in ((100.0, []), (160.0, [100.0 + i * 0.1 for i in range(600)])):
        times = [*busy, *(begin + i * 2.5 for i in range(200))]
        assert longest_idle(times, 16e6)[0] < 101.0
