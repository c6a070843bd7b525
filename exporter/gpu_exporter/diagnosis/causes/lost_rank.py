"""A member of the gang cannot continue, so the other GPUs wait in vain. The detection of stalls found the proof."""

from __future__ import annotations

from gpu_exporter.common.durations import describe_duration
from gpu_exporter.common.model.causes import HIGH, MEDIUM, Cause, numbers
from gpu_exporter.diagnosis.causes.case import IDLE, CauseCase, Rule


def judge(case: CauseCase) -> Cause | None:
    spins = {each.uuid: each.spin for each in case.members if each.spin is not None and each.spin.is_stall}
    proven = [spin for spin in spins.values() if spin.proof]
    if not proven or (case.state not in IDLE and case.uuid not in spins):
        return None
    return Cause(
        "lost_rank",
        HIGH if any(spin.confidence == "high" for spin in proven) else MEDIUM,
        f"{proven[0].proof}; {len(spins)} of its {len(case.members)} GPUs here wait for"
        f" {describe_duration(max(spin.run_s for spin in proven))}",
        values=numbers(
            waiting_gpus=float(len(spins)),
            gpus=float(len(case.members)),
            run_seconds=max(spin.run_s for spin in proven),
        ),
    )


RULE = Rule(
    name="lost_rank",
    states=IDLE | {"stalled"},
    judge=judge,
    needs=(
        "a [stall](stalls.md) on a GPU of the holder, and proof on this node: a rank's process ended or was stopped"
        " when the others began to wait, or a GPU reported an XID or does not answer"
    ),
    against="see the evidence of the stall",
)
