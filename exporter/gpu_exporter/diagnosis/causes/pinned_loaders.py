"""The loaders can run only on a few of the holder's CPUs, and use all time of these CPUs."""

from __future__ import annotations

from gpu_exporter.common.model.causes import HIGH, MEDIUM, Cause, numbers
from gpu_exporter.diagnosis.causes.advice import bound_gain
from gpu_exporter.diagnosis.causes.case import CauseCase, Needs, need, rule
from gpu_exporter.diagnosis.causes.cpu_bound_input import MOST
from gpu_exporter.diagnosis.causes.shortage import is_all_bound


@rule(
    states=frozenset(("low", "bursty", "held_idle")),
    needs="the CPUs on which the loaders can run (Cpus_allowed_list), and the CPU time that they use",
    against=(
        "no process has the name of a loader (torch 2.5 and newer); all processes of the holder are bound to these"
        " CPUs, perhaps by Slurm (medium confidence)"
    ),
)
def judge(case: CauseCase) -> Cause | Needs | None:
    if not case.seen:
        return need(case)
    allowed = {each.loader_cpus for each in case.seen if each.loaders}
    if len(allowed) != 1 or None in allowed:
        return None
    cpus, number = allowed.pop() or 0, min(each.loaders or 0 for each in case.seen)
    used = case.average_processes(lambda each: each.loader_cores) or 0.0
    is_whole, host = case.bound == cpus and is_all_bound(case), case.recent[-1].host_cpus
    most = host if is_whole else case.limit or case.bound or host
    least = MOST * (case.average(lambda each: each.cores) or 0.0) if is_whole else case.rules.full_ratio * cpus
    if most is None or not 0 < cpus < most or used < least or (cpus >= number and not is_whole):
        return None
    of = "the host's" if is_whole else "its"
    who = "loaders" if case.has_loaders else "processes that do not run on the GPU"
    return Cause(
        "pinned_loaders",
        HIGH if case.has_loaders and not is_whole else MEDIUM,
        f"{number} {who} may run only on {cpus} of {of} {most:.3g} CPUs, and use {used:.2g} of them",
        against="all of its processes are bound to these CPUs, as Slurm does if it confines no job" if is_whole else "",
        gain=bound_gain(case),
        values=numbers(bound_cpus=float(cpus), cpus=most),
    )
