"""Some GPUs of the holder spin in a collective operation, and perhaps wait for a rank on this node."""

from __future__ import annotations

from gpu_exporter.common.durations import describe_duration
from gpu_exporter.common.model.causes import HIGH, MEDIUM, Cause, numbers
from gpu_exporter.diagnosis.causes.case import CauseCase, HeldGpu, Needs, rule

AROUND_S = 900.0  # the late rank may have stopped long before the collective in which the others wait
OTHERS = Needs("the exporters of the job's other nodes: the late rank is not on this node")


@rule(
    states=frozenset(("stalled", "held_idle")),
    needs=(
        "a [stall](stalls.md) on a GPU of the holder; on this node, another GPU of the holder at 0 %, or a stopped"
        " process"
    ),
    against="see the evidence of the stall",
)
def judge(case: CauseCase) -> Cause | Needs | None:
    spinning = [each for each in case.members if each.spin is not None and each.spin.is_stall]
    if not spinning:
        return None
    run_s = max(each.spin.run_s for each in spinning if each.spin is not None)
    late = [each for each in case.members if _is_late(each, run_s)]
    stopped = case.seen[-1].stopped if case.seen else 0
    if case.uuid not in {each.uuid for each in (*spinning, *late)}:
        return None
    if not late and not stopped:
        return OTHERS if case.state == "stalled" else None
    certain = any(each.spin is not None and each.spin.confidence == "high" for each in spinning)
    said = [f"gpu {each.label} has been at 0 % for {describe_duration(each.idle_run_s or 0)}" for each in late[:4]]
    said += [f"{stopped} of its processes are stopped by a signal"] if stopped else []
    return Cause(
        "late_rank",
        HIGH if certain else MEDIUM,
        f"no progress for {describe_duration(run_s)} on {len(spinning)} of its {len(case.members)} GPUs here; "
        + ", ".join(said),
        advice="look at the rank on that GPU first: its last log line, its stack (py-spy dump), XIDs of the GPU"
        if late
        else "continue the stopped processes (kill -CONT, scontrol resume), or end the job",
        values=numbers(waiting_gpus=float(len(spinning)), gpus=float(len(case.members)), run_seconds=run_s),
    )


def _is_late(gpu: HeldGpu, run_s: float) -> bool:
    """Returns whether a GPU became idle when the others began to wait. A GPU without a process does not count."""
    idle_s = gpu.idle_run_s or 0.0
    return gpu.utilization == 0.0 and gpu.processes != 0.0 and 0.0 < idle_s <= run_s + AROUND_S
