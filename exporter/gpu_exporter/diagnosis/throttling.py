"""Computes the share of the last window that each GPU spent in harmful throttling."""

from __future__ import annotations

from collections import deque

from gpu_exporter.common.model.readings import DeviceSnapshot
from gpu_exporter.common.model.views import Throttling

# Power capping is normal at full load, and sync boost is benign: neither is a fault by itself.
HARMFUL = ("thermal", "sw_thermal", "hw_thermal", "hw_power_brake", "reliability", "board_limit")


class ThrottleHistory:
    """The throttle counters of one GPU over the last `window_s` seconds, with one entry every `step_s` seconds."""

    def __init__(self, window_s: float, step_s: float = 10.0) -> None:
        self._window_s = window_s
        self._step_s = step_s
        self._entries: deque[tuple[float, dict[str, float]]] = deque()

    def add(self, snapshot: DeviceSnapshot) -> None:
        """Remembers the counters of a snapshot."""
        while self._entries and self._entries[0][0] < snapshot.monotonic - self._window_s:
            self._entries.popleft()
        if self._entries and snapshot.monotonic - self._entries[-1][0] < self._step_s:
            return
        counters = {reason: s for reason, s in snapshot.facts.throttle_s.items() if reason in HARMFUL}
        if counters:
            self._entries.append((snapshot.monotonic, counters))

    def worst(self) -> Throttling | None:
        """Returns the harmful reason that lasted for the largest share of the window. None while unknown."""
        if len(self._entries) < 2:
            return None
        (start, first), (end, last) = self._entries[0], self._entries[-1]
        shares = {
            reason: (last[reason] - first[reason]) / (end - start)
            for reason in last
            if last[reason] >= first.get(reason, float("inf"))
        }
        if not shares:
            return None
        reason = max(shares, key=lambda name: shares[name])
        return Throttling(reason, min(1.0, shares[reason]))
