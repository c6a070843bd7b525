"""Measures the memory and activity of each holder's own processes, also if several holders share a unit.

On a shared device, no holder gets a value of the whole device. Values that NVML reports by process can be divided,
because the process's cgroup shows its owner. If the holder of any process on the unit is unknown, no value is reported
(e.g. a pid without an owner, or an MPS server, which works for all holders). Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from gpu_exporter.agent.attribution.contradict import relate
from gpu_exporter.agent.attribution.processes import OwnedPeriod, Owners, UnitOwners
from gpu_exporter.common.model.holders import Allocation, Holder, HolderKey, Use
from gpu_exporter.common.model.readings import Split
from gpu_exporter.common.model.units import UnitId

Uses: TypeAlias = "Mapping[tuple[UnitId, HolderKey], Use]"


def measure(allocations: Iterable[Allocation], owners: Owners) -> dict[tuple[UnitId, HolderKey], Use]:
    """Returns the use of each allocation, where it is known. Omits units with a contradicted allocation."""
    holders: dict[UnitId, list[Allocation]] = {}
    for allocation in allocations:
        holders.setdefault(allocation.unit, []).append(allocation)
    found: dict[tuple[UnitId, HolderKey], Use] = {}
    for unit, several in holders.items():
        seen = owners.get(unit)
        if seen is None or not seen.is_complete or any(allocation.contradiction for allocation in several):
            continue
        if (uses := _divide(seen, [allocation.holder for allocation in several])) is not None:
            found.update(((unit, key), use) for key, use in uses.items())
    return found


def _divide(seen: UnitOwners, holders: list[Holder]) -> dict[HolderKey, Use] | None:
    """Returns the use of each holder on a unit, None if an owner may belong to several holders."""
    uses = {holder.key: Use() for holder in holders}
    for owner, use in seen.uses.items():
        relations = [relate(holder, owner) for holder in holders]
        own = [holder for holder, relation in zip(holders, relations, strict=True) if relation == "own"]
        if len(own) > 1 or (not own and "unknown" in relations):
            return None
        for holder in own:
            uses[holder.key] = uses[holder.key].plus(use)
    return uses


ROUNDING = 0.01  # NVML's shares are in whole percent
ROUNDING_MAX = 0.05  # for all processes together: a larger difference may be a process that the driver omits
# The driver takes the device's utilization and the sum over its processes at different moments.
SLACK = 0.05


def divide_period(period: OwnedPeriod, holders: Sequence[Holder]) -> Split:
    """Divides the work on a shared unit among its holders. Work of no single holder counts as `others`."""
    ratios: dict[HolderKey, float] = {}
    unclear: set[HolderKey] = set()
    others: float | None = None
    for owner, ratio in period.shares:
        own = [] if owner is None else [holder for holder in holders if relate(holder, owner) == "own"]
        if ratio is None:  # drivers also list pids that do not exist
            unclear.update(holder.key for holder in own)
        elif len(own) == 1:
            ratios[own[0].key] = ratios.get(own[0].key, 0.0) + ratio
        else:
            others = (others or 0.0) + ratio
    told = sum(ratio is not None for _, ratio in period.shares)
    slack = SLACK + min(ROUNDING * told, ROUNDING_MAX)
    return Split(period.start, period.end, ratios, others, slack, period.problem, frozenset(unclear))
