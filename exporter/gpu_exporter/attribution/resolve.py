"""From claims to units: one order of precedence, conflicts counted, nothing guessed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from gpu_exporter.model import Allocation, Claim, DeviceSnapshot, UnitId
from gpu_exporter.shares import board_share, count_slices


class Resolution(NamedTuple):
    """`allocations` in the order of the claims; `unresolved` claims name no device that answers here."""

    allocations: list[tuple[Allocation, Claim]]
    unresolved: list[Claim]
    conflicts: list[Claim]


def resolve(claims: Sequence[Claim], snapshots: Iterable[DeviceSnapshot]) -> Resolution:
    """Turn claims into allocations of the devices that answer.

    Two sources that claim the same unit for different holders contradict each other: the first source in order wins,
    the other claim is a conflict. Two holders of one source share the unit.
    """
    finder = _Finder(snapshots)
    units: dict[UnitId, list[tuple[Claim, str]]] = {}
    unresolved: list[Claim] = []
    conflicts: list[Claim] = []
    for claim in claims:
        unit, replica = finder.find(claim)
        if unit is None:
            unresolved.append(claim)
            continue
        others = units.setdefault(unit, [])
        if others and others[0][0].holder.source != claim.holder.source:
            if others[0][0].holder.label != claim.holder.label:
                conflicts.append(claim)
        elif all(other.holder.key != claim.holder.key for other, _ in others):
            others.append((claim, replica))
    allocations: list[tuple[Allocation, Claim]] = []
    for unit, holders in units.items():
        slices, whole = finder.slices.get(unit.mig_uuid, (1.0, 1.0))
        for claim, replica in holders:
            share = "mig" if unit.mig_uuid else "none"
            if replica or len(holders) > 1:
                share = "time_slice"
            ratio = board_share(slices, whole, len(holders))
            allocations.append((Allocation(unit, claim.holder, share, ratio, claim.running), claim))
    return Resolution(allocations, unresolved, conflicts)


class _Finder:
    """Looks devices up by what the sources call them."""

    def __init__(self, snapshots: Iterable[DeviceSnapshot]) -> None:
        self._by_uuid: dict[str, UnitId] = {}
        self._by_minor: dict[str, UnitId] = {}
        self._by_index: dict[str, UnitId] = {}
        self.slices: dict[str, tuple[float, float]] = {}  # by MIG UUID: the instance's, and the board's
        known = list(snapshots)
        # With MIG on, a number may mean an instance, or be shifted by one: guessing is not allowed.
        has_mig = any(snapshot.identity.mig_mode == "enabled" for snapshot in known)
        for snapshot in known:
            identity = snapshot.identity
            unit = UnitId(identity.uuid)
            self._by_uuid[identity.uuid] = unit
            if identity.mig_mode != "enabled":
                self._by_minor[str(identity.minor)] = unit
            if not has_mig:
                self._by_index[str(identity.index)] = unit
            whole = count_slices(identity.mig_slices, (instance.sm_slices for instance in snapshot.instances))
            for instance in snapshot.instances:
                mig_unit = UnitId(identity.uuid, instance.uuid)
                self._by_uuid[instance.uuid] = mig_unit
                self._by_uuid[f"MIG-{identity.uuid}/{instance.mig}"] = mig_unit  # drivers before R470
                self.slices[instance.uuid] = (instance.sm_slices, whole)

    def find(self, claim: Claim) -> tuple[UnitId | None, str]:
        """The unit, and the replica number when the device id names one."""
        device, _, replica = claim.device.partition("::")
        table = {"uuid": self._by_uuid, "minor": self._by_minor, "index": self._by_index}[claim.kind]
        return table.get(device), replica
