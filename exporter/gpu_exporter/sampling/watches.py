"""What the witnesses said of which time, and what that makes of a stretch in which the GPU was at utilization 0."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from gpu_exporter.model.readings import Span
from gpu_exporter.sampling.driver_ring import RING_AGE_MAX_S, UNWATCHED_MAX_S


class WitnessPeriod(NamedTuple):
    """What witnesses said of the time (start, end]: those that were active, and whether all of them are known."""

    start: float
    end: float
    active: tuple[str, ...]
    known: bool


class Track:
    """Watches of the same witnesses, in the order of their ends."""

    def __init__(self) -> None:
        self._watches: deque[WitnessPeriod] = deque()

    def note(self, watch: WitnessPeriod) -> None:
        """Add what was said last; one that goes on from the last one is taken into it."""
        last = self._watches[-1] if self._watches else None
        if last is not None and last.end == watch.start and last[2:] == watch[2:]:
            self._watches[-1] = last._replace(end=watch.end)
        else:
            self._watches.append(watch)
        while self._watches[0].end < watch.end - RING_AGE_MAX_S:
            self._watches.popleft()

    def judge(self, span: Span) -> tuple[str, ...] | None:
        """The witnesses that were active at any moment of the span; empty when all were quiet during all of it.

        None when that is not known.
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
