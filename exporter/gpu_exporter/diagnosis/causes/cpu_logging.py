"""The loop computes metrics or writes logs while the GPU waits."""

from __future__ import annotations

from gpu_exporter.common.model.causes import Cause
from gpu_exporter.diagnosis.causes.case import WORKING, CauseCase, Needs, rule
from gpu_exporter.diagnosis.causes.inside import judge_phase


@rule(
    states=WORKING,
    needs="the phase `logging` in the training loop's [report](torch.md)",
)
def judge(case: CauseCase) -> Cause | Needs | None:
    return judge_phase(case, "cpu_logging", "logging")
