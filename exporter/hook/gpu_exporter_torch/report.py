"""The document that a process writes about its training (docs/torch.md)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpu_exporter_torch.facts import Fact
from gpu_exporter_torch.gpu_time import WAIT, GpuTimeline
from gpu_exporter_torch.phases import PhaseClock
from gpu_exporter_torch.ranks import Rank
from gpu_exporter_torch.report_rules import FORMAT
from gpu_exporter_torch.steps import StepCounter

NS = 1e9


def make_report(
    counter: StepCounter,
    gpu: GpuTimeline,
    phases: PhaseClock | None,
    rank: Rank,
    facts: Mapping[str, Fact],
    **other: Any,
) -> dict[str, Any]:
    """Makes the report document. Seconds are totals over the measured steps. An unknown value is None, never 0."""
    median_ns = counter.median_ns
    placed = () if phases is None else phases.placed
    return {
        "format": FORMAT,
        **other,
        "rank": rank.rank,
        "world_size": rank.world_size,
        "local_rank": rank.local_rank,
        "steps": counter.steps,
        "batches": counter.batches,
        "optimizer_steps": counter.optimizer_steps if counter.marked else None,
        "epochs": counter.epochs,
        "measured_steps": counter.measured,
        "skipped_steps": counter.skipped,
        "unfinished_batches": counter.unfinished,
        "step_seconds": counter.step_ns / NS,
        "wait_seconds": counter.wait_ns / NS,
        "start_seconds": counter.start_ns / NS,
        "median_step_seconds": None if median_ns is None else median_ns / NS,
        "gpu_wait_seconds": gpu.seconds.get(WAIT, 0.0) if gpu.is_known else None,
        "gpu_work_seconds": sum(gpu.seconds.values()) - gpu.seconds.get(WAIT, 0.0) if gpu.is_known else None,
        "phases": None
        if phases is None
        else {
            name: {
                "seconds": phases.spent_ns[name] / NS if name in placed else None,
                "gpu_seconds": gpu.seconds.get(name) if name in placed else None,
            }
            for name in phases.spent_ns
        },
        "facts": dict(facts),
    }
