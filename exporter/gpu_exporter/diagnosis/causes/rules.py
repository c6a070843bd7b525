"""Lists all causes, in the order of the table of meanings. The first of those with the highest confidence is displayed.

The rule of a cause is in the module with the same name.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from gpu_exporter.common.model.causes import Cause, Causes
from gpu_exporter.common.model.meanings import CAUSES, advise
from gpu_exporter.diagnosis.causes.case import WORKING, CauseCase, Needs, Rule
from gpu_exporter.diagnosis.causes.inside import OF_INPUT, add_inside
from gpu_exporter.diagnosis.causes.remote_io import FILES

RULES: Mapping[str, Rule] = {name: import_module(f"{__package__}.{name}").judge for name in CAUSES}
STATES = frozenset().union(*(rule.states for rule in RULES.values()))
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


PARTLY = "the exporter looked at only 512 of its processes"
NOT_BY_PROCESSES = INSIDE_RULES | {
    "link_degraded",
    "no_process",
    "unused_gpu",
    "late_rank",
    "lost_rank",
    "shm_full",
    "checkpointing",
}


def _with_advice(cause: Cause) -> Cause:
    """Adds the advice from the table of meanings to a cause, unless its rule has set the advice ("" for no advice)."""
    return cause if cause.advice is not None else cause._replace(advice=advise(cause.name, dict(cause.values)))


def _with_limits(case: CauseCase, cause: Cause) -> Cause:
    if cause.name in NOT_BY_PROCESSES or all(each.is_all for each in case.seen):
        return cause
    return cause._replace(against="; ".join(filter(None, (cause.against, PARTLY))))


def find_causes(case: CauseCase) -> Causes:
    """Finds the causes of one allocation's state, and the evidence that the rules lack."""
    found: list[Cause] = []
    needs: dict[str, None] = {}
    for name, rule in RULES.items():
        if case.state not in rule.states or name in case.rules.off:
            continue
        answer = rule.judge(case)
        if isinstance(answer, Cause):
            found.append(add_inside(case, _with_limits(case, _with_advice(answer))))
        elif isinstance(answer, Needs):
            needs[answer.text] = None
    if any(cause.name in OF_INPUT for cause in found):  # that cause includes the wait, and gives its reason
        found = [cause for cause in found if cause.name != "input_wait"]
    if not found and case.state in WORKING and case.training is None:
        needs[INSIDE] = None
    if FILES.text in needs:  # last: a right that few sites give
        needs[FILES.text] = needs.pop(FILES.text)
    return Causes(tuple(found), tuple(needs))
