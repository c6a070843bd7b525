"""Reads how long a cgroup waited for CPU quota, memory and disks, as evidence for the causes of low utilization.

A pod's limits are often on its containers, so child cgroups are read too; parents, such as a user's slice, only for
their quotas. A child with little of the holder's work is a sidecar, and its limits do not count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import NamedTuple

from gpu_exporter.diagnosis.host.cgroup_files import CPU, MEMORY, US, CgroupFiles, field, least, number
from gpu_exporter.diagnosis.host.cgroups import Cgroups

INNER_MAX = 16  # cgroups of one holder that are read: a pod has a few containers, a job a few steps
SOME, PART = 0.2, 0.5  # share of the holder's CPU time, and CPUs: a cgroup with less than both is a sidecar ...
MOST = 0.5  # ... unless it has this share, which also counts for memory
AT_REST = 0.2  # CPUs: of a holder that uses less, a sidecar may do most of the work
NO_LIMIT = 2.0**62  # version 1 writes the largest multiple of a page for "no limit"
V1_MEMORY = ("memory.usage_in_bytes", "memory.limit_in_bytes")
PRESSURES = ("cpu", "memory", "io")


class CpuCounters(NamedTuple):
    """CPU counters of a cgroup since its creation.

    `cpus`: CPUs that it may use at the same time under its quota and cpuset, None if unknown. `quota`: CPUs, None
    without a quota.
    `periods`, `throttled`: periods of the CFS quota, and the periods in which the quota ran out.
    """

    cpu_s: float
    cpus: float | None
    quota: float | None
    periods: float = 0.0
    throttled: float = 0.0


class CpuLimit(NamedTuple):
    """The CPU limit of the cgroups that do most of a holder's work.

    `cpus`: CPUs that cpuset and quota allow. `quota`: CPUs that the quota alone allows. Both are None without a limit.
    `throttled`: share of the periods in which the quota ran out, None if unknown.
    """

    cpus: float | None
    quota: float | None
    throttled: float | None


class Accounting(NamedTuple):
    """A cgroup's counters since its creation, and its present values. None is unknown.

    `cpu`: the CPU counters by cgroup, the holder's first, then those of its children. `above`: the counters of the
    parents with a quota.
    `waited_s`: seconds in which some task waited, by resource (PRESSURES). Its key "memory full" has the seconds in
    which all tasks waited for memory. `memory_cache`: page cache in `memory_bytes`. `refaults`: pages that were evicted
    and read again. `killed`: processes that the OOM killer ended. `reached`: how often the memory limit was reached.
    """

    cpu: Mapping[PurePosixPath, CpuCounters]
    above: Mapping[PurePosixPath, CpuCounters]
    waited_s: Mapping[str, float]
    memory_bytes: float | None
    memory_limit: float | None
    memory_cache: float | None
    shm_bytes: float | None
    refaults: float | None
    killed: float | None
    reached: float | None
    written: float | None


def read_accounting(cgroups: Cgroups, place: PurePosixPath) -> Accounting:
    """Reads the counters and the present values of one holder's cgroups."""
    files = cgroups.files
    places = cgroups.list_inner(place, INNER_MAX)
    main, used, limit = _find_memory(files, places)
    prefix = "" if files.is_v2 else "total_"
    stat, own = files.text(MEMORY, place, "memory.stat"), files.text(MEMORY, main, "memory.stat")
    cache = [field(own, f"{prefix}{kind}_file") for kind in ("active", "inactive")]
    return Accounting(
        cpu={inner: found for inner in places if (found := _read_cpu(cgroups, inner)) is not None},
        above={
            outer: found
            for outer in place.parents[:-1]
            if files.read_quota(outer) is not None and (found := _read_cpu(cgroups, outer)) is not None
        },
        waited_s=_read_pressures(files, main) if files.is_v2 else {},
        memory_bytes=used,
        memory_limit=limit,
        memory_cache=None if None in cache else sum(each or 0.0 for each in cache),
        shm_bytes=field(stat, f"{prefix}shmem"),
        refaults=field(own, f"{prefix}workingset_refault_file"),
        killed=_read_killed(files, [each for each in places if each == main or main in each.parents]),
        reached=_read_reached(files, main),
        written=files.read_written(place),
    )


