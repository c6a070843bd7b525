"""The training loop waits for its data, and nothing shows why. That is a fact, and blames no holder."""

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
        against="nothing shows whether its loaders are slow, or what they load from",
    )


RULE = Rule(
    name="input_wait",
    states=WORKING,
    judge=judge,
    needs="the training loop's own report (torch.md): the share of its steps in which it waits for data",
    against="always, so it is a fact of low confidence: a cause of slow input beside it takes its place",
)
