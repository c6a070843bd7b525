"""One loader, or a few, work without a pause while CPUs of the holder are free."""

from __future__ import annotations

from gpu_exporter.common.model.causes import HIGH, LOW, MEDIUM, Cause
from gpu_exporter.diagnosis.causes.advice import bound_gain, propose_workers
from gpu_exporter.diagnosis.causes.case import CauseCase, Needs, Rule, need

MOST = 0.75  # share of the loaders that work: if the others wait, loaders are not the limit
READS = 1e6  # bytes per second that speak for a process that loads its samples itself


def judge(case: CauseCase) -> Cause | Needs | None:
    rank, cpus = case.average_processes(lambda each: each.rank_cores), case.cpus
    cores = case.average(lambda each: each.cores)
    if rank is None or cpus is None or cores is None:
        return need(case)
    free = cpus - cores
    if free < case.rules.free_cpus:
        return None
    full = case.average_processes(lambda each: float(each.full_loaders)) or 0.0
    busy = case.average_processes(lambda each: float(each.busy_loaders)) or 0.0
    if full >= MOST * max(1.0, busy) and rank < case.rules.full_ratio:
        number = max(each.loaders or 0 for each in case.seen)
        named = case.seen[-1].named_loaders
        confidence = HIGH if named else MEDIUM
        against = "" if named else "PyTorch does not name these processes as loaders; only their work shows it"
        what = f"{full:.0f} of {number} loaders never wait" if number > 1 else "its only loader never waits"
    elif rank >= case.rules.full_ratio and busy < MOST:
        files = case.recent[-1].files
        moved = max(case.average(lambda each: each.read) or 0.0, files.read_bytes if files is not None else 0.0)
        confidence = MEDIUM if moved >= READS else LOW
        against = "a loop that starts many small kernels, or waits for each of them, looks the same from outside"
        what = f"no loader, the process on the GPU uses {rank:.0%} of a CPU and reads {moved / 1e6:.0f} MB/s"
    else:
        return None
    return Cause(
        "too_few_workers",
        confidence,
        f"{what}; {free:.1f} of {cpus:.3g} CPUs are free",
        against,
        propose_workers(case),
        gain=bound_gain(case),
    )


RULE = Rule(
    name="too_few_workers",
    title="too few loaders",
    states=frozenset(("low", "bursty")),
    judge=judge,
    claims=(44, 49, 50, 56, 70, 72),
    needs="the CPU time of each process, and CPUs that are free",
    against=(
        "loaders without a name: only their work shows that they load. Without any loader: a loop that "
        "starts many small kernels looks the same, so the confidence is low unless the process reads data"
    ),
    remedy=(
        "Raise `num_workers`: the CPUs of the holder for each process on a GPU, minus one and minus its "
        "threads, as many as fit into memory. If none is left, ask for more CPUs."
    ),
)
