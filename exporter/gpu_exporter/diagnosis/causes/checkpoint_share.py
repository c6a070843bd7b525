"""The training loop reports that it waits for its checkpoints. Unlike `checkpointing`, this cause delays no mark."""

from __future__ import annotations

from gpu_exporter.common.model.causes import Cause
from gpu_exporter.diagnosis.causes.case import WORKING, CauseCase, Needs, Rule
from gpu_exporter.diagnosis.causes.inside import judge_phase


def judge(case: CauseCase) -> Cause | Needs | None:
    return judge_phase(case, "checkpoint_share", "checkpoint")


RULE = Rule(
    name="checkpoint_share",
    states=WORKING,
    judge=judge,
    needs="the phase `checkpoint` in the training loop's own report (torch.md)",
    against="nothing: the loop measures it. In a loop that does not measure this phase, the cause is not found",
)
