"""Judges the confidence that a run without progress is a stall, and lists the evidence against it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from gpu_exporter.diagnosis.stalls.rules import StallRules
from gpu_exporter.diagnosis.stalls.waits import NOTHING_KNOWN, Around

PUBLISHED = ("medium", "high")
STEPS = ("none", "low", "medium", "high")
SILENT_SM = 0.001  # below this no SM works, which contradicts a GPU that is 100 % busy: then GPM does not count


def is_collective(sm: float, rules: StallRules, *, polls: bool) -> bool:
    """Returns whether the share of busy SMs fits a collective: more than one thread block, less than large kernels."""
    return (rules.sm_min_polling if polls else rules.sm_min) <= sm <= rules.sm_max


def judge_confidence(
    rules: StallRules,
    sm: float | None,
    unknown: Sequence[str],
    *,
    has_worked: bool,
    has_stopped: bool = False,
    polls: bool = False,
    around: Around = NOTHING_KNOWN,
) -> tuple[str, list[str]]:
    """Returns the confidence that a lasting run becomes a stall, and texts with the evidence against it.

    `sm`: share of the SMs with work, None without SM data. `unknown`: witnesses of progress that are not known.
    `has_stopped`: the training loop made steps until the run began, and none since; this raises the confidence by one
    step. `polls`: the GPU's kernel reads flags in the host's memory. `around`: the holder's other GPUs; a proof raises
    the confidence by one step. Without a proof the confidence is at most medium, because the GPU may wait for something
    else.
    """
    doubts: list[str] = []
    is_other = False  # the kernel is probably not a collective
    if sm is not None and is_collective(sm, rules, polls=polls):
        step = STEPS.index("high")
    elif sm is not None and sm >= SILENT_SM:
        step, is_other = STEPS.index("low"), True
        doubts.append(f"{sm:.1%} of the SMs have work, and other kernels than collectives look the same")
    elif has_worked:
        step = STEPS.index("medium")
        doubts.append("the only evidence is the power of the GPU")
    else:
        step = STEPS.index("low")
        doubts.append("the exporter has not seen the holder at work, and a small kernel that never ends looks the same")
    if around.alone:
        step, is_other = min(step, STEPS.index("low")), True
        doubts.append(around.alone)
    if unknown:
        step = max(STEPS.index("low"), step - 1)
        doubts.append(f"not known: {', '.join(unknown)}")
    if not is_other and (has_stopped or around.proof):  # a loop that has ended stops too, and such a kernel may follow
        step = min(step + 1, STEPS.index("high"))
    if not around.proof:
        step = min(step, STEPS.index("medium"))
        doubts.append("nothing proves whether the GPU waits or hangs")
    return STEPS[step], doubts
