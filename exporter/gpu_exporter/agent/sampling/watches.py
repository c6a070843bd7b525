"""Remembers which witnesses were active at which time, to judge times with a utilization of 0."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from gpu_exporter.agent.sampling.activity.driver_ring import RING_AGE_MAX_S, UNWATCHED_MAX_S
from gpu_exporter.common.model.readings import Span


class WitnessPeriod(NamedTuple):
    """The witnesses that were active in (start, end], and whether the state of all witnesses is known."""

    start: float
    end: float
    active: tuple[str, ...]
    known: bool


class Track:
    """Periods of the same witnesses, in the order of their ends."""

    def __init__(self) -> None:
        self._watches: deque[WitnessPeriod] = deque()

    def note(self, watch: WitnessPeriod) -> None:
        """Add the newest period. If it follows the last one directly and has the same state, the two are merged."""
        last = self._watches[-1] if self._watches else None
        if last is not None and last.end == watch.start and last[2:] == watch[2:]:
            self._watches[-1] = last._replace(end=watch.end)
        else:
            self._watches.append(watch)
        while self._watches[0].end < watch.end - RING_AGE_MAX_S:
            self._watches.popleft()

    def judge(self, span: Span) -> tuple[str, ...] | None:
        """The witnesses that were active at some moment of the span. Empty if all were quiet in the whole span.

        None if this is unknown.
        """
        watched = 0.0
        unknown = False
        for watch in reversed(self._watches):
            if watch.end <= span.start:
                break
            overlap = min(watch.end, span.end) - max(watch.start, span.start)
            if overlap <= 0.0:
                continue
            if watch.active:
                return watch.active
            unknown |= not watch.known
            watched += overlap
        missing = span.end - span.start - watched
        return None if unknown or missing > UNWATCHED_MAX_S else ()
