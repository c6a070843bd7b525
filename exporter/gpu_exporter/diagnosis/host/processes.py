"""Compares the processes of a holder between two readings of its host (looks).

psutil reads identity and times, Procfs the threads. Calls of psutil that read the command line or search the whole host
are not used: name(), cmdline(), exe(), environ(), children(), str() of a Process. psutil's hash of pid and start time
identifies a process, so a reused pid is another process.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from gpu_exporter.common.model.evidence import ProcessEvidence
from gpu_exporter.common.outside import whole
from gpu_exporter.common.procfs import STOPPED, Procfs, Stat, parse_stat
from gpu_exporter.common.slurm.hostlist import parse_ranges
from gpu_exporter.diagnosis.host.cgroups import Members
from gpu_exporter.diagnosis.host.subject import RankedGpu

THREADS_MAX = 256  # threads of the two busiest processes together
BUSIEST = 2
DETAILS_MAX = 40  # processes whose name, terminal and memory are read: the busiest and the ranks
CPUS_TEXT_MAX = 64  # characters
BOUND_OF, OLDEST = 8, 4  # ranks, and processes with the lowest pids, such as a launcher, whose CPUs are read
LOADER_CORES = 0.05  # of a CPU: less is a launcher that waits
BUSY_CORES, FULL_CORES = 0.3, 0.85  # of a CPU: a loader that matters, and one that never waits
LOADER_NAMES = ("pt_data_worker",)  # torch 2.5 and newer name their loaders; others are found by their work
SLURMSTEPD = "slurmstepd"  # it binds the tasks of a job, but not itself
NOTEBOOKS = frozenset(("jupyter-lab", "jupyter-noteboo", "jupyter-server", "jupyterhub-sing", "code-server", "rserver"))
RUNNING = "R"
# It ended, /proc is not readable, or this kernel's files lack what psutil looks for.
FAILURES = (psutil.Error, OSError, ValueError, LookupError, RuntimeError)


class _Process(NamedTuple):
    pid: int
    key: int
    cpu_s: float
    status: str
    cores: float | None  # since the last look; None for a new process

    def __repr__(self) -> str:
        return "_Process(...)"  # printing it must not print a pid


class HolderProcesses:
    """The processes of one holder. Remembers each process's CPU time from one reading to the next."""

    def __init__(self, root: Path, procfs: Procfs) -> None:
        """`root`: the host's /proc, which `procfs` reads."""
        self._root, self._procfs = root, procfs
        self._cpu_s: dict[int, float] | None = None
        self._switches: dict[int, float] = {}

    def look(self, members: Members, gpus: Collection[RankedGpu] | None, span_s: float) -> ProcessEvidence:
        """Reads the processes once. `gpus`: the holder's GPUs, None if their processes are unknown.

        `span_s`: seconds since the last reading.
        """
        if gpus is not None:  # the driver also lists processes of others, on a shared GPU
            gpus = [gpu._replace(pids=tuple(pid for pid in gpu.pids if pid in members.pids)) for gpu in gpus]
        ranks = None if gpus is None else frozenset(pid for gpu in gpus for pid in gpu.pids)
        psutil.PROCFS_PATH = str(self._root)
        before, self._cpu_s = self._cpu_s, {}
        found: list[_Process] = []
        for pid in members.pids:
            if (process := _read(pid, before, span_s)) is not None:
                found.append(process)
                self._cpu_s[process.key] = process.cpu_s
        found.sort(key=lambda each: -(each.cores or 0.0))
        ours = [each for each in found if ranks is not None and each.pid in ranks]
        details = list({each.key: each for each in (*ours, *found)}.values())[:DETAILS_MAX]
        stats = {each.key: stat for each in details if (stat := self._procfs.stat(each.pid)) is not None}
        evidence = ProcessEvidence(
            processes=len(found),
            is_all=members.is_all,
            blocked=sum(each.status == psutil.STATUS_DISK_SLEEP for each in found),
            stopped=sum(stats[each.key].state == STOPPED for each in ours if each.key in stats),
            terminal=any(stat.has_terminal for stat in stats.values()),
            notebook=any(stat.name in NOTEBOOKS for stat in stats.values()),
        )
        evidence = self._count_threads(evidence, found)
        evidence = evidence._replace(switches=self._count_switches(found[:BUSIEST], span_s))
        if gpus is None:
            return evidence
        evidence = evidence._replace(
            ranks=len(ours),
            rank_cores=max((each.cores for each in ours if each.cores is not None), default=None),
            far=tuple((gpu.uuid, allowed) for gpu in gpus if (allowed := self._find_far(gpu))),
        )
        return self._divide(evidence, ours, [each for each in found if each not in ours], stats)

    def _divide(
        self,
        evidence: ProcessEvidence,
        ours: Sequence[_Process],
        others: Sequence[_Process],
        stats: Mapping[int, Stat],
    ) -> ProcessEvidence:
        """Adds the loaders to the evidence: processes with a loader's name.

        Without such a process, all processes that use CPU but not the GPU count as loaders.
        """
        loaders = [each for each in others if (stat := stats.get(each.key)) is not None and stat.name in LOADER_NAMES]
        named = len(loaders)
        loaders = loaders or [each for each in others if (each.cores or 0.0) >= LOADER_CORES]
        cores = [each.cores or 0.0 for each in loaders]
        oldest = [each for each in others if (stat := stats.get(each.key)) is None or stat.name != SLURMSTEPD]
        oldest = sorted(oldest, key=lambda each: each.pid)[:OLDEST]
        sizes = [size for each in loaders[:DETAILS_MAX] if (size := _resident(each.pid)) is not None]
        return evidence._replace(
            loaders=len(loaders),
            named_loaders=named,
            busy_loaders=sum(each >= BUSY_CORES for each in cores),
            full_loaders=sum(each >= FULL_CORES for each in cores),
            loader_cores=sum(cores),
            loader_most=max(cores, default=0.0),
            loader_bytes=max(sizes, default=None),
            loader_cpus=self._count_allowed(loaders),
            cpus=self._count_allowed([*ours[:BOUND_OF], *loaders, *oldest]),
        )

    def _count_allowed(self, processes: Collection[_Process]) -> int | None:
        """The number of CPUs on which any of these processes may run. None if this is unknown."""
        if len(processes) > DETAILS_MAX + BOUND_OF + OLDEST:
            return None
        try:
            found = [parse_ranges(self._allowed(each.pid)) for each in processes]
        except ValueError:  # also an empty text
            return None
        return len(frozenset().union(*found)) or None

    def _find_far(self, gpu: RankedGpu) -> str:
        """Returns the CPUs of the first process on this GPU, if no process on it may run near the GPU; otherwise ""."""
        texts = [self._allowed(pid) for pid in gpu.pids[:DETAILS_MAX]]
        if not (texts and gpu.cpus):
            return ""
        try:
            is_far = all(gpu.cpus.isdisjoint(parse_ranges(text)) for text in texts)
        except ValueError:  # also an empty text: the list could not be read
            return ""
        return texts[0][:CPUS_TEXT_MAX] if is_far else ""

    def _allowed(self, pid: int) -> str:
        """The CPUs on which a process may run (Cpus_allowed_list). psutil would use the exporter's PID namespace."""
        for line in (self._procfs.text(pid, "status") or "").splitlines():
            name, _, value = line.partition(":")
            if name == "Cpus_allowed_list":
                return value.strip()
        return ""

    def _count_threads(self, evidence: ProcessEvidence, found: list[_Process]) -> ProcessEvidence:
        """Adds the runnable threads: all of the two busiest processes, and one for each other running process."""
        runnable = sum(each.status == psutil.STATUS_RUNNING for each in found[BUSIEST:])
        left, is_all = THREADS_MAX, True
        for each in found[:BUSIEST]:
            threads = list(_list_threads(self._root / str(each.pid) / "task", left + 1))
            is_all = is_all and len(threads) <= left
            for thread in threads[:left]:
                stat = _parse(self._procfs.text(each.pid, f"task/{thread}/stat"))
                runnable += stat is not None and stat.state == RUNNING
            left -= len(threads[:left])
        return evidence._replace(runnable=runnable, is_all_threads=is_all)

    def _count_switches(self, busiest: Iterable[_Process], span_s: float) -> float | None:
        """Involuntary context switches per second of these processes. None at their first reading."""
        before, self._switches = self._switches, {}
        total: float | None = None
        for each in busiest:
            try:
                switches = float(psutil.Process(each.pid).num_ctx_switches().involuntary)
            except FAILURES:
                continue
            self._switches[each.key] = switches
            if each.key in before and span_s > 0.0:
                total = (total or 0.0) + max(0.0, switches - before[each.key]) / span_s
        return total


def _read(pid: int, before: Mapping[int, float] | None, span_s: float) -> _Process | None:
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            times, status = process.cpu_times(), process.status()
    except FAILURES:
        return None
    key, cpu_s = hash(process), times.user + times.system
    last = None if before is None else before.get(key)
    cores = None if last is None or span_s <= 0.0 else max(0.0, cpu_s - last) / span_s
    return _Process(pid, key, cpu_s, status, cores)


def _resident(pid: int) -> float | None:
    try:
        return float(psutil.Process(pid).memory_info().rss)
    except FAILURES:
        return None


def _list_threads(folder: Path, most: int) -> Iterable[int]:
    try:
        with os.scandir(folder) as entries:
            for entry, _ in zip(entries, range(most), strict=False):
                if (number := whole(entry.name)) is not None:
                    yield number
    except OSError:
        return


def _parse(text: str | None) -> Stat | None:
    return None if text is None else parse_stat(text)
