"""A /proc, read with a bound: two files of a process, `stat` and `cgroup`, never its command line or environment."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from gpu_exporter.outside import WHOLE_MAX, whole

READ_MAX = 16384  # bytes of one file; a v1 host with deep paths needs some 2,000
BOOT_MAX = 4 * 1024 * 1024  # bytes of /proc/stat, which has a line for each CPU and a number for each interrupt
KTHREADD = 2
PF_KTHREAD = 0x00200000  # include/linux/sched.h
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
STOPPED = "T"  # by a signal, as `scontrol suspend` sends it; "t" is stopped by a debugger


class Stat(NamedTuple):
    """The part of /proc/PID/stat that is used. `start_s`: seconds after boot, in steps of 10 ms."""

    name: str
    state: str  # one letter
    flags: int
    start_s: float


def parse_stat(text: str) -> Stat | None:
    """The fields of one /proc/PID/stat, None when it is none. A process may have brackets and spaces in its name."""
    head, bracket, rest = text.rpartition(")")
    fields = rest.split()
    # Numbers of proc_pid_stat(5), less the two before the bracket and one since they count from 1: 3 state, 9 flags,
    # 22 start.
    if (
        not bracket
        or len(fields) < 20
        or (flags := whole(fields[6], WHOLE_MAX)) is None
        or (start := whole(fields[19], WHOLE_MAX)) is None
    ):
        return None
    return Stat(head.partition("(")[2], fields[0], flags, start / TICKS_PER_S)


class Procfs:
    """The /proc below `root`."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def is_host(self) -> bool:
        """Whether it shows the host's processes: only there pid 2 is the kernel's kthreadd."""
        stat = self.stat(KTHREADD)
        return stat is not None and stat.name == "kthreadd" and bool(stat.flags & PF_KTHREAD)

    def list_pids(self) -> list[int]:
        """Every process that is shown, empty where the folder cannot be read."""
        try:
            return [pid for entry in self._root.iterdir() if (pid := whole(entry.name)) is not None]
        except OSError:
            return []

    def boot_wall(self) -> float | None:
        """When the host was started, in Unix seconds by its clock of now; None where it is not said."""
        try:
            with (self._root / "stat").open("rb") as file:
                lines = file.read(BOOT_MAX).decode("ascii", "replace").splitlines()
        except OSError:
            return None
        found = next((line.split()[1] for line in lines if line.startswith("btime ")), None)
        seconds = whole(found, WHOLE_MAX) if found is not None else None
        return None if seconds is None else seconds + 0.0

    def stat(self, pid: int) -> Stat | None:
        """None as for `text`."""
        text = self.text(pid, "stat")
        return None if text is None else parse_stat(text)

    def text(self, pid: int, name: str) -> str | None:
        """None for a process that has ended or that hidepid or missing rights hide: nothing is known then."""
        try:
            descriptor = os.open(f"{self._root}/{pid}/{name}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            data = os.read(descriptor, READ_MAX)
            return data.decode("utf-8", "replace") if len(data) < READ_MAX else None  # cut off, 42 may be 4217
        except OSError:
            return None
        finally:
            os.close(descriptor)


class NewestProcess:
    """When the newest of the host's processes of one name started. All are looked at only after it has ended."""

    def __init__(self, procfs: Procfs, name: str) -> None:
        self._procfs, self._name = procfs, name
        self._pid = 0

    def start_wall(self) -> float | None:
        """Unix seconds; None where no such process is seen."""
        boot = self._procfs.boot_wall()
        if boot is None or not self._procfs.is_host():
            return None
        stat = self._procfs.stat(self._pid) if self._pid else None
        if stat is None or stat.name != self._name:
            stats = ((pid, self._procfs.stat(pid)) for pid in self._procfs.list_pids())
            found = [(stat.start_s, pid) for pid, stat in stats if stat is not None and stat.name == self._name]
            if not found:
                return None
            start_s, self._pid = max(found)
            return boot + start_s
        return boot + stat.start_s
