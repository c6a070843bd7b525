"""Reads the kernel's accounting of a pod or job: CPU time, disk traffic, and the number of CPUs that it may use.

The counters of a cgroup include ended processes. The kernel writes them, and no process in the cgroup can change them.
Version 2 of cgroups is one tree. Version 1 is one tree per controller, of which only `cpuacct` is required. Neither
version counts the traffic of network file systems or sockets, so traffic is of block devices only.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Set
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from gpu_exporter.common.cgroup import parse_cgroup
from gpu_exporter.common.model.holders import Who
from gpu_exporter.common.outside import whole
from gpu_exporter.diagnosis.host.cgroup_files import CPU, CPUACCT, NS, US, CgroupFiles, field, number
from gpu_exporter.diagnosis.host.cgroup_files import read_text as _text

DEPTH_MAX = 32  # kind (Kubernetes in Docker) in a systemd slice: 8
FOLDERS_MAX = 20_000  # folders visited in one search
INNER_MAX = 256  # ... and below the cgroup of one holder: steps, containers, and what a privileged one adds
PIDS_MAX = 512  # processes of one holder


class CgroupReading(NamedTuple):
    """Counters of one cgroup since its creation.

    `io_bytes`: bytes read and written, None without the block I/O controller. `cpus`: number of CPUs that the cgroup
    may use at the same time, None without a limit.
    """

    cpu_s: float
    io_bytes: float | None = None
    cpus: float | None = None


class Members(NamedTuple):
    """Processes of a cgroup and its children, at most PIDS_MAX. `is_all`: no process is missing."""

    pids: frozenset[int]
    is_all: bool


class Cgroups:
    """The cgroups below `root`, where the host mounts /sys/fs/cgroup."""

    def __init__(self, root: Path) -> None:
        self.files = CgroupFiles(root)

    def find(self, wanted: Collection[Who]) -> dict[Who, PurePosixPath]:
        """Finds the cgroups of these pods and jobs. If a pod or job has several cgroups, the outermost one counts."""
        return self._look(wanted)[0]

    def list_pods(self, wanted: Set[str]) -> Mapping[str, PurePosixPath] | None:
        """Returns the cgroups of the pods in `wanted` (UIDs); None if not all cgroups could be checked."""
        found, is_all = self._look([("pod", uid) for uid in wanted])
        return {uid: place for (_, uid), place in found.items()} if is_all else None

    def list_pods_inside(self, folder: PurePosixPath) -> Set[str] | None:
        """Returns the UIDs of the pods with a cgroup in this folder or below it, but not inside another pod; None if
        unreadable. Much faster than a search, because it reads no cgroup inside a pod.
        """
        base = self.files.tree(CPUACCT)
        if base is None:
            return None
        found: set[str] = set()
        try:
            for outer in _names(base / folder):
                pods = parse_cgroup(f"0::/{outer}").pods
                names = () if pods else _names(base / folder / outer)
                found.update(pods, *(parse_cgroup(f"0::/{name}").pods for name in names))
        except OSError:
            return None
        return found

    def _look(self, wanted: Collection[Who]) -> tuple[dict[Who, PurePosixPath], bool]:
        """Returns the result of `find`, and whether the holders missing in it certainly have no cgroup."""
        base = self.files.tree(CPUACCT)
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
        """Returns all processes of a cgroup and its children. None if unreadable or more than PIDS_MAX."""
        found = self.list_members(place)
        return found.pids if found is not None and found.is_all else None

    def list_members(self, place: PurePosixPath) -> Members | None:
        """Returns the processes of a cgroup and its children, at most PIDS_MAX. None if no process is visible.

        The kernel writes 0 for a process outside the exporter's PID namespace.
        """
        base = self.files.tree(CPUACCT)
        if base is None:
            return None
        found: set[int] = set()
        walk = _Walk(base / place, INNER_MAX)
        is_all = True
        for inner in (PurePosixPath(), *walk):
            text = _text(base / place / inner / "cgroup.procs", truncates=True)
            if text is None:  # also a threaded cgroup, whose processes are listed only at its root
                is_all = False
                continue
            is_all = is_all and (not text or text.endswith("\n"))
            found.update(
                pid
                for line in text.splitlines(keepends=True)
                if line.endswith("\n") and (pid := whole(line.strip())) is not None
            )
            if len(found) > PIDS_MAX:
                return Members(frozenset(sorted(found - {0})[:PIDS_MAX]), is_all=False)
        if 0 in found or not (found or is_all):
            return None
        return Members(frozenset(found), is_all and walk.is_whole)

    def list_inner(self, place: PurePosixPath, most: int) -> list[PurePosixPath]:
        """Lists a cgroup and its children, at most `most`. The limits of a pod may be set on its containers."""
        base = self.files.tree(CPU)
        return [place] if base is None else [place, *(place / inner for inner in _Walk(base / place, most - 1))]

    def read(self, place: PurePosixPath) -> CgroupReading | None:
        """Reads the present counters. None if the cgroup has ended or its CPU time cannot be read."""
        files = self.files
        usage = field(files.text(CPUACCT, place, "cpu.stat"), "usage_usec") if files.is_v2 else None
        if not files.is_v2:
            usage = number(files.text(CPUACCT, place, "cpuacct.usage"))
        if usage is None:
            return None
        return CgroupReading(usage * (US if files.is_v2 else NS), files.read_traffic(place), files.read_cpus(place))


class _Walk:
    """Yields the folders below `base`, level by level. `is_whole`: false if an existing folder was skipped."""

    def __init__(self, base: Path, folders_max: int | None = None) -> None:
        self.is_whole = True
        self._base = base
        self._folders_max = FOLDERS_MAX if folders_max is None else folders_max

    def __iter__(self) -> Iterator[PurePosixPath]:
        waiting = deque([PurePosixPath()])
        left = self._folders_max
        while waiting:
            place = waiting.popleft()
            try:
                names = _names(self._base / place)
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


def _names(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
