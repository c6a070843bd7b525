"""Decides why a holder lacks CPUs or memory: because of its own limit or share, or because others fill the host. Pure.

The owner gets a cause only with proof that the holder itself is short: its quota ran out, its limit is nearly used, or
it uses its share of a full host. If others cause the shortage, the cause is for the site (`cpu_contended`,
`node_memory`). On a host with free CPUs, a holder without a limit is never short.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from gpu_exporter.diagnosis.causes.case import CauseCase

OWN, SITE, NOBODY = "own", "site", ""
SPARE = 0.03  # share of a host's CPUs that a host without free CPUs still shows as idle, and at least one of them ...
SPARE_WAITED = 0.1  # ... and in looks of which some are quieter, if tasks wait for a CPU meanwhile (PSI)
LEAST = 0.01  # CPUs; the kernel takes no smaller quota than 1 ms in 100 ms
USED_UP = 0.95  # of a limit: nothing is left
CROWDED = 1.1  # threads that want to run for each CPU in use: fewer hardly wait, since they wait in turns
WAITED = 0.25  # share of the time in which tasks waited for their quota (PSI); without PSI, or on a full host ...
THROTTLED = 0.5  # ... of the periods in which it ran out
FAR = 0.8  # memory in use, as a share of the limit, below which no own limit explains a shortage


class Cpus(NamedTuple):
    """Numbers of CPUs. Values that change are means over the recent readings of the host.

    `used`: CPUs in use by the holder. `limit`: its own limit, None if it may use all CPUs of the host. `most`: CPUs on
    which its processes may run. `entitled`: its limit; without a limit, its share of the host (from its GPUs), at most
    `most`.
    `usable`: CPUs that it uses or that are free for it now. `advised`: CPUs that an advice may propose, so that the
    host has enough if all holders follow. `host`: all CPUs, None if unknown. `others`: CPUs in use by others.
    `is_full`: the host has no free CPUs.
    """

    used: float
    limit: float | None
    most: float
    entitled: float
    usable: float
    advised: float
    host: float | None = None
    others: float = 0.0
    is_full: bool = False


def find_cpus(case: CauseCase) -> Cpus | None:
    """Counts a holder's CPUs. None if the holder's use is unknown. None too if the host's use is unknown and the holder
    has no limit.
    """
    if not case.recent:
        return None
    used, limit = case.average(lambda each: each.cores), case.limit
    host, busy = case.recent[-1].host_cpus, case.average(lambda each: each.host_busy)
    if used is None:
        return None
    if host is None or busy is None:
        return None if limit is None else Cpus(used, limit, limit, limit, limit, limit)
    most = limit if limit is not None else case.bound or host
    free = max(0.0, host * (1.0 - busy))
    entitled = limit if limit is not None else min(most, max(1.0, host * case.share))
    usable = max(used, min(most, used + free))
    part = used + free * min(1.0, case.share / case.held) if case.held > 0.0 else usable
    part = math.floor(part) if part >= 2.0 else part
    waited = (case.average(lambda each: each.pressure_cpu) or 0.0) >= case.rules.pressure_cpu_min
    is_full = free < max(1.0, (SPARE_WAITED if waited else SPARE) * host)
    advised = max(min(most, part if limit is not None else max(part, entitled)), min(used, most))
    return Cpus(used, limit, most, entitled, usable, advised, host, max(0.0, host * busy - used), is_full)


def find_short_of_cpu(case: CauseCase) -> str:
    """Returns OWN if the holder itself is short, SITE if others fill the host, NOBODY if neither or unknown."""
    cpus = find_cpus(case)
    if cpus is None:
        return NOBODY
    near, waits = cpus.used / max(cpus.entitled, LEAST), waits_for_cpu(case, cpus)
    if cpus.limit is not None and _runs_out(case, near, cpus.is_full):
        return OWN
    if cpus.used >= USED_UP * max(cpus.most, LEAST):
        return OWN
    if cpus.limit is None and not cpus.is_full:
        return NOBODY
    throttled, is_quota = case.throttled, cpus.limit is not None and cpus.limit == case.recent[-1].quota
    is_left = is_quota and throttled is not None and throttled < case.rules.throttled_min  # the rest of it is free
    if near >= case.rules.full_ratio and not is_left and (waits or (cpus.limit is None and waits is None)):
        return OWN
    return SITE if cpus.is_full and waits else NOBODY


def is_all_bound(case: CauseCase) -> bool:
    """Returns whether a holder without a limit uses up the CPUs to which it is bound, while others are free."""
    cpus = find_cpus(case)
    if cpus is None or cpus.limit is not None or cpus.is_full or case.bound is None:
        return False
    return find_short_of_cpu(case) == OWN


def _runs_out(case: CauseCase, near: float, is_full: bool) -> bool:
    """Returns whether the quota runs out for longer than the loaders' queue of samples can bridge.

    Ignores PSI on a full host, because there, tasks also wait for the CPUs that others use.
    """
    throttled, pressure = case.throttled or 0.0, case.average(lambda each: each.pressure_cpu)
    if throttled < case.rules.throttled_min:
        return False
    return pressure >= WAITED if pressure is not None and not is_full else near >= USED_UP or throttled >= THROTTLED


def waits_for_cpu(case: CauseCase, cpus: Cpus) -> bool | None:
    """Returns whether threads of the holder wait for a CPU, by PSI and the runnable threads. None if unknown."""
    pressure, runnable = case.average(lambda each: each.pressure_cpu), case.runnable
    if pressure is not None and pressure < case.rules.pressure_cpu_min:
        return False
    if runnable is None:
        return None if pressure is None else True
    return runnable >= (CROWDED * cpus.used if pressure is not None else cpus.used + 1.0)


def find_short_of_memory(case: CauseCase) -> str:
    """Returns OWN if the holder recently came near its memory limit or lost processes at the limit, otherwise SITE."""
    if any(each.ooms for each in case.recent):
        return OWN
    return OWN if most_of_memory(case) >= case.rules.memory_near else SITE


def most_of_memory(case: CauseCase) -> float:
    """Returns the largest share of the holder's memory limit in use, over the recent readings. 0 without a limit."""
    return max(
        (each.memory_bytes / each.memory_limit for each in case.recent if each.memory_bytes and each.memory_limit),
        default=0.0,
    )
