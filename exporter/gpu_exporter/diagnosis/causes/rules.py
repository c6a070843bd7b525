"""All causes, in the order in which they are judged: the first one of the highest confidence is what people see."""

from __future__ import annotations

from gpu_exporter.diagnosis.causes import (
    checkpointing,
    cpu_bound_input,
    cpu_oversubscribed,
    cpu_quota,
    far_numa,
    interactive,
    late_rank,
    link_degraded,
    memory_pressure,
    no_process,
    remote_io,
    shm_full,
    small_file_io,
    starting,
    too_few_workers,
    unused_gpu,
)
from gpu_exporter.diagnosis.causes.case import WORKING, CauseCase, Needs, Rule
from gpu_exporter.model.causes import Cause, Causes

RULES: tuple[Rule, ...] = (
    link_degraded.RULE,
    unused_gpu.RULE,
    starting.RULE,
    interactive.RULE,
    no_process.RULE,
    late_rank.RULE,
    checkpointing.RULE,
    memory_pressure.RULE,
    shm_full.RULE,
    cpu_oversubscribed.RULE,
    cpu_quota.RULE,
    remote_io.RULE,
    small_file_io.RULE,
    cpu_bound_input.RULE,
    too_few_workers.RULE,
    far_numa.RULE,
)
STATES = frozenset().union(*(rule.states for rule in RULES))
INSIDE = "facts from inside the training loop: batch size, precision, launches of kernels"


PARTLY = "only 512 of its processes were looked at"
NOT_BY_PROCESSES = frozenset(("link_degraded", "no_process", "unused_gpu", "late_rank", "shm_full", "checkpointing"))


def _with_limits(case: CauseCase, cause: Cause) -> Cause:
    if cause.name in NOT_BY_PROCESSES or all(each.is_all for each in case.seen):
        return cause
    return cause._replace(against="; ".join(filter(None, (cause.against, PARTLY))))


def find_causes(case: CauseCase) -> Causes:
    """The causes of the state of one allocation, and what could not be judged."""
    found: list[Cause] = []
    needs: dict[str, None] = {}
    for rule in RULES:
        if case.state not in rule.states:
            continue
        answer = rule.judge(case)
        if isinstance(answer, Cause):
            found.append(_with_limits(case, answer))
        elif isinstance(answer, Needs):
            needs[answer.text] = None
    if not found and case.state in WORKING:
        needs[INSIDE] = None
    if remote_io.FILES.text in needs:  # last: a right that few sites give
        needs[remote_io.FILES.text] = needs.pop(remote_io.FILES.text)
    return Causes(tuple(found), tuple(needs))
