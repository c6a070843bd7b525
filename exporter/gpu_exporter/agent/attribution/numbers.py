"""Remembers which GPU or MIG instance each device number of a job stands for.

A Slurm job's GPU is known by a number (its position). The numbers may change while the job runs, but the job keeps its
GPUs.
"""

from __future__ import annotations

from collections.abc import Mapping

from gpu_exporter.agent.attribution.resolve import NumberKey
from gpu_exporter.common.model.units import UnitId

KEEP_S = 900.0  # how long a source may be silent while its holders keep their GPUs
MAX_NUMBERS = 1024  # a node has about ten GPUs, and one holder for each


class NumberMemory:
    """Maps (holder, number) to a unit and to the time when this was last seen (monotonic seconds). Not thread-safe."""

    def __init__(self) -> None:
        self._known: dict[NumberKey, tuple[UnitId, float]] = {}

    def units(self) -> dict[NumberKey, UnitId]:
        return {number: unit for number, (unit, _) in self._known.items()}

    def note(self, numbers: Mapping[NumberKey, UnitId], now: float) -> None:
        """Add the present numbers, and drop old ones: last seen more than KEEP_S ago, or beyond MAX_NUMBERS."""
        self._known |= {number: (unit, now) for number, unit in numbers.items()}
        recent = {number: known for number, known in self._known.items() if now - known[1] <= KEEP_S}
        self._known = dict(sorted(recent.items(), key=lambda item: -item[1][1])[:MAX_NUMBERS])
