"""The holder's CPU quota runs out, although not many threads compete for it."""

from __future__ import annotations

from gpu_exporter.common.model.causes import HIGH, MEDIUM, Cause, numbers
from gpu_exporter.diagnosis.causes.advice import bound_gain
from gpu_exporter.diagnosis.causes.case import WITH_PROCESS, CauseCase, Needs, need, rule
from gpu_exporter.diagnosis.causes.cpu_bound_input import is_input_bound
from gpu_exporter.diagnosis.causes.cpu_oversubscribed import is_oversubscribed
from gpu_exporter.diagnosis.causes.shortage import OWN, find_short_of_cpu


@rule(
    states=WITH_PROCESS,
    needs="the periods of the CFS quota (`cpu.stat`), and the threads of the processes",
    against=(
        "on average, the holder uses less than 85 % of the quota; threads are not visible, so there may be too many"
    ),
)
def judge(case: CauseCase) -> Cause | Needs | None:
    throttled, rules = case.throttled, case.rules
    if throttled is None:
        return need(case)
    quota = case.recent[-1].quota
    if throttled < rules.throttled_min or quota is None or find_short_of_cpu(case) != OWN:
        return None
    if is_oversubscribed(case) or is_input_bound(case):
        return None
    cores = case.average(lambda each: each.cores) or 0.0
    is_full = cores >= rules.full_ratio * quota
    against = "" if is_full else f"on average it uses only {cores:.2g} of the {quota:.2g} CPUs"
    return Cause(
        "cpu_quota",
        HIGH if throttled >= rules.throttled_high and is_full and case.runnable is not None else MEDIUM,
        f"its quota of {quota:.2g} CPUs{'' if is_full else ', or the quota of one of its containers,'} ran out in "
        f"{throttled:.0%} of the periods",
        against=against
        if case.runnable is not None
        else "the number of its threads is unknown, and too many threads look the same",
        gain=bound_gain(case),
        values=numbers(cpus=quota, throttled_ratio=throttled),
    )
