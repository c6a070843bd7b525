"""The loop itself says that it waits for its checkpoints. Unlike checkpointing, this delays no mark."""

from __future__ import annotations

from gpu_exporter.diagnosis.causes.case import WORKING, CauseCase, Needs, Rule
from gpu_exporter.diagnosis.causes.inside import find_pace
from gpu_exporter.model.causes import HIGH, MEDIUM, Cause


def judge(case: CauseCase) -> Cause | Needs | None:
    pace = find_pace(case)
    share = None if pace is None else pace.phases.get("checkpoint")
    if share is None or share < case.rules.phase_min:
        return None
    return Cause(
        "checkpoint_share",
        HIGH if share >= case.rules.wait_high else MEDIUM,
        f"its loop spends {share:.0%} of its steps in the phase checkpoint",
        advice="write checkpoints less often, or with torch.distributed.checkpoint.async_save",
        gain=f"at most {1.0 / (1.0 - min(share, 0.99)):.1f} times",
    )


RULE = Rule(
    name="checkpoint_share",
    title="the loop waits for its checkpoints",
    states=WORKING,
    judge=judge,
    claims=(64,),
    needs="the phase `checkpoint`, where the training loop places it (torch.md)",
    against="nothing: the loop measures it. A loop that does not place the phase shows nothing",
    remedy="Write checkpoints less often, or asynchronously (`torch.distributed.checkpoint.async_save`).",
)
