"""Remembers which unit each holder's number means, because a running holder keeps its GPUs even if the numbers
change.
"""

from __future__ import annotations

from collections.abc import Mapping

from gpu_exporter.agent.attribution.resolve import NumberKey
from gpu_exporter.common.model.units import UnitId

KEEP_S = 900.0  # how long a source may be silent while its holders keep their GPUs
MAX_NUMBERS = 1024  # a node has about ten GPUs, and one holder for each


class NumberMemory:
    """Maps (holder, number) to the unit and to the last time (monotonic seconds) when the number meant it. Not
    thread-safe.
    """

    def __init__(self) -> None:
        self._known: dict[NumberKey, tuple[UnitId, float]] = {}

    def units(self) -> dict[NumberKey, UnitId]:
        return {number: unit for number, (unit, _) in self._known.items()}

    def note(self, numbers: Mapping[NumberKey, UnitId], now: float) -> None:
        """Add the present numbers. Drop numbers that were last seen more than KEEP_S ago, and the oldest if there are
        more than MAX_NUMBERS.
        """
        self._known |= {number: (unit, now) for number, unit in numbers.items()}
        recent = {number: known for number, known in self._known.items() if now - known[1] <= KEEP_S}
        self._known = dict(sorted(recent.items(), key=lambda item: -item[1][1])[:MAX_NUMBERS])