def find_cpu_limit(last: Accounting, now: Accounting, cpu_s: float, span_s: float) -> CpuLimit:
    """Returns the CPU limit of the cgroups that worked since the reading `last`, `span_s` seconds ago.

    `cpu_s`: the CPU time that the holder used since then.
    """
    if cpu_s < AT_REST * span_s:
        return CpuLimit(None, None, 0.0)
    least_s = min(MOST * cpu_s, max(SOME * cpu_s, PART * span_s))
    worked = {
        place: after.cpu_s - before.cpu_s
        for place, after in now.cpu.items()
        if (before := last.cpu.get(place)) is not None and after.cpu_s - before.cpu_s >= least_s
    }
    above = [each for place, each in now.above.items() if place in last.above]
    top = next(iter(worked), None)
    if top is None:
        return CpuLimit(None, None, None)
    cpus = least(_add_limits(now.cpu, worked, top, "cpus"), *(each.quota for each in above))
    quota = least(_add_limits(now.cpu, worked, top, "quota"), *(each.quota for each in above))
    if quota is None and not any(now.cpu[place].quota for place in worked):
        return CpuLimit(cpus, None, 0.0)
    before_, after_ = {**last.cpu, **last.above}, {**now.cpu, **now.above}
    shares = [
        min(
            1.0, (after_[place].throttled - before_[place].throttled) / (after_[place].periods - before_[place].periods)
        )
        for place in (*worked, *now.above)
        if place in before_ and after_[place].quota is not None and before_[place].quota is not None
        if after_[place].periods > before_[place].periods and after_[place].throttled >= before_[place].throttled
    ]
    return CpuLimit(cpus, quota, max(shares, default=None))


def _add_limits(
    cpu: Mapping[PurePosixPath, CpuCounters], worked: Mapping[PurePosixPath, float], place: PurePosixPath, name: str
) -> float | None:
    """The limit of a cgroup: its own, or if lower, the sum of the limits of the children that do most of the work."""
    own: float | None = getattr(cpu[place], name)
    inner = [each for each in worked if place in each.parents]
    inner = [each for each in inner if not any(other in each.parents for other in inner)]  # the outermost
    if sum(worked[each] for each in inner) < MOST * worked[place]:
        return own
    limits = [_add_limits(cpu, worked, each, name) for each in inner]
    return own if None in limits else least(own, sum(each or 0.0 for each in limits))


def _read_cpu(cgroups: Cgroups, place: PurePosixPath) -> CpuCounters | None:
    files, reading = cgroups.files, cgroups.read(place)
    if reading is None:
        return None
    quota = files.read_quota(place)
    text = files.text(CPU, place, "cpu.stat") if quota is not None else None
    periods, throttled = field(text, "nr_periods"), field(text, "nr_throttled")
    if periods is None or throttled is None:
        return CpuCounters(reading.cpu_s, reading.cpus, None)
    return CpuCounters(reading.cpu_s, reading.cpus, quota, periods, throttled)


def _find_memory(
    files: CgroupFiles, places: Sequence[PurePosixPath]
) -> tuple[PurePosixPath, float | None, float | None]:
    """Considers only cgroups that hold most of the holder's memory. Returns the innermost one. Also returns memory in
    use and limit (bytes) of the one that is nearest to its limit, which may be another cgroup.
    """
    names = ("memory.current", "memory.max", "memory.high") if files.is_v2 else V1_MEMORY  # both make tasks wait
    used = {place: number(files.text(MEMORY, place, names[0])) for place in places}
    whole = used[places[0]] or 0.0
    large = [(place, each) for place, each in used.items() if each is not None and each >= MOST * whole]
    found: list[tuple[float, float]] = []
    for place, each in large:
        limit = least(*(number(files.text(MEMORY, place, name)) for name in names[1:]))
        if limit is not None and 0.0 < limit < NO_LIMIT:
            found.append((each, limit))
    main = max((place for place, _ in large), key=lambda place: len(place.parts), default=places[0])
    return (main, *max(found, key=lambda pair: pair[0] / pair[1], default=(None, None)))


def _read_killed(files: CgroupFiles, places: Sequence[PurePosixPath]) -> float | None:
    """The number of processes that the OOM killer ended. Only cgroup version 2 includes child cgroups."""
    if files.is_v2:
        return field(files.text(MEMORY, places[0], "memory.events"), "oom_kill")
    counts = [field(files.text(MEMORY, place, "memory.oom_control"), "oom_kill") for place in places]
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _read_reached(files: CgroupFiles, place: PurePosixPath) -> float | None:
    """How often the memory limit was reached. Version 2 counts only the times when no memory could be freed."""
    if files.is_v2:
        return field(files.text(MEMORY, place, "memory.events"), "oom")
    return number(files.text(MEMORY, place, "memory.failcnt"))


def _read_pressures(files: CgroupFiles, place: PurePosixPath) -> dict[str, float]:
    """Seconds of waiting since the cgroup was created, by resource. Empty on a kernel without PSI."""
    found: dict[str, float] = {}
    for name in PRESSURES:
        for line in (files.text(MEMORY, place, f"{name}.pressure") or "").splitlines():
            kind, _, rest = line.partition(" ")
            waited = number(rest.rpartition("total=")[2])
            if waited is not None and kind in ("some", "full"):
                found[name if kind == "some" else f"{name} full"] = waited * US
    return found
