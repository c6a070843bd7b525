"""The loaders use all CPUs that the holder has, and the GPU waits for them."""

from __future__ import annotations

from gpu_exporter.common.model.causes import HIGH, LOW, MEDIUM, Cause
from gpu_exporter.diagnosis.causes.case import CauseCase, Needs, Rule, need
from gpu_exporter.diagnosis.causes.cpu_oversubscribed import OTHERS, is_oversubscribed

MOST = 0.5  # share of the CPU time that the loaders use
WAITS = 0.6  # CPUs of the process on the GPU: more, and it computes itself


def is_input_bound(case: CauseCase) -> bool:
    """Whether loaders use most of the CPU time, and no CPU is left."""
    cpus, cores = case.cpus, case.average(lambda each: each.cores)
    loaders = case.average_processes(lambda each: None if each.loaders is None else each.loader_cores)
    if cpus is None or cores is None or loaders is None:
        return False
    is_full = cores >= case.rules.full_ratio * cpus or (case.throttled or 0.0) >= case.rules.throttled_high
    return is_full and loaders >= MOST * cores and not is_oversubscribed(case)


def judge(case: CauseCase) -> Cause | Needs | None:
    rank = case.average_processes(lambda each: each.rank_cores)
    if rank is None:
        return need(case)
    if not is_input_bound(case):
        return None
    number = max((each.loaders or 0 for each in case.seen), default=0)
    loaders = case.average_processes(lambda each: each.loader_cores) or 0.0
    others = case.others or 0.0
    against = "" if rank < WAITS else f"the process on the GPU uses {rank:.1f} CPUs itself"
    if others >= OTHERS:
        against = f"others use {others:.0%} of the host's CPUs"
    return Cause(
        "cpu_bound_input",
        LOW if others >= OTHERS else HIGH if rank < WAITS else MEDIUM,
        f"{number} loaders use {loaders:.1f} of {case.cpus or 0.0:.2g} CPUs, and none is left",
        against=against,
        advice="make the samples cheaper on the CPU: decode and transform them once in advance, or on the GPU (DALI); "
        "or ask for more CPUs. More workers would not help",
        gain="up to 65 % of an epoch; ResNet50 needs 3 to 4 CPUs for each GPU, ResNet18 12 to 24 (VLDB'21)",
    )


RULE = Rule(
    name="cpu_bound_input",
    title="the loaders use all CPUs",
    states=frozenset(("low", "bursty")),
    judge=judge,
    claims=(44, 54, 55, 57, 60, 70),
    needs="the CPU time of the processes without a context, and the CPUs of the holder",
    against="that the process on the GPU computes much itself; others that use half of the host's CPUs",
    remedy=(
        "Make the samples cheaper: decode and transform them once in advance, or on the GPU (DALI). Or "
        "ask for more CPUs. More workers would not help."
    ),
)
