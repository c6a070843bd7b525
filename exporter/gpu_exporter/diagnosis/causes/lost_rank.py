"""A member of the gang cannot continue, so the other GPUs wait for ever."""

from __future__ import annotations

from gpu_exporter.common.durations import describe_duration
from gpu_exporter.common.model.causes import HIGH, MEDIUM, Cause, numbers
from gpu_exporter.diagnosis.causes.case import IDLE, CauseCase, rule


@rule(
    states=IDLE | {"stalled"},
    needs="a [stall](stalls.md) on a GPU of the holder, and [proof](stalls.md#proof) on this node",
    against="see the evidence of the stall",
)
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
