"""Remembers the GPU or MIG instance of each GPU number of a job.

Slurm reports a job's GPU as a number (its position). The meaning of a number may change while the job runs, but the job
keeps its GPUs.
"""

from __future__ import annotations

from collections.abc import Mapping

from gpu_exporter.agent.attribution.resolve import NumberKey
from gpu_exporter.common.model.units import UnitId

KEEP_S = 900.0  # holders keep their GPUs if their source does not answer for up to this time
MAX_NUMBERS = 1024  # a node has about ten GPUs, and one holder for each


class NumberMemory:
    """Maps (holder, number) to a unit and to the time of its last report (monotonic seconds). Not thread-safe."""

    def __init__(self) -> None:
        self._known: dict[NumberKey, tuple[UnitId, float]] = {}

    def units(self) -> dict[NumberKey, UnitId]:
        return {number: unit for number, (unit, _) in self._known.items()}

    def note(self, numbers: Mapping[NumberKey, UnitId], now: float) -> None:
        """Adds the present numbers. Drops those without a report for KEEP_S, and above MAX_NUMBERS the oldest."""
        self._known |= {number: (unit, now) for number, unit in numbers.items()}
        recent = {number: known for number, known in self._known.items() if now - known[1] <= KEEP_S}
        self._known = dict(sorted(recent.items(), key=lambda item: -item[1][1])[:MAX_NUMBERS])
