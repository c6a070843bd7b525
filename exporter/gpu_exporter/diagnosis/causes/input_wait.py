"""The training loop waits for its data, and the reason is unknown."""

from __future__ import annotations

from gpu_exporter.common.model.causes import LOW, Cause
from gpu_exporter.diagnosis.causes.case import WORKING, CauseCase, Needs, rule
from gpu_exporter.diagnosis.causes.inside import describe_wait, find_pace


@rule(
    states=WORKING,
    needs="the share of its time in which the training loop waits for data, from its [report](torch.md)",
    against="the confidence is always low. A known cause of slow input replaces this cause",
)
def judge(case: CauseCase) -> Cause | Needs | None:
    pace = find_pace(case)
    if pace is None or pace.wait is None or pace.wait < case.rules.wait_min:
        return None
    return Cause(
        "input_wait",
        LOW,
        describe_wait(pace) + (f"; {pace.late}" if pace.late else ""),
        against="its loaders or its storage may be slow",
    )
