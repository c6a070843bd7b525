"""Waiting of a cgroup for CPU quota, memory and disks, for the causes of low utilization.

The limits of a pod are often those of its containers, so the cgroups below are read too. If several have limits, only
limits on most of the holder's work count: a throttled sidecar is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import NamedTuple

from gpu_exporter.host.cgroup_files import CPU, MEMORY, US, CgroupFiles, field, number
from gpu_exporter.host.cgroups import Cgroups

INNER_MAX = 16  # cgroups of one holder that are read: a pod has a few containers, a job a few steps
MOST = 0.5  # share of the holder's CPU time, and of its memory: a cgroup with less of it is a sidecar
NO_LIMIT = 2.0**62  # version 1 writes the largest multiple of a page for "no limit"
PRESSURES = ("cpu", "memory", "io")


class QuotaPeriods(NamedTuple):
    """A cgroup with a CFS quota, in CPUs. Since it was created: its CPU seconds, the periods of the quota, and those in
    which it ran out.
    """

    quota: float
    cpu_s: float
    periods: float
    throttled: float


class Accounting(NamedTuple):
    """Counters since the cgroups were created, and present values; None is unknown.

    `quotas`: of each cgroup that has one. `waited_s`: seconds in which some task waited, by PRESSURES, and in which all
    tasks waited for memory ("memory full"). `memory_cache`: page
    cache that the kernel can give back. `faults`: page faults that read from disk.
    """

    quotas: Mapping[PurePosixPath, QuotaPeriods]
    waited_s: Mapping[str, float]
    memory_bytes: float | None
    memory_limit: float | None
    memory_cache: float | None
    shm_bytes: float | None
    faults: float | None
    killed: float | None
    written: float | None


def read_accounting(cgroups: Cgroups, place: PurePosixPath) -> Accounting:
    """The accounting of one holder."""
    files = cgroups.files
    places = cgroups.list_inner(place, INNER_MAX)
    quotas = {inner: found for inner in places if (found := _read_quota(cgroups, inner)) is not None}
    used, limit = _read_memory(files, places)
    stat = files.text(MEMORY, place, "memory.stat")
    prefix = "" if files.is_v2 else "total_"
    return Accounting(
        quotas=quotas,
        waited_s=_read_pressures(files, place) if files.is_v2 else {},
        memory_bytes=used,
        memory_limit=limit,
        memory_cache=field(stat, f"{prefix}inactive_file"),
        shm_bytes=field(stat, f"{prefix}shmem"),
        faults=field(stat, f"{prefix}pgmajfault"),
        killed=_read_killed(files, places),
        written=files.read_written(place),
    )


def find_quota(last: Accounting, now: Accounting, cpu_s: float) -> tuple[float | None, float | None]:
    """The quota that most of the work was under, in CPUs, and the share of its periods in which it ran out.

    `cpu_s`: CPU time of the holder since `last`. Without such a quota None and 0; the share is None if it cannot be
    compared.
    """
    found = [
        (before, after)
        for place, after in now.quotas.items()
        if (before := last.quotas.get(place)) is not None and after.cpu_s - before.cpu_s >= MOST * cpu_s
    ]
    if not found:
        return (None, None) if now.quotas.keys() - last.quotas.keys() else (None, 0.0)
    shares = [
        min(1.0, (after.throttled - before.throttled) / (after.periods - before.periods))
        for before, after in found
        if after.periods > before.periods and after.throttled >= before.throttled
    ]
    return min(after.quota for _, after in found), max(shares, default=None)


def _read_quota(cgroups: Cgroups, place: PurePosixPath) -> QuotaPeriods | None:
    files = cgroups.files
    quota = files.read_quota(place)
    reading = cgroups.read(place) if quota is not None else None
    text = files.text(CPU, place, "cpu.stat")
    periods, throttled = field(text, "nr_periods"), field(text, "nr_throttled")
    if quota is None or reading is None or periods is None or throttled is None:
        return None
    return QuotaPeriods(quota, reading.cpu_s, periods, throttled)


def _read_memory(files: CgroupFiles, places: Sequence[PurePosixPath]) -> tuple[float | None, float | None]:
    """Bytes in use and limit of the cgroup that is nearest to its limit and has most of the memory."""
    names = ("memory.current", "memory.max") if files.is_v2 else ("memory.usage_in_bytes", "memory.limit_in_bytes")
    used = {place: number(files.text(MEMORY, place, names[0])) for place in places}
    whole = used[places[0]] or 0.0
    found: list[tuple[float, float]] = []
    for place, each in used.items():
        limit = number(files.text(MEMORY, place, names[1]))
        if each is not None and limit is not None and 0.0 < limit < NO_LIMIT and each >= MOST * whole:
            found.append((each, limit))
    return max(found, key=lambda pair: pair[0] / pair[1], default=(None, None))


def _read_killed(files: CgroupFiles, places: Sequence[PurePosixPath]) -> float | None:
    """Processes that the OOM killer ended. Version 2 counts those of the cgroups below, version 1 does not."""
    if files.is_v2:
        return field(files.text(MEMORY, places[0], "memory.events"), "oom_kill")
    counts = [field(files.text(MEMORY, place, "memory.oom_control"), "oom_kill") for place in places]
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _read_pressures(files: CgroupFiles, place: PurePosixPath) -> dict[str, float]:
    """Seconds of waiting since the cgroup was created; empty on a kernel without PSI."""
    found: dict[str, float] = {}
    for name in PRESSURES:
        for line in (files.text(MEMORY, place, f"{name}.pressure") or "").splitlines():
            kind, _, rest = line.partition(" ")
            waited = number(rest.rpartition("total=")[2])
            if waited is not None and kind in ("some", "full"):
                found[name if kind == "some" else f"{name} full"] = waited * US
    return found
