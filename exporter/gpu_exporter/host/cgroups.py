"""The kernel's accounting of a pod or job: processor time, disk traffic, and the number of CPUs it may use.

The counters of a pod's or job's cgroup include all processes that ran in it, also those that have ended. The kernel
writes the counters; no process in the cgroup can change them. Both layouts are read: version 2 is one tree; version 1
is one tree per controller, of which only `cpuacct` is required. Traffic is that of block devices only: neither layout
counts the traffic of network file systems or sockets.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Collection, Iterator, Set
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from gpu_exporter.attribution.cgroup import parse_cgroup
from gpu_exporter.attribution.contradict import Who
from gpu_exporter.outside import whole
from gpu_exporter.slurm.hostlist import parse_ranges

READ_MAX = 65_536  # bytes of one file; io.stat has some 100 bytes per block device
DEPTH_MAX = 32  # kind (Kubernetes in Docker) in a systemd slice: 8
FOLDERS_MAX = 20_000  # folders visited in one search
PIDS_MAX = 512  # processes of one holder
CPUACCT = ("cpuacct", "cpu,cpuacct", "cpuacct,cpu")
CPU = ("cpu", *CPUACCT[1:])
US, NS = 1e-6, 1e-9


class CgroupReading(NamedTuple):
    """Counters of one cgroup since its creation. `io_bytes`: read and written bytes, None without that controller.
    `cpus`: how many CPUs it may use at once, None if there is no limit.
    """

    cpu_s: float
    io_bytes: float | None = None
    cpus: float | None = None


class Cgroups:
    """The cgroups below `root`, as a host mounts them at /sys/fs/cgroup."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._is_v2 = (root / "cgroup.controllers").exists()

    def find(self, wanted: Collection[Who]) -> dict[Who, PurePosixPath]:
        """The cgroups of these pods and jobs, as far as they are found; if there are several, the outermost."""
        return self._look(wanted)[0]

    def list_pods(self, wanted: Set[str]) -> Set[str] | None:
        """The UIDs in `wanted` whose pod has a cgroup; None if not every cgroup of the host could be checked."""
        found, is_all = self._look([("pod", uid) for uid in wanted])
        return {uid for _, uid in found} if is_all else None

    def _look(self, wanted: Collection[Who]) -> tuple[dict[Who, PurePosixPath], bool]:
        """The result of `find`, and whether the search proves that the missing ones have no cgroup on the host."""
        base = self._root if self._is_v2 else self._tree(CPUACCT)
        found: dict[Who, PurePosixPath] = {}
        if base is None:
            return found, False
        walk = _Walk(base)
        for place in walk:
            owner = parse_cgroup(f"0::/{place}")
            # The last pod in the path owns the folder. The outermost folder of a pod or job counts: steps and
            # containers are below it.
            of = [("pod", owner.pods[-1])] if owner.pods else []
            of += [("job", owner.job)] if owner.job else []
            for who in of:
                if who in wanted:
                    found.setdefault(who, place)
            if len(found) == len(wanted):
                return found, True
        return found, walk.is_whole

    def list_pids(self, place: PurePosixPath) -> frozenset[int] | None:
        """All processes of a cgroup and of those below it; None if they cannot be read or are more than PIDS_MAX.

        The kernel writes 0 for a process that the exporter's PID namespace does not show.
        """
        base = self._root if self._is_v2 else self._tree(CPUACCT)
        if base is None:
            return None
        found: set[int] = set()
        walk = _Walk(base / place)
        for inner in (PurePosixPath(), *walk):
            text = _text(base / place / inner / "cgroup.procs")
            if text is None:
                return None  # also a threaded cgroup, whose processes are listed only at its root
            found.update(pid for word in text.split() if (pid := whole(word)) is not None)
            if len(found) > PIDS_MAX or 0 in found:
                return None
        return frozenset(found) if walk.is_whole else None

    def read(self, place: PurePosixPath) -> CgroupReading | None:
        """The present counters; None if the cgroup has ended or its processor time cannot be read."""
        return self._read_v2(self._root / place) if self._is_v2 else self._read_v1(place)

    def _read_v2(self, folder: Path) -> CgroupReading | None:
        usage = _field(_text(folder / "cpu.stat"), "usage_usec")
        if usage is None:
            return None
        traffic = _text(folder / "io.stat")
        io_bytes = None if traffic is None else _sum(traffic, ("rbytes=", "wbytes="))
        quota, _, period = (_text(folder / "cpu.max") or "").strip().partition(" ")
        return CgroupReading(
            usage * US, io_bytes, _least(_ratio(quota, period), _count(folder / "cpuset.cpus.effective"))
        )

    def _read_v1(self, place: PurePosixPath) -> CgroupReading | None:
        usage = _number(self._v1(CPUACCT, place, "cpuacct.usage"))
        if usage is None:
            return None
        traffic = self._v1(("blkio",), place, "blkio.throttle.io_service_bytes")
        quota = self._v1(CPU, place, "cpu.cfs_quota_us") or ""
        period = self._v1(CPU, place, "cpu.cfs_period_us") or ""
        cpuset = self._tree(("cpuset",))
        allowed = None if cpuset is None else _count(cpuset / place / "cpuset.effective_cpus")
        return CgroupReading(usage * NS, _field(traffic, "Total"), _least(_ratio(quota, period), allowed))

    def _v1(self, names: tuple[str, ...], place: PurePosixPath, file: str) -> str | None:
        tree = self._tree(names)
        return None if tree is None else _text(tree / place / file)

    def _tree(self, names: tuple[str, ...]) -> Path | None:
        return next((path for path in (self._root / name for name in names) if path.is_dir()), None)


