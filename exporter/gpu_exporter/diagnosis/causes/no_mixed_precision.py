"""The model computes in 32 bits, so the tensor cores of the GPU are not used, or not fully."""

from __future__ import annotations

from gpu_exporter.common.model.causes import LOW, MEDIUM, Cause
from gpu_exporter.diagnosis.causes.case import CauseCase, Needs, Rule
from gpu_exporter.diagnosis.causes.inside import find_pace


def judge(case: CauseCase) -> Cause | Needs | None:
    pace = find_pace(case)
    facts = {} if pace is None else pace.facts
    precision = facts.get("precision")
    if facts.get("parameters") != "float32" or facts.get("matmul") != "highest" or precision not in (None, "float32"):
        return None
    return Cause(
        "no_mixed_precision",
        MEDIUM if precision else LOW,
        "its parameters are float32, and products of matrices are computed in float32 too (matmul precision highest)",
        against=""
        if precision
        else "the loop may use autocast: the report shows it only if phase(...) is inside of it",
        gain="up to 2 times in the steps' work, if they are limited by arithmetic",
    )


RULE = Rule(
    name="no_mixed_precision",
    states=frozenset(("busy_inefficient",)),
    judge=judge,
    needs="the types of parameters and products of matrices, from the training loop's own report",
    against="that autocast is not visible in a plain loop. With Lightning and the Trainer, it is visible",
)
