"""A /proc, read with a bound: two files of a process, `stat` and `cgroup`, never its command line or environment."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from gpu_exporter.outside import WHOLE_MAX, whole

READ_MAX = 16384  # bytes of one file; a v1 host with deep paths needs some 2,000
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
