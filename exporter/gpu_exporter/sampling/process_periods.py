"""What each process did on a shared GPU, in periods that follow one another and end with the driver's newest sample.

The driver reports each process's mean over its samples since a moment (nvmlDeviceGetProcessUtilization). It is asked
from the newest entry of its ring of utilization that the cycle before has read, so that both are of the same time.
Entries that cannot be true are left out: once a process is a zombie, drivers list a hundred with pids that do not exist
and shares of millions (Syllo/nvtop issue 110).
"""

from __future__ import annotations

from collections.abc import Sequence

from gpu_exporter.collectors.contract import Cycle
from gpu_exporter.devices.protocol import ProcessUtilization
from gpu_exporter.model.readings import ProcessPeriod, ProcessShare

LONGEST_S = 15.0  # what the driver keeps of single processes is not documented; its rings keep some 16 s
LEAST = 0.005  # a process that is listed with a share that rounds to 0 has worked all the same; half of NVML's step
AHEAD_S = 1.0  # an entry may be stamped so much later than now: the longest sample period of a driver
PID_MAX = 2**22  # of Linux (PID_MAX_LIMIT)
UNSUPPORTED = "the driver does not tell what single processes do"
TOO_LONG = "what single processes did was not asked in time"


class ProcessPeriods:
    """The periods of one device. Not thread-safe: belongs to the device's one loop."""

    def __init__(self) -> None:
        self._since: float | None = None  # wall

    def forget(self) -> None:
        """The GPU is not shared, or does not answer: the next period begins with the next read."""
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
        fresh = [entry for entry in entries if 0 < entry.pid < PID_MAX and entry.wall > since]
        believed = [entry for entry in fresh if 0.0 <= entry.ratio <= 1.0 and entry.wall <= wall + AHEAD_S]
        # One whose number cannot be true was listed all the same, so it did something: its holder is not idle.
        odd = {entry.pid for entry in fresh} - {entry.pid for entry in believed}
        unread = tuple(ProcessShare(pid, LEAST, end) for pid in sorted(odd))
        return ProcessPeriod(start, end, (*_by_process(believed, shift), *unread))


def _by_process(entries: Sequence[ProcessUtilization], shift: float) -> tuple[ProcessShare, ...]:
    """One share for each process, the mean of its entries where a driver gives several; None where all are zeros."""
    found: dict[int, list[ProcessUtilization]] = {}
    for entry in entries:
        found.setdefault(entry.pid, []).append(entry)
    return tuple(
        ProcessShare(
            pid,
            max(LEAST, sum(entry.ratio for entry in several) / len(several))
            if any(entry.is_active for entry in several)
            else None,
            max(entry.wall for entry in several) + shift,
        )
        for pid, several in found.items()
    )
