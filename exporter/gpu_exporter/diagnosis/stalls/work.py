"""A histogram of the power that a holder's GPU draws at work. Its size does not grow with time."""

from __future__ import annotations

from array import array

BINS = 100
BIN_RATIO = 0.02  # of the default limit; boards may draw up to twice the limit for a moment


class WorkHistory:
    """Seconds spent at each level of power. The bins are shares of the default power limit."""

    def __init__(self) -> None:
        self._seconds = array("d", bytes(8 * BINS))
        self._bin_w = 0.0
        self.total_s = 0.0

    def add(self, power_w: float, seconds: float, limit_w: float) -> None:
        if self._bin_w == 0.0:
            self._bin_w = BIN_RATIO * limit_w  # the maker's limit does not change
        self._seconds[int(min(BINS - 1.0, max(0.0, power_w / self._bin_w)))] += seconds
        self.total_s += seconds

    def median_w(self) -> float | None:
        """Returns the median power at work in watts, rounded down to the edge of its bin. None before any work.

        A lower value leads to fewer stalls.
        """
        if self.total_s <= 0.0:
            return None
        passed_s = 0.0
        for place, seconds in enumerate(self._seconds):
            passed_s += seconds
            if passed_s >= self.total_s / 2:
                return place * self._bin_w
        return None
