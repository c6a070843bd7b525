"""A person works at a terminal or in a notebook."""

from __future__ import annotations

from gpu_exporter.common.model.causes import MEDIUM, Cause, numbers
from gpu_exporter.diagnosis.causes.case import IDLE, CauseCase, Needs, need, rule

QUIET = 0.5  # CPUs: a program that uses more does something else


@rule(
    states=IDLE,
    needs="a process with a terminal or with the name of a notebook server, and the CPUs in use",
    against="a batch job can be started from a terminal (always shown)",
)
def judge(case: CauseCase) -> Cause | Needs | None:
    if not case.seen:
        return need(case)
    newest, cores = case.seen[-1], case.average(lambda each: each.cores)
    if not (newest.terminal or newest.notebook) or cores is None or cores >= QUIET:
        return None
    what = "a notebook server runs" if newest.notebook else "a process has a terminal"
    return Cause(
        "interactive",
        MEDIUM,
        f"{what}, and the holder uses {cores:.2f} CPUs",
        against="a batch job can be started from a terminal too",
        values=numbers(used_cpus=cores),
    )
