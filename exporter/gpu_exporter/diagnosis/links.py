"""Remembers the fastest PCIe link of each GPU in the last window. A GPU at rest slows its link down."""

from __future__ import annotations

from collections import deque

from gpu_exporter.common.model.readings import DeviceSnapshot

LOOKS_MIN = 8  # readings of a working GPU: the link takes a moment to become fast again
GB = 1e9


class LinkHistory:
    """The link of one GPU, from readings in which the GPU worked."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._is_busy = False
        self._entries: deque[tuple[float, float, float]] = deque()  # monotonic, bandwidth, its maximum

    def add(self, snapshot: DeviceSnapshot) -> None:
        """Remembers the link if the GPU works in this snapshot and in the previous one.

        The link is read less often than the utilization, so its last reading may be from the time at rest before the
        work.
        """
        was_busy, self._is_busy = self._is_busy, (snapshot.facts.utilization or 0.0) > 0.0
        while self._entries and self._entries[0][0] < snapshot.monotonic - self._window_s:
            self._entries.popleft()
        link, most = snapshot.facts.link, snapshot.facts.link_max
        if link is not None and most and was_busy and self._is_busy:
            self._entries.append((snapshot.monotonic, link, most))

    def best(self) -> tuple[float, str] | None:
        """Returns the link's share of its maximum bandwidth, and both as text. None after too few readings."""
        if len(self._entries) < LOOKS_MIN:
            return None
        _, link, most = max(self._entries, key=lambda entry: entry[1] / entry[2])
        return link / most, f"{link / GB:.1f} of {most / GB:.1f} GB/s"
