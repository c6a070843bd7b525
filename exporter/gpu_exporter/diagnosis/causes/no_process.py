"""No process has a context on the GPU."""

from __future__ import annotations

from gpu_exporter.diagnosis.causes.case import CauseCase, Needs, Rule
from gpu_exporter.diagnosis.causes.starting import is_at_work, is_new
from gpu_exporter.durations import describe_duration
from gpu_exporter.model.causes import HIGH, LOW, MEDIUM, Cause


def judge(case: CauseCase) -> Cause | Needs | None:
    cores = case.average(lambda each: each.cores) or 0.0
    works = is_at_work(case)
    run_s = case.idle_run_s or 0.0
    evidence = f"no process of the holder is on the GPU, which has been idle for {describe_duration(run_s)}"
    return Cause(
        "no_process",
        (LOW if is_new(case) else MEDIUM) if works else HIGH,
        evidence,
        against=f"its host works ({cores:.1f} CPUs): it may prepare" if works else "",
        advice="end the job if its work is done; if it computes on CPUs, ask for a GPU only in the step that uses it",
    )


RULE = Rule(
    name="no_process",
    title="nothing runs on the GPU",
    states=frozenset(("held_no_process",)),
    judge=judge,
    claims=(81,),
    needs="that the driver lists no process on the GPU, which is proven once it has listed any process",
    against="processes of the holder that use CPUs: then it may prepare",
    remedy=("End the job if its work is done. If it computes on CPUs, ask for a GPU only in the step that uses it."),
)
