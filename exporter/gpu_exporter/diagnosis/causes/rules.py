"""All causes, in the order in which they are judged: the first one of the highest confidence is what people see."""

from __future__ import annotations

from gpu_exporter.common.model.causes import Cause, Causes
from gpu_exporter.diagnosis.causes import (
    checkpoint_share,
    checkpointing,
    cpu_bound_input,
    cpu_contended,
    cpu_logging,
    cpu_oversubscribed,
    cpu_quota,
    cpu_work,
    data_parallel,
    far_numa,
    input_wait,
    interactive,
    late_rank,
    launch_bound,
    link_degraded,
    lost_rank,
    memory_pressure,
    no_mixed_precision,
    no_process,
    node_memory,
    pinned_loaders,
    remote_io,
    shm_full,
    small_batch,
    small_file_io,
    starting,
    steps_elsewhere,
    too_few_workers,
    unused_gpu,
)
from gpu_exporter.diagnosis.causes.case import WORKING, CauseCase, Needs, Rule
from gpu_exporter.diagnosis.causes.inside import OF_INPUT, add_inside

RULES: tuple[Rule, ...] = (
    link_degraded.RULE,
    lost_rank.RULE,
    unused_gpu.RULE,
    starting.RULE,
    interactive.RULE,
    no_process.RULE,
    steps_elsewhere.RULE,
    late_rank.RULE,
    checkpointing.RULE,
    node_memory.RULE,
    cpu_contended.RULE,
    memory_pressure.RULE,
    shm_full.RULE,
    cpu_oversubscribed.RULE,
    cpu_quota.RULE,
    remote_io.RULE,
    small_file_io.RULE,
    cpu_bound_input.RULE,
    pinned_loaders.RULE,
    too_few_workers.RULE,
    input_wait.RULE,
    far_numa.RULE,
    data_parallel.RULE,
    checkpoint_share.RULE,
    cpu_logging.RULE,
    launch_bound.RULE,
    small_batch.RULE,
    no_mixed_precision.RULE,
    cpu_work.RULE,
)
STATES = frozenset().union(*(rule.states for rule in RULES))
INSIDE = "the training loop's own report (gpu_exporter_torch): waits, batch size, precision"
INSIDE_RULES = frozenset(
    (
        "input_wait",
        "data_parallel",
        "checkpoint_share",
        "cpu_logging",
        "launch_bound",
        "small_batch",
        "no_mixed_precision",
        "steps_elsewhere",
    )
)


PARTLY = "not all of its processes were looked at (512 at most)"
NOT_BY_PROCESSES = INSIDE_RULES | {
    "link_degraded",
    "no_process",
    "unused_gpu",
    "late_rank",
    "lost_rank",
    "shm_full",
    "checkpointing",
}


def _with_limits(case: CauseCase, cause: Cause) -> Cause:
    if cause.name in NOT_BY_PROCESSES or all(each.is_all for each in case.seen):
        return cause
    return cause._replace(against="; ".join(filter(None, (cause.against, PARTLY))))


def find_causes(case: CauseCase) -> Causes:
    """The causes of the state of one allocation, and what could not be judged."""
    found: list[Cause] = []
    needs: dict[str, None] = {}
    for rule in RULES:
        if case.state not in rule.states or rule.name in case.rules.off:
            continue
        answer = rule.judge(case)
        if isinstance(answer, Cause):
            found.append(add_inside(case, _with_limits(case, answer)))
        elif isinstance(answer, Needs):
            needs[answer.text] = None
    if any(cause.name in OF_INPUT for cause in found):  # its evidence has the wait, and it says why
        found = [cause for cause in found if cause.name != input_wait.RULE.name]
    if not found and case.state in WORKING and case.training is None:
        needs[INSIDE] = None
    if remote_io.FILES.text in needs:  # last: a right that few sites give
        needs[remote_io.FILES.text] = needs.pop(remote_io.FILES.text)
    return Causes(tuple(found), tuple(needs))
