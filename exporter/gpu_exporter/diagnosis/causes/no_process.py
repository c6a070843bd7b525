"""No process has a context on the GPU."""

from __future__ import annotations

from gpu_exporter.common.model.causes import HIGH, LOW, MEDIUM, Cause, numbers
from gpu_exporter.diagnosis.causes.case import CauseCase, Needs, rule
from gpu_exporter.diagnosis.causes.starting import is_at_work, is_new


@rule(
    states=frozenset(("held_no_process",)),
    needs="an empty list of processes from a driver that has listed a process since the exporter started",
    against="the holder works on its host, or its work there is unknown",
)
def judge(case: CauseCase) -> Cause | Needs | None:
    cores = case.average(lambda each: each.cores) or 0.0
    works = is_at_work(case)
    against = "" if case.recent else "its work on the host is unknown"
    if works:
        against = f"it uses {cores:.1f} CPUs or moves data: it may prepare its work"
    evidence = "the holder has no process on the GPU" + (f", and uses {cores:.1f} CPUs" if case.recent else "")
    return Cause(
        "no_process",
        (LOW if is_new(case) else MEDIUM) if works else HIGH if case.recent else MEDIUM,
        evidence,
        against=against,
        values=numbers(used_cpus=cores if case.recent else None),
    )
