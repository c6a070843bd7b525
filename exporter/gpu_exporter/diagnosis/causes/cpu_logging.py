"""The loop computes metrics or writes logs while the GPU waits."""

from __future__ import annotations

from gpu_exporter.common.model.causes import Cause
from gpu_exporter.diagnosis.causes.case import WORKING, CauseCase, Needs, Rule
from gpu_exporter.diagnosis.causes.inside import judge_phase


def judge(case: CauseCase) -> Cause | Needs | None:
    return judge_phase(case, "cpu_logging", "logging")


RULE = Rule(
    name="cpu_logging",
    states=WORKING,
    judge=judge,
    needs="the phase `logging` in the training loop's own report (torch.md)",
    against="nothing: the loop measures it. In a loop that does not measure this phase, the cause is not found",
)
