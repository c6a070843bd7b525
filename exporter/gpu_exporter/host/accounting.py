"""What a cgroup had to wait for: its CPU quota, its memory, its disks. For the causes of low utilization.

The limits of a pod are often those of its containers, so the cgroups below are read too: throttling is that of the
cgroup that waited most, memory that of the cgroup nearest to its limit.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import NamedTuple

from gpu_exporter.host.cgroup_files import CPU, MEMORY, US, CgroupFiles, field, number
from gpu_exporter.host.cgroups import Cgroups

INNER_MAX = 16  # cgroups of one holder that are read: a pod has a few containers, a job a few steps
NO_LIMIT = 2.0**62  # version 1 writes the largest multiple of a page for "no limit"
PRESSURES = ("cpu", "memory", "io")


class QuotaPeriods(NamedTuple):
    """Periods of a CFS quota since the cgroup was created, and those in which it ran out."""

    periods: float
    throttled: float


class Accounting(NamedTuple):
    """Counters since the cgroups were created, and present values; None is unknown.

    `quota`: CPUs by the smallest quota. `throttling`: by cgroup. `waited_s`: seconds in which some task waited, by
    PRESSURES, and in which all tasks waited for memory ("memory full"). `faults`: page faults that read from disk.
    """

    quota: float | None
    throttling: Mapping[PurePosixPath, QuotaPeriods]
    waited_s: Mapping[str, float]
    memory_bytes: float | None
    memory_limit: float | None
    shm_bytes: float | None
    faults: float | None
    killed: float | None
    written: float | None


def read_accounting(cgroups: Cgroups, place: PurePosixPath) -> Accounting:
    """The accounting of one holder."""
    files = cgroups.files
    quotas: list[float] = []
    throttling: dict[PurePosixPath, QuotaPeriods] = {}
    memory: list[tuple[float, float]] = []
    for inner in cgroups.list_inner(place, INNER_MAX):
        if (quota := files.read_quota(inner)) is not None:
            quotas.append(quota)
            text = files.text(CPU, inner, "cpu.stat")
            periods, throttled = field(text, "nr_periods"), field(text, "nr_throttled")
            if periods is not None and throttled is not None:
                throttling[inner] = QuotaPeriods(periods, throttled)
        if (used := _read_memory(files, inner)) is not None:
            memory.append(used)
    used_bytes, limit = max(memory, key=lambda pair: pair[0] / pair[1], default=(None, None))
    stat = files.text(MEMORY, place, "memory.stat")
    prefix = "" if files.is_v2 else "total_"
    events = files.text(MEMORY, place, "memory.events" if files.is_v2 else "memory.oom_control")
    return Accounting(
        quota=min(quotas, default=None),
        throttling=throttling,
        waited_s=_read_pressures(files, place) if files.is_v2 else {},
        memory_bytes=used_bytes,
        memory_limit=limit,
        shm_bytes=field(stat, f"{prefix}shmem"),
        faults=field(stat, f"{prefix}pgmajfault"),
        killed=field(events, "oom_kill"),
        written=files.read_written(place),
    )


def _read_memory(files: CgroupFiles, place: PurePosixPath) -> tuple[float, float] | None:
    """Bytes in use, and the limit; None without a limit."""
    names = ("memory.current", "memory.max") if files.is_v2 else ("memory.usage_in_bytes", "memory.limit_in_bytes")
    limit = number(files.text(MEMORY, place, names[1]))
    if limit is None or not 0.0 < limit < NO_LIMIT:
        return None
    used = number(files.text(MEMORY, place, names[0]))
    return None if used is None else (used, limit)


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
