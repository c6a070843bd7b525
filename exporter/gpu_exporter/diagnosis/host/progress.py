"""Compares a holder's activity on its host between two readings, to find progress while its GPU may hang (a stall).

Only holders with a GPU in a run without progress are read. Processes that hang in a collective busy-wait. So the CPU
time of the processes on such GPUs is subtracted from that of the holder's cgroup. The rest belongs to loaders, even
ended ones, and to ranks with a GPU at rest.

Traffic is counted in the holder's own network namespace. If this may be the host's, the traffic is unknown, not 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePosixPath
from typing import NamedTuple

from gpu_exporter.common.clock import Clock
from gpu_exporter.common.model.holders import Who
from gpu_exporter.common.model.readings import HostProgress
from gpu_exporter.common.procfs import STOPPED, Procfs
from gpu_exporter.diagnosis.host.cgroups import PIDS_MAX, CgroupReading, Cgroups
from gpu_exporter.diagnosis.host.network import list_mounts, read_network


class Suspect(NamedTuple):
    """A holder whose host is to be read, because its GPU may hang.

    `pids`: its processes on GPUs that spin (100 % busy without progress), None if unknown. `gpus`: the number of these
    GPUs. `others`: its processes on its other GPUs, None if unknown.
    """

    who: Who
    pids: tuple[int, ...] | None
    gpus: int = 1
    others: tuple[int, ...] | None = None

    def __repr__(self) -> str:
        return "Suspect(...)"  # printing it must not print a pid


class _Look(NamedTuple):
    """One reading of a holder's host.

    `spinning`: CPU seconds of the processes on spinning GPUs, by pid and start; None if one could not be read.
    `processes`: all pids of the cgroup. `bytes`: traffic of the network namespace, None if unknown. `ranks`: for each
    process on a GPU (by pid and start), whether a signal has stopped it and its GPU does not spin; None if unknown.
    """

    at: float
    cgroup: CgroupReading
    spinning: Mapping[tuple[int, float], float] | None
    processes: frozenset[int] | None
    bytes: float | None
    ranks: Mapping[tuple[int, float], bool] | None = None


class ProgressReader:
    """Keeps the last look at each suspect."""

    def __init__(self, cgroups: Cgroups, clock: Clock, procfs: Procfs | None) -> None:
        """`procfs`: the host's /proc, None if the host's processes are not visible."""
        self._cgroups, self._clock, self._procfs = cgroups, clock, procfs
        self._looks: dict[Who, _Look] = {}

    def read(
        self, suspects: Iterable[Suspect], places: Mapping[Who, PurePosixPath]
    ) -> Iterator[tuple[Who, HostProgress]]:
        """Yields each suspect's activity since its last reading; nothing at the first. `places`: holders' cgroups."""
        before, self._looks = self._looks, {}
        for suspect in suspects:
            place = places.get(suspect.who)
            reading = None if place is None else self._cgroups.read(place)
            if place is None or reading is None:
                continue
            look = self._looks[suspect.who] = self._look(suspect, place, reading)
            if (last := before.get(suspect.who)) is not None and last.at < look.at:
                yield suspect.who, _compare(last, look)._replace(spinning=suspect.gpus)

    def _look(self, suspect: Suspect, place: PurePosixPath, reading: CgroupReading) -> _Look:
        procfs, at = self._procfs, self._clock.monotonic()
        if procfs is None or suspect.pids is None or not 0 < len(suspect.pids + (suspect.others or ())) <= PIDS_MAX:
            return _Look(at, reading, None, self._cgroups.list_pids(place), None)
        stats = {pid: procfs.stat(pid) for pid in (*suspect.pids, *(suspect.others or ()))}
        ranks = None
        if suspect.others is not None:
            # A stopped process on a GPU where another process spins is not a rank that others wait for.
            ranks = {
                (pid, stat.start_s): stat.state == STOPPED and pid not in suspect.pids
                for pid, stat in stats.items()
                if stat is not None
            }
        if not suspect.pids:
            return _Look(at, reading, None, self._cgroups.list_pids(place), None, ranks)
        known = {(pid, stat.start_s): stat.cpu_s for pid in suspect.pids if (stat := stats[pid]) is not None}
        spinning = known if len(known) == len(set(suspect.pids)) else None
        traffic = read_network(procfs, suspect.pids[0], list_mounts(procfs, suspect.pids[0]))
        moved = None if traffic is None else traffic.received + traffic.sent
        return _Look(at, reading, spinning, self._cgroups.list_pids(place), moved, ranks)


def _compare(last: _Look, now: _Look) -> HostProgress:
    span_s = now.at - last.at
    loaders: float | None = None
    is_new: bool | None = None
    # A process that has begun to spin since the last look has no earlier value to compare with.
    if last.spinning is not None and now.spinning is not None and last.spinning.keys() == now.spinning.keys():
        spun_s = sum(now.spinning.values()) - sum(last.spinning.values())
        loaders = max(0.0, now.cgroup.cpu_s - last.cgroup.cpu_s - spun_s) / span_s
    if last.processes is not None and now.processes is not None:
        is_new = bool(now.processes - last.processes)
    ended: int | None = None
    stopped: int | None = None
    if last.ranks is not None and now.ranks is not None:
        ended = len(last.ranks.keys() - now.ranks.keys())
        stopped = sum(is_stopped and last.ranks.get(rank, False) for rank, is_stopped in now.ranks.items())
    return HostProgress(
        last.at,
        now.at,
        loaders,
        is_new,
        _rate(last.cgroup.io_bytes, now.cgroup.io_bytes, span_s),
        _rate(last.bytes, now.bytes, span_s),
        cores=max(0.0, now.cgroup.cpu_s - last.cgroup.cpu_s) / span_s,
        ended=ended,
        stopped=stopped,
    )


def _rate(last: float | None, now: float | None, span_s: float) -> float | None:
    return None if last is None or now is None or now < last else (now - last) / span_s
