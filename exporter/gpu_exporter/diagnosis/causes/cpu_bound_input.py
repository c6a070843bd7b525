"""The loaders use all CPUs that the holder has, and the GPU waits for them."""

from __future__ import annotations

from gpu_exporter.common.model.causes import HIGH, MEDIUM, Cause, numbers
from gpu_exporter.diagnosis.causes.case import CauseCase, Needs, need, rule
from gpu_exporter.diagnosis.causes.cpu_oversubscribed import is_oversubscribed
from gpu_exporter.diagnosis.causes.shortage import OWN, find_cpus, find_short_of_cpu, is_all_bound

ADVICE = (
    "make the samples cheaper on the CPU: decode and transform them once in advance, or on the GPU (DALI); or ask for"
    " more CPUs. More workers would not help"
)
GAIN = "up to 65 % of an epoch; ResNet50 needs 3 to 4 CPUs for each GPU, ResNet18 12 to 24 (VLDB'21)"
NAMELESS = "these may be other processes: only loaders of torch 2.5 and newer have a name"
MOST = 0.5  # share of the CPU time that the loaders use
WAITS = 0.6  # CPUs of the process on the GPU: if it uses more, it computes by itself


def is_input_bound(case: CauseCase) -> bool:
    """Returns whether loaders use most of the holder's CPU time, and the holder has no free CPU."""
    cores = case.average(lambda each: each.cores)
    loaders = case.average_processes(lambda each: None if each.loaders is None else each.loader_cores)
    if cores is None or loaders is None or loaders < MOST * cores:
        return False
    return find_short_of_cpu(case) == OWN and not is_oversubscribed(case)


@rule(
    states=frozenset(("low", "bursty", "held_idle")),
    needs="the CPU time of the processes that do not use the GPU, and the CPUs of the holder",
    against=(
        "the process on the GPU uses 0.6 CPUs or more itself; no process has the name of a loader (torch 2.5 and newer)"
    ),
)
def judge(case: CauseCase) -> Cause | Needs | None:
    rank, cpus = case.average_processes(lambda each: each.rank_cores), find_cpus(case)
    if rank is None:
        return need(case)
    if cpus is None or not is_input_bound(case) or is_all_bound(case):
        return None
    number = max((each.loaders or 0 for each in case.seen), default=0)
    loaders = case.average_processes(lambda each: each.loader_cores) or 0.0
    against = "" if rank < WAITS else f"the process on the GPU uses {rank:.1f} CPUs itself"
    who = "loaders" if case.has_loaders else "processes that do not run on the GPU"
    return Cause(
        "cpu_bound_input",
        HIGH if rank < WAITS and case.has_loaders else MEDIUM,
        f"{number} {who} use {loaders:.1f} of {max(cpus.entitled, cpus.used):.2g} CPUs, and none is left",
        against=against if case.has_loaders else NAMELESS,
        advice=ADVICE if case.has_loaders else "reduce the CPU time of these processes, or ask for more CPUs",
        gain=GAIN if case.has_loaders else "",
        values=numbers(used_cpus=loaders, cpus=max(cpus.entitled, cpus.used)),
    )
