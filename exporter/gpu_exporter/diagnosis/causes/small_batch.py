"""The batch is small: the loop hardly waits for data, and most of the GPU's memory is free."""

from __future__ import annotations

from gpu_exporter.common.model.causes import LOW, MEDIUM, Cause, numbers
from gpu_exporter.diagnosis.causes.advice import bound_gain
from gpu_exporter.diagnosis.causes.case import WORKING, CauseCase, Needs, rule
from gpu_exporter.diagnosis.causes.inside import find_compute


@rule(
    states=WORKING,
    needs=(
        "`batch_size` and the wait for data from the training loop's [report](torch.md), and the memory in use on the"
        " GPU"
    ),
    against=(
        "larger batches change the training (always shown); without times [measured on the GPU](torch.md#what-is-"
        "measured), the confidence is low"
    ),
)
def judge(case: CauseCase) -> Cause | Needs | None:
    pace = find_compute(case)
    if pace is None or case.memory is None or case.memory > case.rules.memory_low:
        return None
    batch = pace.facts.get("batch_size")
    if not isinstance(batch, int) or isinstance(batch, bool) or batch < 1:
        return None
    return Cause(
        "small_batch",
        MEDIUM if pace.is_gpu else LOW,
        f"with batch_size {batch}, {case.memory:.0%} of the GPU's memory is in use, and the loop hardly waits for data "
        f"({pace.wait or 0.0:.0%})",
        against="a larger batch changes the training, so adapt the learning rate",
        advice=f"raise batch_size from {batch} as far as the memory and the loss allow",
        gain=bound_gain(case),
        values=numbers(batch_size=float(batch), memory_ratio=case.memory),
    )
