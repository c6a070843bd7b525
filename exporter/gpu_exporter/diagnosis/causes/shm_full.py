"""The shared memory through which loaders pass their samples is full: a container has 64 MiB by default."""

from __future__ import annotations

from gpu_exporter.common.model.causes import MEDIUM, Cause, numbers
from gpu_exporter.diagnosis.causes.case import WITH_PROCESS, CauseCase, Needs, need, rule

MIB = 2**20
ELSEWHERE = 1.05  # shared memory beyond the size of /dev/shm is elsewhere, and is no evidence


@rule(
    states=WITH_PROCESS,
    needs="shared memory of the cgroup, and the size of /dev/shm",
    against="the value includes shared memory outside of /dev/shm (always shown)",
)
def judge(case: CauseCase) -> Cause | Needs | None:
    if not case.recent:
        return need(case)
    used, limit = case.average(lambda each: each.shm_bytes), case.recent[-1].shm_limit
    if used is None or not limit or not case.rules.shm_ratio * limit <= used <= ELSEWHERE * limit:
        return None
    return Cause(
        "shm_full",
        MEDIUM,
        f"{used / MIB:.0f} MiB of shared memory are in use, /dev/shm has {limit / MIB:.0f} MiB",
        against="shared memory outside of /dev/shm is counted too",
        values=numbers(used_bytes=used, size_bytes=limit),
    )
