"""Where the numbers of holders led: a running holder keeps its GPUs, whatever happens to the numbers."""

from __future__ import annotations

from collections.abc import Mapping

from gpu_exporter.attribution.resolve import NumberKey
from gpu_exporter.model.units import UnitId

KEEP_S = 900.0  # a source may be silent this long and its holders still keep their GPUs
MAX_NUMBERS = 1024  # a node has some ten GPUs, and a holder each


class NumberMemory:
    """By (holder, number): the unit, and when the number last led there in monotonic seconds. Not thread-safe."""

    def __init__(self) -> None:
        self._known: dict[NumberKey, tuple[UnitId, float]] = {}

    def units(self) -> dict[NumberKey, UnitId]:
        return {number: unit for number, (unit, _) in self._known.items()}

    def note(self, numbers: Mapping[NumberKey, UnitId], now: float) -> None:
        """These lead somewhere now; what has not for KEEP_S is dropped, and of too many the oldest."""
        self._known |= {number: (unit, now) for number, unit in numbers.items()}
        recent = {number: known for number, known in self._known.items() if now - known[1] <= KEEP_S}
        self._known = dict(sorted(recent.items(), key=lambda item: -item[1][1])[:MAX_NUMBERS])
