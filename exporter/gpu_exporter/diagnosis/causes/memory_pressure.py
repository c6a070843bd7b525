"""The holder waits for memory. A full limit alone is not a cause, because the page cache fills every limit."""

from __future__ import annotations

from gpu_exporter.diagnosis.causes.case import IDLE, WORKING, CauseCase, Needs, Rule, need
from gpu_exporter.model.causes import HIGH, MEDIUM, Cause

GIB = 2**30


def judge(case: CauseCase) -> Cause | Needs | None:
    if not case.recent:
        return need(case)
    rules, newest = case.rules, case.recent[-1]
    some, full = case.average(lambda each: each.pressure_memory), case.average(lambda each: each.memory_full)
    faults = case.average(lambda each: each.faults) or 0.0
    killed = sum(each.killed or 0.0 for each in case.recent)
    near = (
        newest.memory_limit is not None
        and newest.memory_bytes is not None
        and newest.memory_bytes >= rules.memory_near * newest.memory_limit
    )
    waits = some is not None and some >= rules.pressure_memory_min
    if not (killed or waits or (some is None and near and faults >= rules.faults_min)):
        return None
    said = [f"the OOM killer ended {killed:.0f} of its processes"] if killed else []
    said += [f"its tasks waited for memory {some:.0%} of the time"] if some is not None and waits else []
    if newest.memory_limit is not None and newest.memory_bytes is not None:
        said.append(f"it uses {newest.memory_bytes / GIB:.1f} of {newest.memory_limit / GIB:.1f} GiB")
    said += [f"{faults:.0f} page faults a second read from disk"] if faults >= rules.faults_min else []
    certain = bool(killed) or (full is not None and full >= rules.memory_full_high)
    return Cause(
        "memory_pressure",
        HIGH if certain else MEDIUM,
        ", ".join(said),
        against="" if some is not None else "the kernel does not report how long tasks waited (PSI)",
        advice="ask for more memory, or use fewer workers and a smaller prefetch_factor: each worker keeps samples",
    )


RULE = Rule(
    name="memory_pressure",
    title="too little host memory",
    states=IDLE | WORKING,
    judge=judge,
    claims=(7, 72),
    needs=(
        "how long tasks waited for memory (PSI), or, without PSI, page faults that read from disk while "
        "the limit is nearly reached; processes that the OOM killer ended"
    ),
    against="a kernel without PSI",
    remedy=(
        "Ask for more memory, or use fewer workers and a smaller `prefetch_factor`. A full limit alone is"
        " no pressure: the page cache fills every limit."
    ),
)
