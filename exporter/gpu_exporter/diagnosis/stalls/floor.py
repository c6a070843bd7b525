"""The power of one board at rest, which only seconds without utilization show.

The witness `power` of idleness learns the least power that it has seen, because for it a floor that is too high is the
safe error. Here it is the dangerous one: an exporter that starts under a job at 250 W would take that for rest, and a
healthy job at 250 W for a stall.
"""

from __future__ import annotations

from collections import deque

READINGS = 3  # the median of three, so that a single wrong reading does not become the floor


class BoardFloor:
    """Learns from steps of utilization 0. `seen_w`: the lowest median so far, None before three such steps."""

    def __init__(self, seen_w: float | None = None) -> None:
        self.seen_w = seen_w
        self._recent: deque[float] = deque(maxlen=READINGS)

    def learn(self, power_w: float) -> None:
        """A mean power over a time in which utilization was 0."""
        self._recent.append(power_w)
        if len(self._recent) == READINGS:
            median_w = sorted(self._recent)[READINGS // 2]
            self.seen_w = median_w if self.seen_w is None else min(self.seen_w, median_w)
