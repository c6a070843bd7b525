"""Whose processes run on which GPU: pids from the driver, owners from /proc.

Two files of a process are read: `cgroup`, and `stat` for its start time and whether it is NVIDIA's MPS server. Command
line and environment are never read. A pid of the driver means a process of the host, so /proc must be the host's
(hostPID in a pod, or the host's /proc mounted and named with --path.procfs): kthreadd, which only the kernel starts,
shows that it is.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from gpu_exporter.attribution.cgroup import Owner, parse_cgroup
from gpu_exporter.clock import Clock
from gpu_exporter.model import DeviceSnapshot, ProcessList, UnitId

READ_MAX = 16384  # bytes of one file; a v1 host with deep paths needs some 2,000
UNIT_MAX = 256  # processes of one GPU that are looked at; the rest are not known
KTHREADD = 2
PF_KTHREAD = 0x00200000  # include/linux/sched.h
# NVIDIA's MPS server runs the kernels of all its clients, and may be in a pod of its own. Linux keeps 15 bytes of it.
MPS_SERVER = "nvidia-cuda-mps"
TICKS_PER_S = os.sysconf("SC_CLK_TCK")

Owners = Mapping[UnitId, tuple[Owner, ...]]
"""The distinct owners of the processes on each unit that could be looked up. A unit that is missing is not known."""


class Stat(NamedTuple):
    """The part of /proc/PID/stat that is used. `start_s`: seconds after boot, in steps of 10 ms."""

    name: str
    flags: int
    start_s: float


def parse_stat(text: str) -> Stat | None:
    """The fields of one /proc/PID/stat, None when it is none. A process may have brackets and spaces in its name."""
    head, bracket, rest = text.rpartition(")")
    fields = rest.split()
    # Numbers of proc_pid_stat(5), less the two before the bracket and one since they count from 1: 9 flags, 22 start.
    if not bracket or len(fields) < 20 or not (fields[6].isdecimal() and fields[19].isdecimal()):
        return None
    return Stat(head.partition("(")[2], int(fields[6]), int(fields[19]) / TICKS_PER_S)


class ProcessOwners:
    """Looks the owners of processes up. `procfs` is where the host's /proc is."""

    def __init__(
        self,
        procfs: Path,
        clock: Clock,
        since_boot: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME),
    ) -> None:
        self._procfs = procfs
        self._clock = clock
        self._since_boot = since_boot

    def is_host(self) -> bool:
        """Whether `procfs` shows the host's processes: only there pid 2 is the kernel's kthreadd."""
        stat = self._stat(KTHREADD)
        return stat is not None and stat.name == "kthreadd" and bool(stat.flags & PF_KTHREAD)

    def read(self, snapshots: Iterable[DeviceSnapshot]) -> Owners:
        """The owners on each unit of the GPUs whose processes were listed."""
        owners: dict[UnitId, tuple[Owner, ...]] = {}
        for snapshot in snapshots:
            if not (snapshot.up and snapshot.processes is not None and snapshot.identity.uuid):
                continue
            uuid = snapshot.identity.uuid
            has_mig = snapshot.identity.mig_mode == "enabled"
            units = {i.mig: UnitId(uuid, i.uuid) for i in snapshot.instances} if has_mig else {"": UnitId(uuid)}
            found: dict[UnitId, dict[Owner, None]] = {}
            # A process on an instance that is not listed, or on none, is on no unit that we know.
            listed = [process for process in snapshot.processes.processes if process.mig in units]
            for process in listed[:UNIT_MAX]:
                owner = self._owner(process.pid, snapshot.processes)
                if owner is not None:
                    found.setdefault(units[process.mig], {})[owner] = None
            owners.update((unit, tuple(several)) for unit, several in found.items())
        return owners

    def _owner(self, pid: int, listed: ProcessList) -> Owner | None:
        """None when the process is gone, another one has its pid, it may not be looked at, or it serves all."""
        stat = self._stat(pid)
        if stat is None or stat.name.startswith(MPS_SERVER):
            return None
        age_s = self._clock.monotonic() - listed.monotonic
        if stat.start_s > self._since_boot() - age_s:
            return None  # started after the driver listed the pid
        text = self._text(pid, "cgroup")
        again = self._stat(pid)
        if text is None or again is None or again.start_s != stat.start_s:
            return None
        return parse_cgroup(text)

    def _stat(self, pid: int) -> Stat | None:
        text = self._text(pid, "stat")
        return None if text is None else parse_stat(text)

    def _text(self, pid: int, name: str) -> str | None:
        """None for a process that has ended or that hidepid or missing rights hide: nothing is known then."""
        try:
            descriptor = os.open(f"{self._procfs}/{pid}/{name}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            data = os.read(descriptor, READ_MAX)
            return data.decode("utf-8", "replace") if len(data) < READ_MAX else None  # cut off, 42 may be 4217
        except OSError:
            return None
        finally:
            os.close(descriptor)
