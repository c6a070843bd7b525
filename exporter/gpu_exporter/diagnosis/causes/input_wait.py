"""The training loop waits for its data, and the reason is unknown. This cause is a fact and blames no holder."""

from __future__ import annotations

from gpu_exporter.common.model.causes import LOW, Cause
from gpu_exporter.diagnosis.causes.case import WORKING, CauseCase, Needs, Rule
from gpu_exporter.diagnosis.causes.inside import describe_wait, find_pace


def judge(case: CauseCase) -> Cause | Needs | None:
    pace = find_pace(case)
    if pace is None or pace.wait is None or pace.wait < case.rules.wait_min:
        return None
    return Cause(
        "input_wait",
        LOW,
        describe_wait(pace) + (f"; {pace.late}" if pace.late else ""),
        against="either its loaders or its storage may be slow",
    )


RULE = Rule(
    name="input_wait",
    states=WORKING,
    judge=judge,
    needs="the training loop's own report (torch.md): the share of its steps in which it waits for data",
    against="always, so the confidence is low; if a cause of slow input is found too, only that cause is shown",
)
