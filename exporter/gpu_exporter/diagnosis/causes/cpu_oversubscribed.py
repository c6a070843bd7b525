"""Far more threads want to run than the holder has CPUs."""

from __future__ import annotations

from gpu_exporter.common.model.causes import HIGH, LOW, MEDIUM, Cause, numbers
from gpu_exporter.diagnosis.causes.advice import count_threads, propose_threads, propose_workers
from gpu_exporter.diagnosis.causes.case import WITH_PROCESS, CauseCase, Needs, need, rule
from gpu_exporter.diagnosis.causes.shortage import NOBODY, OWN, find_cpus, find_short_of_cpu

MORE_THAN = 4  # threads above the number of CPUs: two on one CPU are no fault


def find_room(case: CauseCase) -> float | None:
    """Finds the CPUs for the holder's threads: its limit; without one, the larger of its share and the usable CPUs."""
    cpus = find_cpus(case)
    return None if cpus is None else cpus.entitled if cpus.limit is not None else max(cpus.entitled, cpus.usable)


def is_oversubscribed(case: CauseCase) -> bool:
    """Returns whether many more threads are runnable than the holder has CPUs, and threads wait for a CPU."""
    runnable, room, rules = case.runnable, find_room(case), case.rules
    if runnable is None or room is None or runnable < max(rules.runnable_min * room, room + MORE_THAN):
        return False
    pressure = case.average(lambda each: each.pressure_cpu) or 0.0
    return find_short_of_cpu(case) != NOBODY or pressure >= rules.pressure_cpu_min


@rule(
    states=WITH_PROCESS,
    needs=(
        "the holder's threads that run or wait, its CPUs, and a sign of waiting: a quota that runs out, PSI, or CPUs"
        " that are all in use"
    ),
    against=(
        "the holder does not use all of its CPUs (low confidence); its two busiest processes have more than 256"
        " threads, of which the exporter counts 256"
    ),
)
def judge(case: CauseCase) -> Cause | Needs | None:
    runnable, room = case.runnable, find_room(case)
    if runnable is None or room is None:
        return need(case)
    if not is_oversubscribed(case):
        return None
    loaders = case.average_processes(lambda each: None if each.loaders is None else float(each.loaders)) or 0.0
    waits = case.throttled or 0.0
    said = f"; the quota ran out in {waits:.0%} of the periods" if waits >= case.rules.throttled_min else ""
    by_loaders = case.has_loaders and loaders >= runnable / 2
    counted = all(each.is_all_threads for each in case.seen)
    is_own = find_short_of_cpu(case) == OWN
    switches = case.average_processes(lambda each: each.switches) or 0.0
    against = [] if is_own else ["it does not use all of its CPUs"]
    against += [] if counted else ["only 256 threads of its two busiest processes were counted"]
    return Cause(
        "cpu_oversubscribed",
        LOW if not is_own else HIGH if runnable >= case.rules.runnable_high * room else MEDIUM,
        f"{runnable:.0f} threads are runnable on {room:.2g} CPUs{said}"
        + (f"; it has {loaders:.0f} loaders" if by_loaders else "")
        + (
            f"; its two busiest processes had {switches:.0f} involuntary context switches a second"
            if switches >= 1.0
            else ""
        ),
        against="; ".join(against),
        advice=propose_workers(case).text if by_loaders else propose_threads(case),
        gain="1.33 to 2 times faster, the GPU from 73 to 87 %, with 8 threads (torchtitan#4038)",
        values=numbers(
            runnable_threads=runnable, cpus=room, threads_to_set=None if by_loaders else count_threads(case)
        ),
    )
