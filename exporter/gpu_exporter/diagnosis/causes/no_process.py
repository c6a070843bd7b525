"""No process has a context on the GPU."""

from __future__ import annotations

from gpu_exporter.diagnosis.causes.case import CauseCase, Needs, Rule
from gpu_exporter.durations import describe_duration
from gpu_exporter.model.causes import HIGH, MEDIUM, Cause

WORKS = 0.5  # CPUs in use that speak for a job that prepares, or that needs no GPU


def judge(case: CauseCase) -> Cause | Needs | None:
    cores = case.average(lambda each: each.cores)
    evidence = (
        f"no process of the holder is on the GPU, which has been idle for {describe_duration(case.idle_run_s or 0)}"
    )
    works = cores is not None and cores >= WORKS
    return Cause(
        "no_process",
        MEDIUM if works else HIGH,
        evidence,
        against=f"its processes use {cores:.1f} CPUs: it may prepare" if works else "",
        advice="end the job if its work is done; if it computes on CPUs, ask for a GPU only in the step that uses it",
    )


RULE = Rule("no_process", "nothing runs on the GPU", frozenset(("held_no_process",)), judge, (2, 16, 82))
