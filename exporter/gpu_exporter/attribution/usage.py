"""What the holders' own processes use of a unit, and do there, also where several holders share it.

A value of the device is never a holder's where others use it too. What NVML says of each process is: with the pid's
cgroup it has one owner, and an owner is one holder's or nobody's. Where a single process on the unit is not known to be
one holder's or another's (MPS, whose server works for all; a pid that cannot be looked up), nothing is said. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from gpu_exporter.attribution.contradict import relate
from gpu_exporter.attribution.processes import OwnedPeriod, Owners, UnitOwners, Use
from gpu_exporter.model.holders import Allocation, Holder, HolderKey
from gpu_exporter.model.readings import Split
from gpu_exporter.model.units import UnitId

Uses: TypeAlias = "Mapping[tuple[UnitId, HolderKey], Use]"


def measure(allocations: Iterable[Allocation], owners: Owners) -> dict[tuple[UnitId, HolderKey], Use]:
    """The use of each allocation for which it is known, none of one that is contradicted."""
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
    """None when some owner may be one holder or another."""
    uses = {holder.key: Use() for holder in holders}
    for owner, use in seen.uses.items():
        relations = [relate(holder, owner) for holder in holders]
        own = [holder for holder, relation in zip(holders, relations, strict=True) if relation == "own"]
        if len(own) > 1 or (not own and "unknown" in relations):
            return None
        for holder in own:
            uses[holder.key] = uses[holder.key].plus(use)
    return uses


ROUNDING = 0.01  # NVML's shares are whole percent
ROUNDING_MAX = 0.05  # of all processes together: what more of them hide may be a process that the driver leaves out
# The device's own utilization and the sum over its processes are taken by the driver at moments of its own.
SLACK = 0.05


def divide_period(period: OwnedPeriod, holders: Sequence[Holder]) -> Split:
    """What the processes of each holder did on the unit that they share. What is not one holder's is others'."""
    ratios: dict[HolderKey, float] = {}
    unclear: set[HolderKey] = set()
    others: float | None = None
    for owner, ratio in period.shares:
        own = [] if owner is None else [holder for holder in holders if relate(holder, owner) == "own"]
        if ratio is None:  # drivers list pids that do not exist, too
            unclear.update(holder.key for holder in own)
        elif len(own) == 1:
            ratios[own[0].key] = ratios.get(own[0].key, 0.0) + ratio
        else:
            others = (others or 0.0) + ratio
    told = sum(ratio is not None for _, ratio in period.shares)
    slack = SLACK + min(ROUNDING * told, ROUNDING_MAX)
    return Split(period.start, period.end, ratios, others, slack, period.problem, frozenset(unclear))
