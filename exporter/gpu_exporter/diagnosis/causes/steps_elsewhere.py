"""The training loop reports steps while this GPU does nothing: it trains on another device, or its report is wrong."""

from __future__ import annotations

from gpu_exporter.common.durations import describe_duration
from gpu_exporter.common.model.causes import LOW, MEDIUM, Cause, numbers
from gpu_exporter.diagnosis.causes.case import IDLE, CauseCase, Needs, rule


@rule(
    states=IDLE,
    needs=(
        "steps that the training loop has [reported](torch.md) in the last five minutes, and a GPU that has done"
        " nothing for five minutes"
    ),
    against="only the job itself reports the steps; with `causes.steps: delay`, the site trusts this report",
)
def judge(case: CauseCase) -> Cause | Needs | None:
    """Judges the cause from the reported steps, which are only the job's claim.

    With low confidence, the cause is not published and delays no mark. The claim delays a mark only if the site trusts
    it (`causes.steps`).
    """
    pace = case.training
    if pace is None or not pace.seen or pace.silent_s > case.rules.window:
        return None
    if case.idle_run_s is None or case.idle_run_s < case.rules.window:
        return None
    is_trusted = case.rules.steps == "delay"
    return Cause(
        "steps_elsewhere",
        MEDIUM if is_trusted else LOW,
        f"its loop reports {pace.seen} steps in the last minutes, and this GPU has done nothing for "
        f"{describe_duration(case.idle_run_s)}",
        against="" if is_trusted else "only the job itself reports these steps",
        values=numbers(steps=float(pace.seen), idle_seconds=case.idle_run_s),
    )
