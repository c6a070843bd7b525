"""Far more threads want to run than the holder has CPUs: the opposite of too few workers."""

from __future__ import annotations

from gpu_exporter.common.model.causes import HIGH, MEDIUM, Cause
from gpu_exporter.diagnosis.causes.advice import propose_threads, propose_workers
from gpu_exporter.diagnosis.causes.case import WITH_PROCESS, CauseCase, Needs, Rule, need

OTHERS = 0.5  # share of the host: then its neighbours take the CPUs, not its own threads
MORE_THAN = 4  # threads above the number of CPUs: two on one CPU are no fault


def is_oversubscribed(case: CauseCase) -> bool:
    """Whether many more threads are runnable than there are CPUs, and the CPUs are full."""
    runnable, cpus, rules = case.runnable, case.cpus, case.rules
    if runnable is None or cpus is None or runnable < max(rules.runnable_min * cpus, cpus + MORE_THAN):
        return False
    cores, pressure = case.average(lambda each: each.cores) or 0.0, case.average(lambda each: each.pressure_cpu)
    waits = (case.throttled or 0.0) >= rules.throttled_min or (pressure or 0.0) >= rules.pressure_cpu_min
    return waits or cores >= rules.full_ratio * cpus


def judge(case: CauseCase) -> Cause | Needs | None:
    runnable, cpus = case.runnable, case.cpus
    if runnable is None or cpus is None:
        return need(case)
    if not is_oversubscribed(case):
        return None
    loaders = case.average_processes(lambda each: None if each.loaders is None else float(each.loaders)) or 0.0
    waits = case.throttled or 0.0
    said = f"; the quota ran out in {waits:.0%} of the periods" if waits >= case.rules.throttled_min else ""
    by_loaders = loaders >= runnable / 2
    counted = all(each.is_all_threads for each in case.seen)
    others = case.others or 0.0
    switches = case.average_processes(lambda each: each.switches) or 0.0
    against = [f"others use {others:.0%} of the host's CPUs"] if others >= OTHERS else []
    against += [] if counted else ["of its two busiest processes, only 256 threads were counted"]
    return Cause(
        "cpu_oversubscribed",
        HIGH if runnable >= case.rules.runnable_high * cpus and others < OTHERS else MEDIUM,
        f"{runnable:.0f} threads are runnable on {cpus:.2g} CPUs{said}"
        + (f"; it has {loaders:.0f} loaders" if by_loaders else "")
        + (
            f"; its two busiest processes had {switches:.0f} involuntary context switches a second"
            if switches >= 1.0
            else ""
        ),
        against="; ".join(against),
        advice=propose_workers(case) if by_loaders else propose_threads(case),
        gain="1.33 to 2 times faster, the GPU from 73 to 87 %, with 8 threads (torchtitan#4038)",
    )


RULE = Rule(
    name="cpu_oversubscribed",
    title="too many threads on few CPUs",
    states=WITH_PROCESS,
    judge=judge,
    claims=(42, 59, 70),
    needs=("the number of threads that run or wait for a CPU, the CPUs of the holder, and quota, pressure or use"),
    against="others that use half of the host's CPUs; more than 256 threads in the two busiest processes",
    remedy=(
        "Set `OMP_NUM_THREADS` to the number of CPUs per process on a GPU, or use fewer workers. This is the "
        "opposite of too_few_workers."
    ),
)
