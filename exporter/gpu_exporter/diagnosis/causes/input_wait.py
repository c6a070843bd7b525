"""The training loop waits for its data, and the host does not show why."""

from __future__ import annotations

from gpu_exporter.common.model.causes import HIGH, LOW, MEDIUM, Cause
from gpu_exporter.common.report_rules import bound_gain
from gpu_exporter.diagnosis.causes.advice import find_measured, propose_workers
from gpu_exporter.diagnosis.causes.case import WORKING, CauseCase, Needs, Rule
from gpu_exporter.diagnosis.causes.inside import describe_wait, find_pace


def judge(case: CauseCase) -> Cause | Needs | None:
    pace = find_pace(case)
    if pace is None or pace.wait is None or pace.wait < case.rules.wait_min:
        return None
    workers = pace.facts.get("num_workers")
    is_long = pace.wait >= case.rules.wait_high
    confidence = (HIGH if pace.is_gpu else MEDIUM) if is_long else LOW
    facts = "" if workers is None else f"; its DataLoader has {workers} workers"
    advice = find_measured(case)
    if not advice:
        advice = (
            propose_workers(case) if case.recent and case.seen else "raise num_workers, or make each sample cheaper"
        )
    return Cause(
        "input_wait",
        confidence,
        f"{describe_wait(pace)}{facts}" + (f"; {pace.late}" if pace.late else ""),
        against="" if pace.is_gpu else "the loop has no time line of the GPU",
        advice=advice if workers is None else f"{advice}; now {workers}",
        gain=bound_gain(pace.wait),
    )


RULE = Rule(
    name="input_wait",
    title="the loop waits for data",
    states=WORKING,
    judge=judge,
    claims=(11, 44, 61),
    needs="the training loop's own report (torch.md): the share of its steps in which it waits for data",
    against="that the loop has no time line of the GPU: work that was launched before may hide the wait",
    remedy=(
        "See the causes of slow input beside it. Without one: raise `num_workers`, or make each sample cheaper. The"
        " wait is of the rank that waits longest."
    ),
)
