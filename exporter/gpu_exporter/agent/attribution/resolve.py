"""Resolves each grant (a source's report that a holder has a device) to a unit of this node.

If two sources disagree, the source with the higher precedence counts, and the exporter counts a conflict. Nothing is
guessed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from types import MappingProxyType
from typing import NamedTuple

from gpu_exporter.common.model.holders import Allocation, Grant, HolderKey
from gpu_exporter.common.model.readings import DeviceSnapshot, InstanceReading
from gpu_exporter.common.model.units import UnitId
from gpu_exporter.common.outside import need_wholes, whole
from gpu_exporter.common.shares import board_share, count_slices

NOT_IN_NAMES = re.compile(r"[^0-9a-z]")  # the profile 2g.47gb is 2g47gb in a device's name
NumberKey = tuple[HolderKey, str]


class Resolution(NamedTuple):
    """The result of `resolve`.

    - `allocations`: in the order of the grants.
    - `unresolved`: grants of a device that does not answer on this node, each with the reason.
    - `conflicts`: grants that contradict another source.
    - `numbers`: the unit that each holder's device number means, for the next poll.
    - `ended`: units of holders that have ended, each with the grant.
    - `doubted`: grants from claims that may only watch their device, each with the reason.
    - `reserved`: units that a scheduler reserves for pods with fractions, each with the grants of the reservation pods.
    - `missed`: grants of holders that ended since the last poll and lack their time or a part of it: their device does
      not answer, other holders have this time, or nothing proves that it was not counted.
    """

    allocations: list[tuple[Allocation, Grant]]
    unresolved: list[tuple[Grant, str]]
    conflicts: list[Grant]
    numbers: Mapping[NumberKey, UnitId] = MappingProxyType({})
    ended: Mapping[UnitId, Grant] = MappingProxyType({})
    doubted: Sequence[tuple[Grant, str]] = ()
    reserved: Mapping[UnitId, Sequence[Grant]] = MappingProxyType({})
    missed: Sequence[Grant] = ()


def resolve(
    grants: Sequence[Grant],
    snapshots: Iterable[DeviceSnapshot],
    *,
    incomplete: str = "",
    numbers: Mapping[NumberKey, UnitId] = MappingProxyType({}),
) -> Resolution:
    """Turns grants into allocations of the devices that answer. A holder that has ended, or only reserves its device,
    holds nothing.

    - Two sources grant one unit to different holders: the first source's holder is contradicted, and the other grant is
      a conflict.
    - Two holders of one source share the unit. Exception: if one of them has the unit through a resource claim that the
      other lacks, one of the claims only watches. Then all claims that may only watch are contradicted.
    - `incomplete`: why NVML and the schedulers may number the GPUs differently, "" if all expected GPUs are here.
      Unless it is "", positions are not resolved.
    - `numbers`: the unit that each holder's number meant before. A running holder keeps this unit while its number
      means no device. If the number now means another device, neither unit is used.
    """
    finder = _Finder(
        snapshots, incomplete, {grant.device for grant in grants if grant.kind == "placement" and not grant.ended}
    )
    found = _GrantsByUnit()
    for grant in grants:
        if not grant.ended:
            found.assign(grant, finder.find(grant), numbers)
        elif (left := finder.find(grant)[0]) is not None:
            found.ended[left] = grant
    doubts = _doubt_claims(found.units)
    allocations = [pair for unit in found.units for pair in found.allocate(unit, finder, doubts)]
    doubted = [
        (each.grant, doubts[each.grant.claim])
        for several in found.units.values()
        for each in several
        if each.grant.claim in doubts
    ]
    return Resolution(allocations, found.unresolved, found.conflicts, found.kept, found.ended, doubted, found.reserved)


class _Assigned(NamedTuple):
    """A grant that was resolved to a unit.

    `replica`: the replica number, if a device plugin shares the device. `basis`: how the unit was
    found, as text.
    """

    grant: Grant
    replica: str
    basis: str


class _GrantsByUnit:
    """The grants of each unit. `kept`: the unit of each (holder, device number), which stays while the holder runs."""

    def __init__(self) -> None:
        self.units: dict[UnitId, list[_Assigned]] = {}
        self.unresolved: list[tuple[Grant, str]] = []
        self.conflicts: list[Grant] = []
        self.kept: dict[NumberKey, UnitId] = {}
        self.ended: dict[UnitId, Grant] = {}
        self.reserved: dict[UnitId, list[Grant]] = {}
        self._contradicted: dict[UnitId, Grant] = {}

    def assign(self, grant: Grant, found: tuple[UnitId | None, str, str], numbers: Mapping[NumberKey, UnitId]) -> None:
        """Stores a grant under its unit, if a unit was found.

        `found`: the unit, the replica number, and why no unit was found ("" with a unit). `numbers`: as in `resolve`.
        """
        number = (grant.holder.key, grant.number)
        is_kept = bool(grant.number) and not grant.holder.identity  # a name alone may belong to another holder by now
        before = numbers.get(number) if is_kept else None
        unit, replica, reason = found
        basis = _describe_basis(grant)
        if unit is None and before is not None:
            unit, basis = before, f"{grant.number}, which named this GPU when the holder began"
        elif unit is None:
            self.unresolved.append((grant, reason))
            return
        elif before is not None and unit != before:
            self.kept[number] = before  # neither unit counts while the holder runs
            reason = f"this index named {before.uuid} when the holder began, and names {unit.uuid} now"
            self.unresolved.append((grant, reason))
            self.conflicts.append(grant)
            return
        if is_kept:
            self.kept[number] = unit
        if grant.reserves:
            self.reserved.setdefault(unit, []).append(grant)
            return
        others = self.units.setdefault(unit, [])
        if others and others[0].grant.holder.source != grant.holder.source:
            if others[0].grant.holder.names.isdisjoint(grant.holder.names):
                self.conflicts.append(grant)
                self._contradicted.setdefault(unit, grant)
        elif all(other.grant.holder.key != grant.holder.key for other in others):
            others.append(_Assigned(grant, replica, basis))

    def allocate(self, unit: UnitId, finder: _Finder, doubts: Mapping[str, str]) -> Iterator[tuple[Allocation, Grant]]:
        """Yields the allocations of one unit. `doubts`: claims that may only watch a device, each with the reason."""
        several = self.units[unit]
        # If another holder is certain, a doubted claim only watches, and has no part of this unit.
        certain = [each for each in several if not each.grant.claim or each.grant.claim not in doubts]
        holders = certain or several
        slices, whole = finder.slices.get(unit.mig_uuid, (1.0, 1.0))
        ratio = board_share(slices, whole, len(holders))
        for grant, replica, basis in holders:
            share = "mig" if unit.mig_uuid else "none"
            doubt = doubts.get(grant.claim, "") if grant.claim else ""
            if grant.share or replica or unit in self.reserved or (len(holders) > 1 and not doubt):
                share = grant.share or "time_slice"
            if other := self._contradicted.get(unit):
                doubt = ", ".join(f"{each.holder.source} reports {each.holder.label}" for each in (grant, other))
            allocation = Allocation(
                unit,
                grant.holder,
                share,
                ratio,
                grant.running,
                grant.why,
                grant.obstacle,
                grant.working_wall,
                basis=f"{basis} ({grant.witnesses})" if grant.witnesses else basis,
            )
            yield (allocation._replace(contradiction=doubt) if doubt else allocation), grant


def _doubt_claims(units: Mapping[UnitId, Sequence[_Assigned]]) -> dict[str, str]:
    """Returns the claims that may only watch their devices, each with the reason as a text.

    A claim is doubted if another holder has one of its devices without this claim. The doubt applies to all devices of
    the claim.
    """
    doubts: dict[str, str] = {}
    for holders in units.values():
        for grant, _, _ in holders:
            rival = next((other for other, _, _ in holders if other.claim != grant.claim or not other.claim), None)
            if not grant.claim or grant.share or rival is None or grant.claim in doubts:
                continue
            which = "one of the two claims" if rival.claim and not rival.share else "this claim"
            doubts[grant.claim] = (
                f"{rival.holder.label} has the same GPU as claim {grant.claim}, so {which} may only watch it "
                "(adminAccess): name the pods that watch with --attribution.monitor"
            )
    return doubts


def find_offered(
    offers: Sequence[Grant], snapshots: Iterable[DeviceSnapshot], incomplete: str = ""
) -> frozenset[UnitId] | None:
    """Returns the units that a scheduler may allocate. Returns None if an offer cannot be resolved: it may mean any
    unit, so no unit is certainly free. `incomplete`: why NVML and the schedulers may number the GPUs differently, "" if
    the numbers agree.
    """
    finder = _Finder(snapshots, incomplete, set())
    units = [finder.find(offer)[0] for offer in offers]
    return frozenset(unit for unit in units if unit is not None) if None not in units else None


def _placed(instances: Sequence[InstanceReading], profile: str, profile_id: str, start: str) -> list[InstanceReading]:
    """Returns the MIG instances that match a device name from dynamic resource allocation (DRA).

    An instance matches by profile id and first slice. If the driver does not report these (it may lack the permission),
    the instance matches by its profile's name.
    """
    placement = need_wholes((profile_id, start))
    exact = [instance for instance in instances if instance.placement == placement]
    if exact:
        return exact
    return [i for i in instances if i.placement is None and NOT_IN_NAMES.sub("", i.profile) == profile.replace("-", "")]


def _describe_basis(grant: Grant) -> str:
    """Describes how the unit was found from the device name that the source reported."""
    name = f"{grant.number}: " if grant.number and grant.number != grant.device else ""
    device = grant.device.partition("::")[0]
    if grant.kind == "minor":
        return f"{name}device file {device}"
    if grant.kind in ("instance", "placement"):
        return f"{name}MIG instance of device file {device.partition('/')[0]}"
    return f"{name}position {device} of the driver's list" if grant.kind == "index" else f"{name}UUID"


class _Finder:
    """Looks up devices by the names that the sources use."""

    def __init__(self, snapshots: Iterable[DeviceSnapshot], incomplete: str, placements: Set[str]) -> None:
        """`placements`: every placement that the grants ask for."""
        # number of placements for each board and profile
        self._wanted = Counter(tuple(placement.split("/")[:2]) for placement in placements)
        self._by_uuid: dict[str, UnitId] = {}
        self._by_minor: dict[str, UnitId] = {}
        self._instances_of: dict[str, Sequence[InstanceReading]] = {}  # by minor number
        self._incomplete = incomplete
        self.slices: dict[str, tuple[float, float]] = {}  # by MIG UUID: slices of the instance, and of the board
        known = list(snapshots)
        # With MIG on, a number may mean an instance, or be shifted by one, so numbers are not resolved.
        self._has_mig = any(snapshot.identity.mig_mode == "enabled" for snapshot in known)
        # The newest snapshot comes last: if two GPUs had one position in the driver's list, the GPU that has it now
        # counts.
        places = {snapshot.identity.index: snapshot for snapshot in known}
        self._order = [places[index].identity for index in sorted(places)]
        for snapshot in known:
            identity = snapshot.identity
            unit = UnitId(identity.uuid)
            self._by_uuid[identity.uuid] = unit
            if identity.mig_mode != "enabled" and identity.minor >= 0:
                self._by_minor[str(identity.minor)] = unit
            if identity.minor >= 0:
                self._instances_of[str(identity.minor)] = snapshot.instances
            whole = count_slices(identity.mig_slices, (instance.sm_slices for instance in snapshot.instances))
            for instance in snapshot.instances:
                mig_unit = UnitId(identity.uuid, instance.uuid)
                self._by_uuid[instance.uuid] = mig_unit
                self._by_uuid[f"MIG-{identity.uuid}/{instance.mig}"] = mig_unit  # drivers before R470
                self.slices[instance.uuid] = (instance.sm_slices, whole)

    def find(self, grant: Grant) -> tuple[UnitId | None, str, str]:
        """Returns the unit, the replica number in the device id or "", and why no unit was found ("" with a unit)."""
        device, _, replica = grant.device.partition("::")
        if grant.kind == "uuid":
            return self._by_uuid.get(device), replica, f"{device} does not answer here"
        if grant.kind == "minor":
            return self._by_minor.get(device), replica, f"no whole GPU here has the device file number {device}"
        if grant.kind == "unproven":
            return None, replica, grant.reason
        if grant.kind in ("instance", "placement"):
            unit, reason = self._instance(grant.kind, device)
            return unit, replica, reason
        unit, reason = self._at(grant, device)
        return unit, replica, reason

    def _instance(self, kind: str, device: str) -> tuple[UnitId | None, str]:
        """Returns the MIG instance that `device` names. None with a reason unless exactly one instance matches."""
        minor, *which = device.split("/")
        listed = self._instances_of.get(minor, ())
        if kind == "instance":
            named = "/".join(which)
            matching = [i for i in listed if named in (i.mig, i.mig.partition("/")[0])]
        else:
            matching = _placed(listed, *which)
            if matching and matching[0].placement is None and self._wanted[minor, which[0]] > 1:
                matching = [*matching, *matching]  # the only existing instance may belong to another claim
        if len(matching) == 1:
            return self._by_uuid[matching[0].uuid], ""
        many, match = ("several MIG instances", "match") if matching else ("no MIG instance", "matches")
        return None, f"{many} {match} {'-'.join(which)} on the GPU with device file number {minor}"

    def _at(self, grant: Grant, device: str) -> tuple[UnitId | None, str]:
        """Returns the GPU at a position in NVML's list. None with a reason unless the scheduler provably uses the same
        order.
        """
        if self._has_mig:
            return None, "a position names no GPU while a GPU of this node is in MIG mode"
        if self._incomplete:
            return None, f"positions may have changed: {self._incomplete}"
        order = [identity for identity in self._order if not grant.among or str(identity.minor) in grant.among]
        if grant.total and len(order) != grant.total:
            return (
                None,
                (
                    f"a position may name another GPU: NVML lists {len(order)} GPUs, but the scheduler counts "
                    f"{grant.total}"
                ),
            )
        if not grant.among and [identity.index for identity in order] != list(range(len(order))):
            return None, "a position may name another GPU: NVML's list has gaps"
        position = whole(device)
        if position is None or position >= len(order):
            return None, f"there is no GPU at position {device}"
        return UnitId(order[position].uuid), ""
