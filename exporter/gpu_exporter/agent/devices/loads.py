"""Load curves of a scenario: utilization as a function of time, and its exact integral.

Times are seconds since the scenario's start. Integrals are exact formulas, so that a test can compare them with the
integral that the exporter computes from samples.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Protocol


class Load(Protocol):
    """A utilization curve, 0 to 1."""

    def integral(self, t: float) -> float:
        """Returns the integral of the load over (0, t], in seconds of full load."""


def mean(load: Load, start: float, end: float) -> float:
    """Returns the mean load over (start, end], limited to 0 to 1 because of rounding errors."""
    if end <= start:
        return 0.0
    value = (load.integral(end) - load.integral(start)) / (end - start)
    return min(1.0, max(0.0, value if value > 1e-9 else 0.0))


class Constant:
    def __init__(self, value: float) -> None:
        self.value = value

    def integral(self, t: float) -> float:
        return self.value * t


class Square:
    """A load that alternates: `high` for the share `duty` of each `period` (seconds), then `low`."""

    def __init__(self, low: float, high: float, period: float, duty: float) -> None:
        self.low, self.high, self.period, self.duty = low, high, period, duty

    def integral(self, t: float) -> float:
        cycles, rest = divmod(t, self.period)
        on = self.period * self.duty
        per_cycle = self.high * on + self.low * (self.period - on)
        return cycles * per_cycle + self.high * min(rest, on) + self.low * max(0.0, rest - on)


class StagedLoad:
    """A sequence of loads: (start, load), sorted by start. The first load also applies before its start."""

    def __init__(self, stages: Sequence[tuple[float, Load]]) -> None:
        self._starts = [start for start, _ in stages]
        self._loads = [load for _, load in stages]
        self._sums = [self._loads[0].integral(self._starts[0])]
        for i in range(1, len(stages)):
            load, start, end = self._loads[i - 1], self._starts[i - 1], self._starts[i]
            self._sums.append(self._sums[-1] + load.integral(end) - load.integral(start))

    def integral(self, t: float) -> float:
        i = max(0, bisect.bisect_right(self._starts, t) - 1)
        return self._sums[i] + self._loads[i].integral(t) - self._loads[i].integral(self._starts[i])


class Curve:
    """Straight lines between (time, value) points. Two points with the same time make a step.

    The first value applies before the first point, the last value after the last point.
    """

    def __init__(self, points: Sequence[tuple[float, float]]) -> None:
        self.times = [t for t, _ in points]
        self.values = [v for _, v in points]
        self._sums = [self.values[0] * self.times[0]]
        for i in range(1, len(points)):
            width = self.times[i] - self.times[i - 1]
            self._sums.append(self._sums[-1] + width * (self.values[i] + self.values[i - 1]) / 2)

    def integral(self, t: float) -> float:
        i = bisect.bisect_right(self.times, t)
        if i == 0:
            return self.values[0] * t
        if i == len(self.times):
            return self._sums[-1] + (t - self.times[-1]) * self.values[-1]
        width = self.times[i] - self.times[i - 1]
        past = t - self.times[i - 1]
        here = self.values[i - 1] + (self.values[i] - self.values[i - 1]) * past / width
        return self._sums[i - 1] + past * (self.values[i - 1] + here) / 2
