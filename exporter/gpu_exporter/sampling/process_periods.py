"""Who worked on a shared GPU, by process: periods that lie end to end, each as long as what the driver's ring has told.

The driver tells each process's mean over its samples since a moment (nvmlDeviceGetProcessUtilization). It is asked from
the newest entry of its ring of utilization that the cycle before has read, so that both speak of the same time. What it
says is believed as far as it can be true: drivers list a hundred entries with pids of nobody and shares of millions
once a process is a zombie (Syllo/nvtop issue 110).
"""

from __future__ import annotations

from collections.abc import Sequence

from gpu_exporter.collectors.contract import Cycle
from gpu_exporter.devices.protocol import ProcessUtilization
from gpu_exporter.model import ProcessPeriod, ProcessShare

LONGEST_S = 15.0  # what the driver keeps of single processes is not documented; its rings keep some 16 s
LEAST = 0.005  # a process that is listed with a share that rounds to 0 has worked all the same; half of NVML's step
AHEAD_S = 1.0  # an entry that is stamped after this is none: the longest period of a driver
PID_MAX = 2**22  # of Linux (PID_MAX_LIMIT)
UNSUPPORTED = "the driver does not tell what single processes do"
TOO_LONG = "what single processes did was not asked in time"


class ProcessPeriods:
    """The periods of one device. Not thread-safe: belongs to the device's one loop."""

    def __init__(self) -> None:
        self._since: float | None = None  # wall

    def forget(self) -> None:
        """Nobody needs the periods for now, or the device does not answer."""
        self._since = None

    def read(self, cycle: Cycle, newest_wall: float, monotonic: float, wall: float) -> ProcessPeriod | None:
        """The period up to `newest_wall`, None for the first one and while there is nothing new.

        `newest_wall`: Unix seconds of the newest entry that is known of the device itself; `monotonic` is `wall` now.
        """
        since = self._since
        if since is None or newest_wall <= since - AHEAD_S:  # the wall clock was set back
            self._since = newest_wall
            return None
        if newest_wall <= since:
            return None
        self._since = newest_wall
        shift = monotonic - wall
        start, end = since + shift, newest_wall + shift
        if end - start > LONGEST_S:
            return ProcessPeriod(start, end, problem=TOO_LONG)
        entries = cycle.read(lambda: cycle.device.read_process_utilization(since))
        if entries is None:
            return ProcessPeriod(start, end, problem=UNSUPPORTED)
        believed = [entry for entry in entries if _is_plausible(entry, since, newest_wall + AHEAD_S)]
        return ProcessPeriod(start, end, _by_process(believed, shift))


def _is_plausible(entry: ProcessUtilization, after: float, until: float) -> bool:
    return 0 < entry.pid < PID_MAX and entry.is_active and 0.0 <= entry.ratio <= 1.0 and after < entry.wall <= until


def _by_process(entries: Sequence[ProcessUtilization], shift: float) -> tuple[ProcessShare, ...]:
    """One share for each process, the mean of its entries where a driver gives several."""
    found: dict[int, list[ProcessUtilization]] = {}
    for entry in entries:
        found.setdefault(entry.pid, []).append(entry)
    return tuple(
        ProcessShare(
            pid,
            max(LEAST, sum(entry.ratio for entry in several) / len(several)),
            max(entry.wall for entry in several) + shift,
        )
        for pid, several in found.items()
    )
