"""The process on the GPU is busy launching kernels that are too small to fill the GPU."""

from __future__ import annotations

from gpu_exporter.common.model.causes import LOW, MEDIUM, Cause, numbers
from gpu_exporter.diagnosis.causes.advice import bound_gain
from gpu_exporter.diagnosis.causes.case import WORKING, CauseCase, Needs, rule
from gpu_exporter.diagnosis.causes.inside import find_compute

COMPILE = "compile the model: torch.compile(model, mode='reduce-overhead') uses CUDA graphs; or raise batch_size"
OTHER = "other work of Python in each step, such as a metric or `.item()`, looks the same"
MODEL = ("forward", "backward", "optimizer")  # phases in which a step launches kernels
MODEL_MIN = 0.7  # share of the step in them that leaves no room for other work of Python
UNKNOWN = "the CPU time of the process is unknown, so it may wait for something else in the step"
USED_MAX = 0.7  # mean utilization: above it, the GPU has work most of the time


@rule(
    states=WORKING,
    needs=(
        "a [report](torch.md) of a loop that hardly waits for data, a utilization below 70 %, and the CPU time of the"
        " process on the GPU"
    ),
    against=(
        "other Python work in the step looks the same. The confidence is low unless the measured phases forward,"
        " backward and optimizer fill the step"
    ),
)
def judge(case: CauseCase) -> Cause | Needs | None:
    pace = find_compute(case)
    if pace is None or pace.step_s is None or case.mean is None or case.mean >= USED_MAX:
        return None
    other = pace.phases.get("checkpoint", 0.0) + pace.phases.get("logging", 0.0) + pace.phases.get("evaluation", 0.0)
    if other >= case.rules.phase_min:
        return None  # another cause names it
    rank = case.average_processes(lambda each: each.rank_cores) if case.recent else None
    is_full = rank is not None and rank >= case.rules.full_ratio
    if rank is not None and not is_full:
        return None
    is_compiled = pace.facts.get("compiled")
    uses = f"the process on the GPU uses {rank:.0%} of a CPU, and " if rank is not None else ""
    compiled = (
        "" if is_compiled is None else "; the model is compiled" if is_compiled else "; the model is not compiled"
    )
    is_model = sum(pace.phases.get(name, 0.0) for name in MODEL) >= MODEL_MIN
    return Cause(
        "launch_bound",
        MEDIUM if is_full and is_model else LOW,
        f"{uses}the loop hardly waits for data ({pace.wait or 0.0:.0%}), but the GPU is at {case.mean:.0%}; "
        f"{pace.step_s * 1e3:.3g} ms per step{compiled}",
        against=UNKNOWN if rank is None else OTHER if not is_model else "the model may wait for its kernels",
        advice="raise batch_size" if is_compiled else COMPILE,
        gain=bound_gain(case),
        values=numbers(wait_ratio=pace.wait, step_seconds=pace.step_s, busy_ratio=case.mean),
    )
