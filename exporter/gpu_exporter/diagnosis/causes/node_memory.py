"""The node lacks memory: the holder's tasks wait or are killed, although the holder is not near its own limit."""

from __future__ import annotations

from gpu_exporter.common.model.causes import HIGH, MEDIUM, Cause, numbers
from gpu_exporter.diagnosis.causes.case import WITH_PROCESS, CauseCase, Needs, rule
from gpu_exporter.diagnosis.causes.memory_pressure import describe_memory, is_waiting
from gpu_exporter.diagnosis.causes.shortage import FAR, SITE, find_short_of_memory, most_of_memory


@rule(
    states=WITH_PROCESS,
    needs="tasks that waited for memory or were killed, and the holder's memory in use, compared with its limit",
    against="the holder itself may fill the node: it has no memory limit, or uses more than 80 % of the limit",
)
def judge(case: CauseCase) -> Cause | Needs | None:
    if not case.recent or not is_waiting(case) or find_short_of_memory(case) != SITE:
        return None
    if any(each.killed and each.ooms is None for each in case.recent):
        return None  # it is unknown whether the holder's own limit was reached
    share = most_of_memory(case)
    return Cause(
        "node_memory",
        HIGH if 0.0 < share < FAR else MEDIUM,
        "; ".join(describe_memory(case)),
        against="" if 0.0 < share < FAR else "it may fill the node: it has no memory limit, or is near its limit",
        values=numbers(memory_ratio=share or None),
    )
