"""The loop computes metrics or writes logs while the GPU waits."""

from __future__ import annotations

from gpu_exporter.diagnosis.causes.case import WORKING, CauseCase, Needs, Rule
from gpu_exporter.diagnosis.causes.inside import find_pace
from gpu_exporter.model.causes import HIGH, MEDIUM, Cause


def judge(case: CauseCase) -> Cause | Needs | None:
    pace = find_pace(case)
    share = None if pace is None else pace.phases.get("logging")
    if share is None or share < case.rules.phase_min:
        return None
    return Cause(
        "cpu_logging",
        HIGH if share >= case.rules.wait_high else MEDIUM,
        f"its loop spends {share:.0%} of its steps in the phase logging",
        advice="log every 50 steps instead of each, and keep metrics on the GPU until then",
        gain=f"at most {1.0 / (1.0 - min(share, 0.99)):.1f} times",
    )


RULE = Rule(
    name="cpu_logging",
    title="metrics or logs in each step",
    states=WORKING,
    judge=judge,
    claims=(66, 67, 68, 69),
    needs="the phase `logging`, where the training loop places it (torch.md)",
    against="nothing: the loop measures it. A loop that does not place the phase shows nothing",
    remedy="Log every 50 steps, keep metrics on the GPU until then, and write from another thread.",
)
