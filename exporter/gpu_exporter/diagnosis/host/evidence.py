"""Reads the hosts of holders that do not use their GPUs well, as evidence for the causes. One reading is a look.

Looks are at least INTERVAL_S apart, or further if they would cost more than CPU_SHARE of a CPU.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import psutil

from gpu_exporter.common.clock import Clock
from gpu_exporter.common.model.evidence import HostEvidence
from gpu_exporter.common.model.holders import Who
from gpu_exporter.common.procfs import Procfs
from gpu_exporter.diagnosis.host.accounting import PRESSURES, Accounting, find_cpu_limit, read_accounting
from gpu_exporter.diagnosis.host.cgroup_files import least
from gpu_exporter.diagnosis.host.cgroups import CgroupReading, Cgroups, Members
from gpu_exporter.diagnosis.host.files import HolderFiles
from gpu_exporter.diagnosis.host.network import Mount, NetworkBytes, list_mounts, read_network
from gpu_exporter.diagnosis.host.processes import FAILURES, HolderProcesses
from gpu_exporter.diagnosis.host.subject import HostSubject

log = logging.getLogger(__name__)
INTERVAL_S = 15.0
SLACK_S = 1.0  # the calling loop wakes every INTERVAL_S, and may wake a moment early
CPU_SHARE = 0.002  # of one CPU, for all holders together
WITNESSES = 3  # processes of a holder: each shows the mounts of its container
FILES_OF = 4  # processes of a holder whose open files are read: each one costs CPU
SHM = "/dev/shm"  # noqa: S108  (a mount point that is looked up, not a file that is written)


class _HostCounters(NamedTuple):
    at: float
    reading: CgroupReading
    accounting: Accounting
    traffic: NetworkBytes | None
    host_s: tuple[float, float] | None  # CPU seconds of the host: busy, all


class _WatchedHolder(NamedTuple):
    """The last look at one holder, and the readers of its processes (None if the host's processes are not visible)."""

    look: _HostCounters | None
    processes: HolderProcesses | None
    files: HolderFiles | None


class EvidenceReader:
    """Reads the evidence of each holder's host: the difference between its last two looks."""

    def __init__(
        self, cgroups: Cgroups, clock: Clock, host_cpus: int, procfs: Path | None, *, with_files: bool = False
    ) -> None:
        """`procfs`: the host's /proc, None if the host's processes are not visible.

        `with_files`: also reads the processes' open files, which needs the right to trace processes.
        """
        self._cgroups, self._clock, self._host_cpus = cgroups, clock, host_cpus
        self._root = procfs
        self._procfs = None if procfs is None else Procfs(procfs)
        self._with_files = with_files
        self._watched: dict[Who, _WatchedHolder] = {}
        self._due = -math.inf  # monotonic

    def read(
        self, subjects: Iterable[HostSubject], places: Mapping[Who, PurePosixPath]
    ) -> Iterator[tuple[Who, HostEvidence]]:
        """Yields each holder's evidence since its previous look; nothing at the first, or before the next is due."""
        wanted = list(subjects)
        if not wanted:  # all holders are healthy
            self._watched = {}
            return
        if self._clock.monotonic() < self._due:
            return
        before, self._watched = self._watched, {}
        began = time.thread_time()
        host_s = self._read_host()
        try:
            for subject in wanted:
                if (found := self._try(subject, places, before, host_s)) is not None:
                    yield subject.who, found
        finally:
            spent_s = time.thread_time() - began
            self._due = self._clock.monotonic() + max(INTERVAL_S - SLACK_S, spent_s / CPU_SHARE)

    def _try(
        self,
        subject: HostSubject,
        places: Mapping[Who, PurePosixPath],
        before: Mapping[Who, _WatchedHolder],
        host_s: tuple[float, float] | None,
    ) -> HostEvidence | None:
        place = places.get(subject.who)
        if place is None:
            return None
        try:
            return self._look(subject, place, before.get(subject.who), host_s)
        except Exception:  # a bug that one holder shows must not cost the others
            log.exception("cannot read the CPU and disk use of a pod or job")
            return None

    def _look(
        self,
        subject: HostSubject,
        place: PurePosixPath,
        before: _WatchedHolder | None,
        host_s: tuple[float, float] | None,
    ) -> HostEvidence | None:
        reading = self._cgroups.read(place)
        if reading is None:
            return None
        watched = before or self._begin()
        members = None if self._procfs is None else self._cgroups.list_members(place)
        pids = _choose(subject, members)
        witnesses, is_all = _choose_witnesses(subject, pids)
        views = self._read_mounts(witnesses)
        mounts = None if views is None else [mount for view in views for mount in view]
        if not is_all and mounts is not None and not any(each.is_remote for each in mounts):
            mounts = None  # another process may have mounted one
        traffic = read_network(self._procfs, pids[0], mounts) if self._procfs is not None and pids else None
        look = _HostCounters(self._clock.monotonic(), reading, read_accounting(self._cgroups, place), traffic, host_s)
        self._watched[subject.who] = watched._replace(look=look)
        span_s = 0.0 if watched.look is None else look.at - watched.look.at
        processes = files = None
        if members is not None and watched.processes is not None:
            processes = watched.processes.look(members, subject.gpus, span_s)
        if members is not None and watched.files is not None:
            files = watched.files.look(pids[:FILES_OF], span_s)
        if watched.look is None or span_s <= 0.0 or reading.cpu_s < watched.look.reading.cpu_s:
            return None
        limits = {_find_shm(view) for view in views or ()}
        return _compare(watched.look, look)._replace(
            host_cpus=float(self._host_cpus),
            network_files=None if mounts is None else tuple(sorted({each.name for each in mounts if each.is_remote})),
            shm_limit=limits.pop() if len(limits) == 1 else None,
            processes=processes,
            files=files,
        )

    def _read_mounts(self, pids: Sequence[int]) -> list[list[Mount]] | None:
        """The mounts that each of these processes sees. None if the mounts of one process cannot be read."""
        if self._procfs is None or not pids:
            return None
        views = [list_mounts(self._procfs, pid) for pid in pids]
        return None if None in views else [view for view in views if view is not None]

    def _begin(self) -> _WatchedHolder:
        if self._root is None or self._procfs is None:
            return _WatchedHolder(None, None, None)
        files = HolderFiles(self._root, self._procfs) if self._with_files else None
        return _WatchedHolder(None, HolderProcesses(self._root, self._procfs), files)

    def _read_host(self) -> tuple[float, float] | None:
        """CPU seconds of the whole host since its start: the seconds in use, and all seconds."""
        if self._root is None:
            return None
        psutil.PROCFS_PATH = str(self._root)
        try:
            times = psutil.cpu_times()
        except FAILURES:
            return None
        # guest time is part of user time (proc_stat(5))
        total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        return total - times.idle - times.iowait, total


def _choose(subject: HostSubject, members: Members | None) -> list[int]:
    """The pids of the holder, those on GPUs first. A pid from the driver counts only if it is in the cgroup."""
    if members is None:
        return []
    ranks = [pid for gpu in subject.gpus or () for pid in gpu.pids if pid in members.pids]
    return list(dict.fromkeys((*ranks, *sorted(members.pids))))


def _choose_witnesses(subject: HostSubject, pids: Sequence[int]) -> tuple[Sequence[int], bool]:
    """Chooses the processes whose mounts are read. Returns them, and whether they show all mounts of the holder.

    Prefers a process on the GPU. Otherwise chooses the newest processes, never the oldest, which is the pod's pause
    process. `pids`: as `_choose` returns them.
    """
    ranks = {pid for gpu in subject.gpus or () for pid in gpu.pids}
    if ranks.intersection(pids[:1]):
        return pids[:1], True
    others = pids[1:] or pids
    return others[:: -max(1, len(others) // WITNESSES)][:WITNESSES], len(others) <= WITNESSES


def _find_shm(mounts: Sequence[Mount]) -> float | None:
    """The size of the topmost file system at /dev/shm."""
    return next((_size(each.options) for each in reversed(mounts) if each.point == SHM), None)


def _compare(last: _HostCounters, now: _HostCounters) -> HostEvidence:
    span_s = now.at - last.at

    def rate(before: float | None, after: float | None) -> float | None:
        return None if before is None or after is None or after < before else (after - before) / span_s

    def waited(name: str) -> float | None:
        found = rate(last.accounting.waited_s.get(name), now.accounting.waited_s.get(name))
        return None if found is None else min(1.0, found)

    limit = find_cpu_limit(last.accounting, now.accounting, now.reading.cpu_s - last.reading.cpu_s, span_s)
    written = rate(last.accounting.written, now.accounting.written)
    moved = rate(last.reading.io_bytes, now.reading.io_bytes)
    killed = rate(last.accounting.killed, now.accounting.killed)
    reached = rate(last.accounting.reached, now.accounting.reached)
    evidence = HostEvidence(
        last.at,
        now.at,
        cpus=least(now.reading.cpus, limit.cpus),
        quota=limit.quota,
        cores=rate(last.reading.cpu_s, now.reading.cpu_s),
        throttled=limit.throttled,
        host_busy=_find_busy(last.host_s, now.host_s),
        memory_bytes=now.accounting.memory_bytes,
        memory_limit=now.accounting.memory_limit,
        memory_full=waited("memory full"),
        refaults=rate(last.accounting.refaults, now.accounting.refaults),
        killed=None if killed is None else killed * span_s,
        ooms=None if killed is None or reached is None else min(killed, reached) * span_s,
        shm_bytes=now.accounting.shm_bytes,
        memory_cache=now.accounting.memory_cache,
        read=None if moved is None or written is None else max(0.0, moved - written),
        written=written,
    )
    evidence = evidence._replace(**{f"pressure_{name}": waited(name) for name in PRESSURES})  # type: ignore[arg-type]
    if last.traffic is not None and now.traffic is not None:
        received, sent = rate(last.traffic.received, now.traffic.received), rate(last.traffic.sent, now.traffic.sent)
        evidence = evidence._replace(received=received, sent=sent)
    return evidence


def _find_busy(last: tuple[float, float] | None, now: tuple[float, float] | None) -> float | None:
    if last is None or now is None or now[1] <= last[1]:
        return None
    return min(1.0, max(0.0, (now[0] - last[0]) / (now[1] - last[1])))


def _size(options: str) -> float | None:
    """The size of a tmpfs in bytes, from a mount option such as `size=65536k`; None without this option."""
    for option in options.split(","):
        name, _, value = option.partition("=")
        unit = {"k": 2**10, "m": 2**20, "g": 2**30}.get(value[-1:], 1)
        digits = value.rstrip("kmg")
        if name == "size" and digits.isdecimal() and digits.isascii():
            return float(digits[:15]) * unit
    return None
