"""The holder waits for memory. A full limit alone is not a cause, because the page cache fills every limit."""

from __future__ import annotations

from gpu_exporter.common.model.causes import HIGH, LOW, MEDIUM, Cause, numbers
from gpu_exporter.diagnosis.causes.case import WITH_PROCESS, CauseCase, Needs, need, rule
from gpu_exporter.diagnosis.causes.shortage import OWN, find_short_of_memory, most_of_memory

GIB = 2**30
CACHE = 0.6  # share of the memory in use
THRASHES = 1000.0  # pages a second that are read again (4 MB/s): reading a stream of data causes fewer
BLOCKED = 0.25  # processes that wait for a disk, mean: without PSI the only sign that tasks wait


def is_waiting(case: CauseCase) -> bool:
    """Returns whether processes of the holder wait for memory, or were killed because the holder lacked memory."""
    rules = case.rules
    some = case.average(lambda each: each.pressure_memory)
    full = case.average(lambda each: each.memory_full) or 0.0
    if any(each.killed for each in case.recent) and (some is None or full > 0.0 or _is_near(case)):
        return True
    if some is not None:
        return some >= rules.pressure_memory_min and full > 0.0
    refaults = case.average(lambda each: each.refaults) or 0.0
    blocked = case.average_processes(lambda each: float(each.blocked)) or 0.0
    return _is_near(case) and refaults >= rules.refaults_min and blocked >= BLOCKED


def _is_near(case: CauseCase) -> bool:
    return most_of_memory(case) >= case.rules.memory_near


def _is_cache(case: CauseCase) -> bool:
    """Returns whether most of the memory is page cache, which fills when the holder reads much data."""
    newest = case.recent[-1]
    return (newest.memory_cache or 0.0) >= CACHE * (newest.memory_bytes or 0.0) > 0.0


def describe_memory(case: CauseCase) -> list[str]:
    """Returns the evidence that the holder waits for memory, as texts."""
    newest, rules = case.recent[-1], case.rules
    killed = sum(each.killed or 0.0 for each in case.recent)
    some, refaults = case.average(lambda each: each.pressure_memory), case.average(lambda each: each.refaults) or 0.0
    used, limit, cache = newest.memory_bytes, newest.memory_limit, newest.memory_cache or 0.0
    said = [f"the OOM killer ended {killed:.0f} of its processes"] if killed else []
    said += (
        [f"its tasks waited for memory {some:.0%} of the time"] if (some or 0.0) >= rules.pressure_memory_min else []
    )
    if used is not None and limit is not None:
        said.append(f"it uses {used / GIB:.1f} of {limit / GIB:.1f} GiB, {cache / GIB:.1f} of them page cache")
    return said + (
        [f"{refaults:.0f} pages a second were evicted and read again"] if refaults >= rules.refaults_min else []
    )


@rule(
    states=WITH_PROCESS,
    needs=(
        "the time in which tasks waited for memory (PSI), and processes that the OOM killer ended; without PSI, pages"
        " that are evicted and read again near the limit"
    ),
    against=(
        "the kernel has no PSI; all tasks waited together only for a short time; the holder's limit is not near (low"
        " confidence)"
    ),
)
def judge(case: CauseCase) -> Cause | Needs | None:
    if not case.recent:
        return need(case)
    if not is_waiting(case):
        return None
    some, full = case.average(lambda each: each.pressure_memory), case.average(lambda each: each.memory_full) or 0.0
    is_killed = any(each.killed for each in case.recent)
    certain = is_killed or full >= case.rules.memory_full_high
    against = "" if some is not None else "the kernel does not report how long tasks waited (PSI)"
    if some is None and not is_killed:
        against += "; reading more data than fit into memory looks the same"
    elif some is not None and not certain:
        against = "some tasks waited, but rarely all of them"
    is_own = find_short_of_memory(case) == OWN
    if not is_own:
        against = "; ".join(filter(None, (against, "its own limit is not near: the node may lack memory")))
    refaults = case.average(lambda each: each.refaults) or 0.0
    streams = some is None and not is_killed and refaults < THRASHES and _is_cache(case)
    return Cause(
        "memory_pressure",
        LOW if not is_own or streams else HIGH if certain else MEDIUM,
        ", ".join(describe_memory(case)),
        against=against,
        values=numbers(waiting_ratio=some, memory_ratio=most_of_memory(case) or None),
    )
