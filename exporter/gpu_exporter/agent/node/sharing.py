"""Knows which units several holders share, and keeps the work of each process there since the last poll.

Not thread-safe: NodeState protects it with its lock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from gpu_exporter.agent.attribution.processes import OwnedPeriod
from gpu_exporter.agent.attribution.usage import divide_period
from gpu_exporter.common.model.holders import Allocation, Holder
from gpu_exporter.common.model.readings import Split
from gpu_exporter.common.model.units import UnitId

PERIODS_MAX = 300  # of one GPU between two polls; there are more only if a poll hangs for five minutes
NO_SOURCE = "per-holder usage is unavailable on MIG instances"
NOT_ASKED = "the holders share the GPU, and per-holder usage is not known yet"
OTHERS = "a process on the shared GPU belongs to no holder, or its owner cannot be looked up"
REST = "the shared GPU does more work than the listed processes of its holders"


class Sharing:
    """The shared units of one node. `gpus`: UUIDs of shared whole GPUs.

    `doubts`: by shared unit, why the work of each holder may be unknown.
    """

    def __init__(self) -> None:
        self.gpus: frozenset[str] = frozenset()
        self.doubts: Mapping[UnitId, str] = {}
        self._counts: Mapping[UnitId, int] = {}
        self._periods: dict[UnitId, list[OwnedPeriod]] = {}

    def note(self, unit: UnitId, period: OwnedPeriod) -> None:
        """Keeps the work of processes on a unit until the next poll shows the unit's holders."""
        waiting = self._periods.setdefault(unit, [])
        waiting.append(period)
        del waiting[:-PERIODS_MAX]

    def count_holders(self, unit: UnitId) -> int:
        """Returns the number of holders that share this unit, 1 if it is not shared."""
        return self._counts.get(unit, 1)

    def divide(self, allocations: Iterable[Allocation]) -> Iterator[tuple[UnitId, Split]]:
        """Divides the work of processes since the last poll among the present holders. Yields it by unit."""
        shared: dict[UnitId, list[Holder]] = {}
        for allocation in allocations:
            if allocation.is_shared:
                shared.setdefault(allocation.unit, []).append(allocation.holder)
        self._counts = {unit: len(holders) for unit, holders in shared.items()}
        self.gpus = frozenset(unit.uuid for unit in shared if not unit.mig_uuid)
        periods, self._periods = self._periods, {}
        doubts = {unit: NO_SOURCE if unit.mig_uuid else NOT_ASKED for unit in shared}
        for unit, holders in shared.items():
            for period in periods.get(unit, ()):
                split = divide_period(period, holders)
                doubts[unit] = split.problem or (REST if split.others is None else OTHERS)
                yield unit, split
        self.doubts = doubts
