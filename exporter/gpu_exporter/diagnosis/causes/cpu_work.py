"""The holder computes on CPUs. It has a process on its GPU, but this process gives the GPU no work."""

from __future__ import annotations

from gpu_exporter.common.model.causes import LOW, MEDIUM, Cause, numbers
from gpu_exporter.common.model.readings import CORE
from gpu_exporter.diagnosis.causes.case import CauseCase, Needs, need, rule
from gpu_exporter.diagnosis.stalls.rules import StallRules

STALLS = StallRules()

MORE = 1.2  # CPUs for each process on a GPU: a thread that only polls for work uses less
OTHERS = 0.5  # CPUs of the other processes


def count_busy(case: CauseCase) -> int:
    """Returns the number of the holder's GPUs on this node with a utilization above 0."""
    return sum((each.utilization or 0.0) > 0.0 for each in case.members)


def works_on_cpus(case: CauseCase) -> bool:
    """Returns whether all busy GPUs are at 100 % (as in a wait), but the holder uses more CPUs than a wait needs."""
    cores = case.average(lambda each: each.cores)
    if cores is None or any(0.0 < (each.utilization or 0.0) < STALLS.utilization_min for each in case.members):
        return False
    return cores > STALLS.cores_each * count_busy(case) + STALLS.cores_beside


@rule(
    states=frozenset(("held_idle",)),
    needs="the CPUs in use, and the utilization of the holder's GPUs on this node",
    against=(
        "the holder may prepare its next work (always shown); processes that each use one CPU may only poll (low"
        " confidence)"
    ),
)
def judge(case: CauseCase) -> Cause | Needs | None:
    cores = case.average(lambda each: each.cores)
    if cores is None:
        return need(case)
    busy = count_busy(case)
    if busy and works_on_cpus(case):
        return Cause(
            "cpu_work",
            LOW,
            f"its processes use {cores:.1f} CPUs; this GPU does nothing, and {busy} of its other GPUs are busy",
            against="the busy GPUs may work, or may wait for data that the CPUs prepare",
            advice="if rank 0 prepares data while the other ranks wait, prepare the data once, in a job without GPUs",
        )
    if cores < CORE or busy:
        return None
    rank = case.average_processes(lambda each: each.rank_cores)
    ranks = max((each.ranks or 0 for each in case.seen), default=0)
    is_spin = rank is not None and 0.0 < rank <= MORE * ranks and cores - rank < OTHERS
    return Cause(
        "cpu_work",
        LOW if is_spin else MEDIUM,
        f"its processes use {cores:.1f} CPUs, while its GPU does nothing",
        against="a server that polls for requests looks the same" if is_spin else "it may prepare its next work",
        values=numbers(used_cpus=cores),
    )
