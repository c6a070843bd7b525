"""Reads files of /proc with limits on their size. Never reads the command line or the environment of a process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from gpu_exporter.common.outside import WHOLE_MAX, whole

READ_MAX = 16384  # bytes of one file; a v1 host with deep paths needs about 2,000
BOOT_MAX = 4 * 1024 * 1024  # bytes of /proc/stat, which has a line for each CPU and a number for each interrupt
KTHREADD = 2
PF_KTHREAD = 0x00200000  # include/linux/sched.h
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
STOPPED = "T"  # stopped by a signal, as `scontrol suspend` does; "t" means stopped by a debugger


class Stat(NamedTuple):
    """The fields of /proc/PID/stat that are used. Times are in steps of 10 ms.

    `start_s`: seconds after boot. `cpu_s`: CPU time of all threads of the process.
    """

    name: str
    state: str  # one letter
    flags: int
    start_s: float
    cpu_s: float = 0.0
    has_terminal: bool = False


def parse_stat(text: str) -> Stat | None:
    """Parses one /proc/PID/stat, None if invalid. A process name may contain brackets and spaces."""
    head, bracket, rest = text.rpartition(")")
    fields = rest.split()
    # Indexes are the numbers of proc_pid_stat(5) minus 3, because the two fields before the bracket are cut off and the
    # manual counts from 1. Used: 3 state, 7 terminal, 9 flags, 14 and 15 CPU time, 22 start.
    if (
        not bracket
        or len(fields) < 20
        or (flags := whole(fields[6], WHOLE_MAX)) is None
        or (start := whole(fields[19], WHOLE_MAX)) is None
        or (user := whole(fields[11], WHOLE_MAX)) is None
        or (system := whole(fields[12], WHOLE_MAX)) is None
    ):
        return None
    name, cpu_s = head.partition("(")[2], (user + system) / TICKS_PER_S
    return Stat(name, fields[0], flags, start / TICKS_PER_S, cpu_s, fields[4] not in ("0", "-1"))


class Procfs:
    """The /proc folder at `root`."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def is_host(self) -> bool:
        """Returns whether this /proc shows the host's processes. There, pid 2 is the kernel's kthreadd."""
        stat = self.stat(KTHREADD)
        return stat is not None and stat.name == "kthreadd" and bool(stat.flags & PF_KTHREAD)

    def list_pids(self) -> list[int]:
        """Pids of all visible processes, empty if the folder is unreadable."""
        try:
            return [pid for entry in self._root.iterdir() if (pid := whole(entry.name)) is not None]
        except OSError:
            return []

    def boot_wall(self) -> float | None:
        """Boot time of the host in Unix seconds, by the host's present clock; None if unknown."""
        try:
            with (self._root / "stat").open("rb") as file:
                lines = file.read(BOOT_MAX).decode("ascii", "replace").splitlines()
        except OSError:
            return None
        found = next((line.split()[1] for line in lines if line.startswith("btime ")), None)
        seconds = whole(found, WHOLE_MAX) if found is not None else None
        return None if seconds is None else seconds + 0.0

    def stat(self, pid: int) -> Stat | None:
        """Returns the parsed `stat` file. None if `text` returns None, or if the file is invalid."""
        text = self.text(pid, "stat")
        return None if text is None else parse_stat(text)

    def text(self, pid: int, name: str, most: int = READ_MAX) -> str | None:
        """Returns the text of one file of less than `most` bytes. None if it is longer, if the process has ended, or if
        hidepid or missing permissions hide the file.
        """
        try:
            descriptor = os.open(f"{self._root}/{pid}/{name}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        data = b""
        try:
            # One read returns about a page of a longer file. In a truncated text, 4217 may look like 42.
            while len(data) < most and (part := os.read(descriptor, most - len(data))):
                data += part
        except OSError:
            return None
        finally:
            os.close(descriptor)
        return data.decode("utf-8", "replace") if len(data) < most else None


class NewestProcess:
    """Finds when the newest process with a given name started. Lists processes again only after that process ended."""

    def __init__(self, procfs: Procfs, name: str) -> None:
        self._procfs, self._name = procfs, name
        self._pid = 0

    def start_wall(self) -> float | None:
        """Start of the process in Unix seconds. None if no process with this name is visible."""
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
