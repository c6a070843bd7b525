"""Counts the read calls and the open remote files of processes. Needs the right to trace them (CAP_SYS_PTRACE).

The mount number of an open file (fdinfo, mountinfo) identifies its file system. The exporter does not read the path of
the file and does not open it, because a network file system that hangs must not block the exporter.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from gpu_exporter.common.model.evidence import FileEvidence
from gpu_exporter.common.outside import whole
from gpu_exporter.common.procfs import Procfs
from gpu_exporter.diagnosis.host.network import Mount, list_mounts
from gpu_exporter.diagnosis.host.processes import FAILURES

FILES_MAX = 256  # open files of one process
SPECIAL = frozenset(("proc", "sysfs", "devtmpfs", "devpts", "mqueue", "cgroup", "cgroup2", "tmpfs", "overlay"))
"""File systems whose open files are not data: the kernel's own, tmpfs, and the container image. Pipes have no mount."""


class _ReadCounters(NamedTuple):
    reads: float
    read_bytes: float


def _is_log(name: str, flags: str) -> bool:
    """Whether an open file is a standard stream, or is open only for writing. `flags`: octal (proc_pid_fdinfo(5))."""
    return name in ("0", "1", "2") or (flags[-1:].isdecimal() and int(flags[-1], 8) & os.O_ACCMODE == os.O_WRONLY)


class HolderFiles:
    """Counts the reads of one holder's processes. Remembers each process's counters from one reading to the next."""

    def __init__(self, root: Path, procfs: Procfs) -> None:
        self._root, self._procfs = root, procfs
        self._last: dict[int, _ReadCounters] = {}

    def look(self, pids: Sequence[int], span_s: float) -> FileEvidence | None:
        """Counts the reads of these processes since the last call. None at the first, or without the right to trace."""
        psutil.PROCFS_PATH = str(self._root)
        before, self._last = self._last, {}
        reads = read_bytes = 0.0
        compared = False
        for pid in pids:
            try:
                process = psutil.Process(pid)
                counters = process.io_counters()
            except FAILURES:
                continue
            now = _ReadCounters(float(counters.read_count), float(counters.read_chars))
            self._last[hash(process)] = now
            if (last := before.get(hash(process))) is not None and span_s > 0.0:
                compared = True
                reads += max(0.0, now.reads - last.reads) / span_s
                read_bytes += max(0.0, now.read_bytes - last.read_bytes) / span_s
        if not compared:
            return None
        kinds = [mount for pid in pids for mount in self._list_open(pid)]
        remote = sum(mount.is_network for mount in kinds)
        local = sum(not mount.is_remote for mount in kinds)
        return FileEvidence(reads, read_bytes, remote, local)  # a FUSE file system counts as neither

    def _list_open(self, pid: int) -> Collection[Mount]:
        """The mounts of the data files that a process has open."""
        mounts = {mount.number: mount for mount in list_mounts(self._procfs, pid) or ()}
        found = []
        try:
            with os.scandir(self._root / str(pid) / "fdinfo") as entries:
                names = [entry.name for entry, _ in zip(entries, range(FILES_MAX), strict=False)]
        except OSError:
            return ()
        for name in names:
            text = self._procfs.text(pid, f"fdinfo/{name}") if whole(name) is not None else None
            fields = {
                key: value.strip() for key, _, value in (line.partition(":") for line in (text or "").splitlines())
            }
            mount = mounts.get(fields.get("mnt_id", ""))
            if mount is not None and mount.kind not in SPECIAL and not _is_log(name, fields.get("flags", "")):
                found.append(mount)
        return found
