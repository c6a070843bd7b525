"""When an owner's alert fires, in minutes of a world.

More than 60 min idle is true at minute 61, so with `for: 10m` the alert fires at 71. `keep_firing_for: 15m` keeps it for 14
minutes after the first minute in which the expression is no longer true. promtool evaluates every group every minute. With
an `alerts.owners_interval` of two minutes, every time may be two minutes later.
"""

from __future__ import annotations

from tests.rules.promtool import Firing

FIRES = 71  # GpuHolderIdle of a holder that is idle from minute 0
END = 140  # of most worlds
KEPT = 14  # minutes for which an alert stays after the first in which its expression is empty


def idle(*intervals: tuple[int, int], **labels: str) -> list[Firing]:
    return [Firing("GpuHolderIdle", start, end, labels) for start, end in intervals]


def absent(start: int, end: int) -> Firing:
    return Firing("GpuMonitoringAbsent", start, end)
