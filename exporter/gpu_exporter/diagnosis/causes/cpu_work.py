"""The holder computes on CPUs while its GPU, on which it has a process, does nothing."""

from __future__ import annotations

from gpu_exporter.common.model.causes import MEDIUM, Cause
from gpu_exporter.diagnosis.causes.case import CauseCase, Needs, Rule, need

CORES = 0.9  # CPUs: one thread is the whole program of a notebook


def judge(case: CauseCase) -> Cause | Needs | None:
    cores = case.average(lambda each: each.cores)
    if cores is None:
        return need(case)
    if cores < CORES or any((each.utilization or 0.0) > 0.0 for each in case.members):
        return None
    return Cause(
        "cpu_work",
        MEDIUM,
        f"its processes use {cores:.1f} CPUs, while its GPU does nothing",
        against="it may prepare its next work",
        advice="check that model and data are on this GPU; run what needs no GPU in a job without one",
    )


RULE = Rule(
    name="cpu_work",
    title="computes on CPUs beside an idle GPU",
    states=frozenset(("held_idle",)),
    judge=judge,
    claims=(),
    needs="the CPUs that the holder uses, and that none of its GPUs on the node works",
    against="always: it may prepare its next work",
    remedy=(
        "Check that model and data are on this GPU, for example that `torch.cuda.is_available()` is true. Run what"
        " needs no GPU, such as the preparation of data, in a job without one."
    ),
)
