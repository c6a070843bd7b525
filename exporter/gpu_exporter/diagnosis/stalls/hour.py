"""Means of one holder's last hour: utilization, SM activity and use of the memory bandwidth."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from gpu_exporter.common.model.readings import Effort, Span
from gpu_exporter.common.model.views import HourOfWork
from gpu_exporter.diagnosis.stalls.rules import MINUTE_S

HOUR_S = 3600.0  # over which a GPU is judged to use few of its SMs
COVERED_MIN = 0.9  # share of the time that must be known


@dataclass(slots=True)
class _Minute:
    """Integrals over a minute, in seconds."""

    start: float
    known_s: float = 0.0
    sm_s: float = 0.0
    dram_s: float = 0.0
    covered_s: float = 0.0
    busy_s: float = 0.0


class WorkHour:
    """Keeps one entry per minute of the last hour. Only GPUs with GPM have SM activity."""

    def __init__(self, over_s: float) -> None:
        self._over_s = over_s
        self._minutes: deque[_Minute] = deque()

    def add(self, effort: Effort, spans: Sequence[Span]) -> None:
        if not self._minutes or effort.end - self._minutes[-1].start >= MINUTE_S:
            self._minutes.append(_Minute(effort.start))
        while self._minutes and self._minutes[0].start < effort.end - self._over_s:
            self._minutes.popleft()
        if not self._minutes:
            return
        minute, length_s = self._minutes[-1], effort.end - effort.start
        if effort.sm is not None and effort.dram is not None:
            minute.known_s += length_s
            minute.sm_s += length_s * effort.sm
            minute.dram_s += length_s * effort.dram
        for span in spans:
            minute.covered_s += span.end - span.start
            minute.busy_s += (span.end - span.start) * span.ratio

    def means(self) -> HourOfWork | None:
        """Returns the means; None while less than COVERED_MIN of the time is known."""
        needed_s = COVERED_MIN * self._over_s
        known_s = sum(minute.known_s for minute in self._minutes)
        covered_s = sum(minute.covered_s for minute in self._minutes)
        if known_s < needed_s or covered_s < needed_s:
            return None
        return HourOfWork(
            sum(minute.busy_s for minute in self._minutes) / covered_s,
            sum(minute.sm_s for minute in self._minutes) / known_s,
            sum(minute.dram_s for minute in self._minutes) / known_s,
        )
