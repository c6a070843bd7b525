"""The host is full, and the holder gets fewer CPUs than its limit or share. Only the site can change this."""

from __future__ import annotations

from gpu_exporter.common.model.causes import HIGH, MEDIUM, Cause, numbers
from gpu_exporter.diagnosis.causes.case import WITH_PROCESS, CauseCase, Needs, rule
from gpu_exporter.diagnosis.causes.shortage import SITE, find_cpus, find_short_of_cpu

HALF = 0.5  # of its CPUs: a holder that gets less is slowed for certain


@rule(
    states=WITH_PROCESS,
    needs=(
        "a host without free CPUs, threads that wait for a CPU, and fewer CPUs for the holder than its limit or share"
    ),
    against="the kernel has no PSI; the holder gets more than half of its limit or share",
)
def judge(case: CauseCase) -> Cause | Needs | None:
    cpus = find_cpus(case)
    if cpus is None or find_short_of_cpu(case) != SITE:
        return None
    pressure = case.average(lambda each: each.pressure_cpu)
    waits = f"its tasks waited for a CPU {pressure:.0%} of the time" if pressure is not None else ""
    waits = waits or f"{case.runnable or 0.0:.0f} of its threads are runnable"
    of = "" if cpus.limit is not None else " (its share of the host, in proportion to its GPUs)"
    is_half = cpus.used < HALF * cpus.entitled
    against = "" if is_half else "it gets more than half of its CPUs"
    if pressure is None:
        against = "the kernel does not report how long tasks waited (PSI)"
    return Cause(
        "cpu_contended",
        HIGH if not against else MEDIUM,
        f"it gets {cpus.used:.2g} of {cpus.entitled:.3g} CPUs{of}; others use {cpus.others:.3g} of the host's "
        f"{cpus.host or 0.0:.3g} CPUs, and no CPU is free; {waits}",
        against=against,
        values=numbers(used_cpus=cpus.used, cpus=cpus.entitled, other_cpus=cpus.others),
    )
