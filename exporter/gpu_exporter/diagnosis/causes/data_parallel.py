"""One process feeds several GPUs by DataParallel, which copies the model in each step."""

from __future__ import annotations

from gpu_exporter.common.model.causes import HIGH, Cause, numbers
from gpu_exporter.diagnosis.causes.case import WORKING, CauseCase, Needs, rule
from gpu_exporter.diagnosis.causes.inside import find_pace


@rule(
    states=WORKING,
    needs="the type of the model, from the training loop's [report](torch.md) (`observe(model=...)`)",
)
def judge(case: CauseCase) -> Cause | Needs | None:
    pace = find_pace(case)
    if pace is None or pace.facts.get("data_parallel") is not True or len(case.members) < 2:
        return None
    return Cause(
        "data_parallel",
        HIGH,
        f"its model is a DataParallel, and {len(case.members)} GPUs of this node belong to it",
        values=numbers(gpus=float(len(case.members))),
    )
