"""The loaders use all CPUs that the holder has, and the GPU waits for them."""

from __future__ import annotations

from gpu_exporter.common.model.causes import HIGH, LOW, MEDIUM, Cause
from gpu_exporter.diagnosis.causes.case import CauseCase, Needs, Rule, need
from gpu_exporter.diagnosis.causes.cpu_oversubscribed import is_oversubscribed
from gpu_exporter.diagnosis.causes.shortage import OWN, SITE, find_cpus, find_short_of_cpu

ADVICE = (
    "make the samples cheaper on the CPU: decode and transform them once in advance, or on the GPU (DALI); or ask for"
    " more CPUs. More workers would not help"
)
GAIN = "up to 65 % of an epoch; ResNet50 needs 3 to 4 CPUs for each GPU, ResNet18 12 to 24 (VLDB'21)"
NAMELESS = "only their work shows that they load: loaders have a name in torch 2.5 and newer"
MOST = 0.5  # share of the CPU time that the loaders use
WAITS = 0.6  # CPUs of the process on the GPU: more, and it computes itself


def is_input_bound(case: CauseCase) -> bool:
    """Whether loaders use most of the CPU time, and none of the holder's own CPUs is left."""
    return find_short_of_cpu(case) == OWN and _is_of_loaders(case)


def _is_of_loaders(case: CauseCase) -> bool:
    cores = case.average(lambda each: each.cores)
    loaders = case.average_processes(lambda each: None if each.loaders is None else each.loader_cores)
    return cores is not None and loaders is not None and loaders >= MOST * cores and not is_oversubscribed(case)


def judge(case: CauseCase) -> Cause | Needs | None:
    rank, short = case.average_processes(lambda each: each.rank_cores), find_short_of_cpu(case)
    if rank is None:
        return need(case)
    cpus = find_cpus(case)
    if not short or not _is_of_loaders(case):
        return None
    number, of = (
        max((each.loaders or 0 for each in case.seen), default=0),
        max(cpus.entitled, cpus.used) if cpus is not None else 0.0,
    )
    loaders = case.average_processes(lambda each: each.loader_cores) or 0.0
    against = "" if rank < WAITS else f"the process on the GPU uses {rank:.1f} CPUs itself"
    if not case.has_loaders:
        against = NAMELESS
    if short == SITE:
        against = "others use the CPUs that it is entitled to"
    who = "loaders" if case.has_loaders else "processes beside those on the GPU"
    return Cause(
        "cpu_bound_input",
        LOW if short == SITE else HIGH if rank < WAITS and case.has_loaders else MEDIUM,
        f"{number} {who} use {loaders:.1f} of {of:.2g} CPUs, and none is left",
        against=against,
        advice=ADVICE if case.has_loaders else "make this work cheaper, or ask for more CPUs",
        gain=GAIN if case.has_loaders else "",
    )


RULE = Rule(
    name="cpu_bound_input",
    title="the loaders use all CPUs",
    states=frozenset(("low", "bursty", "held_idle")),
    judge=judge,
    claims=(44, 54, 55, 57, 60, 70),
    needs="the CPU time of the processes without a context, and the CPUs of the holder",
    against="that the process on the GPU computes much itself; others that use the CPUs it is entitled to: then low",
    remedy=(
        "Make the samples cheaper: decode and transform them once in advance, or on the GPU (DALI). Or "
        "ask for more CPUs. More workers would not help."
    ),
)
