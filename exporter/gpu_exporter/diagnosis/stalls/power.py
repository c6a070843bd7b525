"""Computes the mean power of one board in steps of STEP_S, with the lowest and highest utilization of each step."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from gpu_exporter.common.model.readings import Effort, Span
from gpu_exporter.diagnosis.stalls.rules import STEP_S


class PowerStep(NamedTuple):
    """The mean power (watts) over (start, end]. `ratios`: lowest and highest known utilization, None if unknown."""

    start: float
    end: float
    power_w: float
    ratios: tuple[float, float] | None


class PowerSteps:
    """Combines readings of a few seconds into steps. A reading without power begins a new step."""

    def __init__(self) -> None:
        self._start = self._joules = self._end = 0.0
        self._ratios: list[float] = []

    def add(self, effort: Effort, spans: Sequence[Span]) -> PowerStep | None:
        """Adds a reading. Returns the step that this reading completes, None if it completes none."""
        if effort.power_w is None or effort.start != self._end:
            self._start, self._joules, self._ratios = effort.start, 0.0, []
        self._end = effort.end
        if effort.power_w is None:
            self._start = effort.end
            return None
        self._joules += effort.power_w * (effort.end - effort.start)
        self._ratios += [ratio for span in spans for ratio in (span.ratio, *(1.0 for _ in span.other))]
        if self._end - self._start < STEP_S:
            return None
        ratios = (min(self._ratios), max(self._ratios)) if self._ratios else None
        step = PowerStep(self._start, self._end, self._joules / (self._end - self._start), ratios)
        self._start, self._joules, self._ratios = self._end, 0.0, []
        return step


class Spread:
    """The spread of the values of the last `over_s` seconds: from the 5th to the 95th percentile."""

    def __init__(self, over_s: float) -> None:
        self._over_s = over_s
        self._values: deque[tuple[float, float, float]] = deque()

    def add(self, at: float, value: float, length_s: float = 0.0) -> None:
        """Adds a value. `length_s`: how long the value was valid, up to `at`."""
        self._values.append((at, value, length_s))
        while self._values[0][0] <= at - self._over_s:
            self._values.popleft()

    @property
    def covered_s(self) -> float:
        """Seconds in which a value was valid."""
        return sum(length_s for _, _, length_s in self._values)

    def width(self) -> float:
        """Returns the spread, 0 without values. With fewer than 20 values, the lowest and highest value are used."""
        ordered = sorted(value for _, value, _ in self._values)
        if not ordered:
            return 0.0
        aside = len(ordered) // 20
        return ordered[len(ordered) - 1 - aside] - ordered[aside]

    def mean(self) -> float | None:
        return sum(value for _, value, _ in self._values) / len(self._values) if self._values else None
