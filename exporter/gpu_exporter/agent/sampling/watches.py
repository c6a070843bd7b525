"""Remembers which witnesses were active at which time, to decide whether a utilization of 0 counts as idle."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from gpu_exporter.agent.sampling.activity.driver_ring import RING_AGE_MAX_S, UNWATCHED_MAX_S
from gpu_exporter.common.model.readings import Span


class WitnessPeriod(NamedTuple):
    """The witnesses that were active in (start, end]. `known`: the state of all witnesses is known."""

    start: float
    end: float
    active: tuple[str, ...]
    known: bool


class Track:
    """Periods of the same witnesses, ordered by their ends."""

    def __init__(self) -> None:
        self._watches: deque[WitnessPeriod] = deque()

    def note(self, watch: WitnessPeriod) -> None:
        """Adds the newest period. Merges it with the last one if it follows directly and has the same state."""
        last = self._watches[-1] if self._watches else None
        if last is not None and last.end == watch.start and last[2:] == watch[2:]:
            self._watches[-1] = last._replace(end=watch.end)
        else:
            self._watches.append(watch)
        while self._watches[0].end < watch.end - RING_AGE_MAX_S:
            self._watches.popleft()

    def judge(self, span: Span) -> tuple[str, ...] | None:
        """Returns the witnesses that were active in the span. Empty if all were quiet throughout, None if unknown."""
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
