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
    "counter",
    "Steps that the training loop of the holder reports on this GPU, summed over its ranks here, since this exporter "
    "knows them. The job writes it (docs/torch.md): a claim, which makes no GPU used. Absent without a report "
    "(training.files)",
)
STEP = Family(
    STEP_METRIC,
    "gauge",
    STEP_HELP,
)
PHASES = Family(
    "gpu_training_phase_seconds_total",
    "counter",
    "Seconds of the measured steps by phase, as the training loop reports them, summed over its ranks on this GPU: "
    "step is the whole step, wait is waiting for data, the owner places the others. Their sum has no meaning",
    ("phase",),
)
LATE = Family(
    "gpu_training_rank_late_ratio",
    "gauge",
    "Share of a step for which the other ranks on this node wait for the slowest one, by the durations that they "
    "report; 0 if none is late. The same value on each GPU of the holder. Absent unless two ranks here can be compared",
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
