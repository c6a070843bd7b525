"""The processes on the GPU may run only on CPUs of another socket."""

from __future__ import annotations

from gpu_exporter.diagnosis.causes.case import WORKING, CauseCase, Needs, Rule, need
from gpu_exporter.model.causes import MEDIUM, Cause


def judge(case: CauseCase) -> Cause | Needs | None:
    if not case.seen:
        return need(case)
    far = [dict(each.far).get(case.uuid, "") for each in case.seen]
    if not all(far):
        return None
    return Cause(
        "far_numa",
        MEDIUM,
        f"its processes may run only on the CPUs {far[-1]}, none of which is near this GPU",
        against="how much it costs depends on how much is copied",
        advice="bind the job to CPUs near its GPUs (Slurm: --gres-flags=enforce-binding; Kubernetes: Topology Manager "
        "policy single-numa-node)",
    )


RULE = Rule(
    name="far_numa",
    title="CPUs far from the GPU",
    states=WORKING,
    judge=judge,
    claims=(52,),
    needs="the CPUs on which the processes may run, and the CPUs near the GPU (NVML)",
    against="always: what it costs depends on how much is copied",
    remedy=(
        "Bind the job to CPUs near its GPUs (Slurm: `--gres-flags=enforce-binding`; Kubernetes: Topology "
        "Manager, policy single-numa-node)."
    ),
)
