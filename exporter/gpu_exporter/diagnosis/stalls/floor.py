"""Learns the power of a board at rest, only from time with utilization 0.

The witness `power` learns from all time, because a too high value does no harm there. Here it would: an exporter that
starts during a job at 250 W would learn 250 W as the power at rest, and report a healthy job at 250 W as a stall.
"""

from __future__ import annotations

from collections import deque

READINGS = 3  # the median of three, so that a single wrong reading does not become the floor


class BoardFloor:
    """The learned power at rest. `seen_w`: the lowest median (watts) of three steps with utilization 0, or None."""

    def __init__(self, seen_w: float | None = None) -> None:
        self.seen_w = seen_w
        self._recent: deque[float] = deque(maxlen=READINGS)

    def learn(self, power_w: float) -> None:
        """Adds the mean power of a step with utilization 0."""
        self._recent.append(power_w)
        if len(self._recent) == READINGS:
            median_w = sorted(self._recent)[READINGS // 2]
            self.seen_w = median_w if self.seen_w is None else min(self.seen_w, median_w)
