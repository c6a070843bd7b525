"""A simulated GPU for workloads without one: an asynchronous queue, a launch that costs CPU time, a sync that spins.

The device is a file that several processes map. Its kernels cost no CPU time, so they take none from the loaders.
Another process reads its utilization, outside the workload's cgroup. It cannot model
kernels that are too small for the launch, and synchronisation inside of a step: such faults are left to real GPUs.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import time
from pathlib import Path

LAYOUT = struct.Struct("<dd32q")  # busy until (monotonic seconds), busy seconds so far, pids with a context
PIDS = 32
LAUNCH_S = 5e-6  # CPU time of one launch, as on real GPUs


class SimulatedDevice:
    """One GPU. Several processes may use it at once."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("r+b" if path.exists() else "w+b")
        if not path.stat().st_size:
            self._file.write(bytes(LAYOUT.size))
            self._file.flush()
        self._map = mmap.mmap(self._file.fileno(), LAYOUT.size)

    def _read(self) -> tuple[float, float, list[int]]:
        until, busy, *pids = LAYOUT.unpack_from(self._map)
        return until, busy, pids

    def open_context(self) -> None:
        """Register this process, as the driver lists a process with a context."""
        with _Locked(self._file.fileno()):
            until, busy, pids = self._read()
            pids[pids.index(0)] = os.getpid()
            LAYOUT.pack_into(self._map, 0, until, busy, *pids)

    def launch(self, seconds: float) -> None:
        """Add a kernel of this length to the queue, and return at once."""
        end = time.perf_counter() + LAUNCH_S
        while time.perf_counter() < end:
            pass
        with _Locked(self._file.fileno()):
            until, busy, pids = self._read()
            LAYOUT.pack_into(self._map, 0, max(until, time.monotonic()) + seconds, busy + seconds, *pids)

    def synchronize(self) -> None:
        """Wait until the queue is empty. Spins, as CUDA does by default."""
        while time.monotonic() < self._read()[0]:
            pass

    def reached_at(self) -> float:
        """When the queue has done all that it has now, in monotonic seconds."""
        return max(self._read()[0], time.monotonic())

    def busy_s(self) -> float:
        """Seconds of kernels that have ended, or run now."""
        until, busy, _ = self._read()
        return busy - max(0.0, until - time.monotonic())

    def pids(self) -> tuple[int, ...]:
        return tuple(pid for pid in self._read()[2] if pid and Path(f"/proc/{pid}").exists())


class _Locked:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __enter__(self) -> None:
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
