"""The model computes in 32 bits, so it uses the tensor cores of the GPU only partly or not at all."""

from __future__ import annotations

from gpu_exporter.common.model.causes import LOW, MEDIUM, Cause
from gpu_exporter.diagnosis.causes.case import CauseCase, Needs, rule
from gpu_exporter.diagnosis.causes.inside import find_pace


@rule(
    states=frozenset(("busy_inefficient",)),
    needs="the types of parameters and matrix products, from the training loop's [report](torch.md)",
    against="the loop may use autocast (low confidence); a plain loop reports autocast only inside `phase(...)`",
)
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
        against="" if precision else "the loop may use autocast: the report shows autocast only around phase(...)",
        gain="up to 2 times, if arithmetic limits the steps",
    )
