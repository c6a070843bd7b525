"""Publishes the report of a holder's training loop, as series and as JSON. The job writes the report: it is only a
claim.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gpu_exporter.common.model.metrics import Family
from gpu_exporter.common.model.training import TrainingView
from gpu_exporter.common.report_rules import STEP_HELP, STEP_METRIC

STEPS = Family(
    "gpu_training_steps_total",
    "Training steps that the job reports, summed over its ranks on this GPU. The job's own claim (docs/torch.md), no "
    "evidence of use",
)
STEP = Family(STEP_METRIC, STEP_HELP)
PHASES = Family(
    "gpu_training_phase_seconds_total",
    "Seconds of the measured steps by phase, as the training loop reports them. step contains all phases; wait is "
    "waiting for data. Do not add them up",
    ("phase",),
)
LATE = Family(
    "gpu_training_rank_late_ratio",
    "Share of a step for which ranks on this node wait for the slowest, 0 if none is late. Absent without two "
    "comparable ranks",
)
FAMILIES = (STEPS, STEP, PHASES, LATE)


def list_training(training: TrainingView) -> Iterator[tuple[Family, float | None, tuple[str, ...]]]:
    """Yields the metric family, value and additional labels of each series of one allocation."""
    yield STEPS, float(training.steps), ()
    yield STEP, training.step_s, ()
    for phase, seconds in training.seconds.items():
        yield PHASES, seconds, (phase,)
    yield LATE, training.pace.late_share, ()


def describe_training(training: TrainingView | None) -> dict[str, Any] | None:
    """Returns the whole report as JSON, None without a report."""
    if training is None:
        return None
    pace = training.pace
    return {
        "steps": training.steps,
        "step_seconds": training.step_s,
        "rank": training.rank,
        "ranks_here": pace.ranks,
        "world_size": pace.world_size,
        "wait_ratio": pace.wait,
        "wait_is_of_gpu": pace.is_gpu,
        "waiting_rank": pace.waiting_rank,
        "phase_ratios": dict(pace.phases),
        "silent_seconds": pace.silent_s,
        "late": pace.late,
        "late_ratio": pace.late_share,
        "facts": dict(pace.facts),
        "contradiction": training.contradiction,
    }