class _Walk:
    """The folders below `base`, by depth. `is_whole`: no folder was skipped, except folders just removed."""

    def __init__(self, base: Path) -> None:
        self.is_whole = True
        self._base = base

    def __iter__(self) -> Iterator[PurePosixPath]:
        waiting = deque([PurePosixPath()])
        left = FOLDERS_MAX
        while waiting:
            place = waiting.popleft()
            try:
                with os.scandir(self._base / place) as entries:
                    names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
            except FileNotFoundError:
                continue
            except OSError:
                self.is_whole = False
                continue
            if len(names) > left:
                self.is_whole = False
            for name in names[:left]:
                inner = place / name
                yield inner
                if len(inner.parts) < DEPTH_MAX:
                    waiting.append(inner)
                else:
                    self.is_whole = False
            left -= len(names)
            if left <= 0:
                self.is_whole = self.is_whole and not waiting
                return


def _text(path: Path) -> str | None:
    """The text of a file; None if it cannot be read or is longer than READ_MAX."""
    try:
        with path.open("rb") as file:
            data = file.read(READ_MAX)
    except OSError:
        return None
    return data.decode("ascii", "replace") if len(data) < READ_MAX else None


def _field(text: str | None, name: str) -> float | None:
    """The number that follows a name at the start of a line."""
    for line in (text or "").splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return _number(value)
    return None


def _sum(text: str, prefixes: tuple[str, ...]) -> float:
    numbers = (_number(word.partition("=")[2]) for word in text.split() if word.startswith(prefixes))
    return sum(number for number in numbers if number is not None)


def _number(text: str | None) -> float | None:
    text = (text or "").strip()
    return float(text) if text.isdecimal() and text.isascii() else None


def _ratio(quota: str, period: str) -> float | None:
    """CPUs from quota and period, both in microseconds; None without a quota, written as `max` or -1."""
    most, each = _number(quota), _number(period)
    return most / each if most and each else None


def _count(path: Path) -> float | None:
    """The number of CPUs in a list such as 0-3,8; None if the list is empty or invalid."""
    text = (_text(path) or "").strip()
    try:
        return float(len(parse_ranges(text))) if text else None
    except ValueError:
        return None


def _least(*limits: float | None) -> float | None:
    return min((limit for limit in limits if limit is not None), default=None)
