"""Reads the work of each process on a shared GPU in consecutive periods. Each period ends with the driver's newest
sample.

The driver reports each process's mean over its samples since a given time (nvmlDeviceGetProcessUtilization). This time
is the stamp of the newest utilization entry of the last cycle, so that both cover the same time.

Implausible entries are discarded: while a process is a zombie, drivers list a hundred entries with pids that do not
exist and shares of millions (Syllo/nvtop issue 110).
"""

from __future__ import annotations

from collections.abc import Sequence

from gpu_exporter.agent.collectors.contract import Cycle
from gpu_exporter.agent.devices.protocol import ProcessUtilization
from gpu_exporter.common.model.readings import ProcessPeriod, ProcessShare

LONGEST_S = 15.0  # how long the driver keeps per-process samples is not documented; its rings keep some 16 s
LEAST = 0.005  # share of a process that worked, but whose share rounds to 0; half of NVML's step
AHEAD_S = 1.0  # an entry may be stamped this much later than now: the longest sample period of a driver
PID_MAX = 2**22  # of Linux (PID_MAX_LIMIT)
UNSUPPORTED = "the driver reports no per-process utilization"
TOO_LONG = "per-process utilization was not read in time"


class ProcessPeriods:
    """The periods of one device. Not thread-safe: used by the device's one thread."""

    def __init__(self) -> None:
        self._since: float | None = None  # wall

    def forget(self) -> None:
        """Begins a new period at the next read, because the GPU is not shared or does not answer."""
        self._since = None

    def read(self, cycle: Cycle, newest_wall: float, monotonic: float, wall: float) -> ProcessPeriod | None:
        """Returns the work of each process up to `newest_wall`. None for the first read, and without a new entry.

        `newest_wall`: Unix seconds of the device's newest utilization entry. `monotonic`, `wall`: the present time by
        both clocks.
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
        # A process with an implausible share was listed nevertheless, so it worked: its holder is not idle.
        odd = {entry.pid for entry in fresh} - {entry.pid for entry in believed}
        unread = tuple(ProcessShare(pid, LEAST, end) for pid in sorted(odd))
        return ProcessPeriod(start, end, (*_by_process(believed, shift), *unread))


def _by_process(entries: Sequence[ProcessUtilization], shift: float) -> tuple[ProcessShare, ...]:
    """Returns one share for each process: the mean of its entries, None if all entries are 0."""
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
