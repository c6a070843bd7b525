"""The processes on the GPU can run only on CPUs of another NUMA node."""

from __future__ import annotations

from gpu_exporter.common.model.causes import MEDIUM, Cause
from gpu_exporter.diagnosis.causes.case import WORKING, CauseCase, Needs, need, rule


@rule(
    states=WORKING,
    needs="the CPUs on which the processes can run, and the CPUs near the GPU (NVML)",
    against="the cost depends on the amount of data that is copied to the GPU (always shown)",
)
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
        against="the cost depends on the amount of data copied to the GPU",
    )
