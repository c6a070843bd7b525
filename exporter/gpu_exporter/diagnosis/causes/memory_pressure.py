"""The holder waits for memory. A full limit alone is not a cause, because the page cache fills every limit."""

from __future__ import annotations

from gpu_exporter.common.model.causes import HIGH, MEDIUM, Cause
from gpu_exporter.diagnosis.causes.case import WITH_PROCESS, CauseCase, Needs, Rule, need

GIB = 2**30
BLOCKED = 0.25  # processes that wait for a disk, mean: without PSI the only sign that tasks wait


def judge(case: CauseCase) -> Cause | Needs | None:
    if not case.recent:
        return need(case)
    rules, newest = case.rules, case.recent[-1]
    some, full = case.average(lambda each: each.pressure_memory), case.average(lambda each: each.memory_full)
    refaults = case.average(lambda each: each.refaults) or 0.0
    killed = sum(each.killed or 0.0 for each in case.recent)
    used, limit, cache = newest.memory_bytes, newest.memory_limit, newest.memory_cache or 0.0
    near = used is not None and limit is not None and used >= rules.memory_near * limit
    waits = some is not None and some >= rules.pressure_memory_min and (full or 0.0) > 0.0
    blocked = case.average_processes(lambda each: float(each.blocked)) or 0.0
    evicts = some is None and near and refaults >= rules.refaults_min and blocked >= BLOCKED
    if not ((killed and (near or (full or 0.0) > 0.0 or some is None)) or waits or evicts):
        return None
    said = [f"the OOM killer ended {killed:.0f} of its processes"] if killed else []
    said += [f"its tasks waited for memory {some:.0%} of the time"] if some is not None and waits else []
    if used is not None and limit is not None:
        said.append(f"it uses {used / GIB:.1f} of {limit / GIB:.1f} GiB, {cache / GIB:.1f} of them page cache")
    said += [f"{refaults:.0f} pages a second were evicted and read again"] if refaults >= rules.refaults_min else []
    certain = bool(killed) or (full is not None and full >= rules.memory_full_high)
    against = "" if some is not None else "the kernel does not report how long tasks waited (PSI)"
    if evicts and not killed:
        against += "; data that are read in turn and do not fit into memory look the same"
    elif some is not None and not certain:
        against = "some tasks waited, but rarely all of them"
    return Cause(
        "memory_pressure",
        HIGH if certain else MEDIUM,
        ", ".join(said),
        against=against,
        advice="ask for more memory, or use fewer workers and a smaller prefetch_factor: each worker keeps samples",
    )


RULE = Rule(
    name="memory_pressure",
    title="too little host memory",
    states=WITH_PROCESS,
    judge=judge,
    claims=(7, 72),
    needs=(
        "how long tasks waited for memory (PSI); without PSI, pages that are evicted and read again while processes "
        "wait and the limit is nearly reached; processes that the OOM killer ended"
    ),
    against="a kernel without PSI; tasks of which rarely all waited",
    remedy=(
        "Ask for more memory, or use fewer workers and a smaller `prefetch_factor`. Memory in use near the limit"
        " alone is not memory pressure, because the page cache fills it too."
    ),
)
