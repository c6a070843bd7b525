"""Turns the answers of all sources at one poll into the holders of every unit. The steps, in order:

1. Removes pods that have ended, and pods that run slurmd (kubelet/ended.py, slurm/pods.py).
2. Turns each grant (a source's report that a holder has a device) into an allocation of a unit, or keeps it as
   unresolved (resolve.py).
3. Marks an allocation if the processes on the unit contradict it (contradict.py).
4. Adds a holder for each program that uses a unit without an allocation (users.py).
5. Measures the use of each unit by its holder's processes (usage.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from gpu_exporter.agent.attribution.contradict import ProcessNet
from gpu_exporter.agent.attribution.kubelet.ended import EndedPods
from gpu_exporter.agent.attribution.numbers import NumberMemory
from gpu_exporter.agent.attribution.processes import Owners, ProcessOwners
from gpu_exporter.agent.attribution.resolve import NumberKey, Resolution, find_offered, resolve
from gpu_exporter.agent.attribution.slurm.pods import SlurmPods
from gpu_exporter.agent.attribution.usage import Uses, measure
from gpu_exporter.agent.attribution.users import Users, describe_reserved, describe_unplaced
from gpu_exporter.common.model.holders import Allocation, Grant
from gpu_exporter.common.model.readings import DeviceSnapshot
from gpu_exporter.common.model.units import UnitId


class Poll(NamedTuple):
    """The answers of all sources at one poll.

    - `offers`: the devices that a scheduler may allocate, None if unknown.
    - `ended`: grants of holders that have ended since the last poll; `confirmed` is the time of the end.
    - `is_complete`: every source has answered recently.
    """

    grants: Sequence[Grant]
    offers: Sequence[Grant] | None = None
    ended: Sequence[Grant] = ()
    is_complete: bool = True


class Devices(NamedTuple):
    """The answers of the driver.

    - `answered`: the last snapshot of every GPU that answered, by UUID.
    - `incomplete`: why NVML and the schedulers may number the GPUs differently, "" if the numbers agree.
    - `lists_processes`: the driver has listed a process since the exporter started, so that an empty list means no
      process.
    """

    answered: Mapping[str, DeviceSnapshot]
    incomplete: str
    lists_processes: bool


class HolderUpdate(NamedTuple):
    """The holders after one poll.

    - `past`: allocations of holders that have ended since the last poll.
    - `in_use`: units that have no holder but are not free, with the reason.
    - `offered`: units that a scheduler may allocate, None if unknown.
    - `uses`: the use of each unit by the processes of its holder.
    """

    resolution: Resolution = Resolution([], [], [])
    past: Sequence[tuple[Allocation, Grant]] = ()
    in_use: Mapping[UnitId, str] = MappingProxyType({})
    offered: frozenset[UnitId] | None = None
    uses: Uses = MappingProxyType({})


class HolderTracker:
    """Keeps the data about holders from one poll to the next. Not thread-safe."""

    def __init__(self, processes: ProcessOwners | None, slurm_pods: SlurmPods) -> None:
        """`processes`: looks up the owners of the processes on each GPU, None if owners are unknown."""
        self._ended = EndedPods(processes.list_pods) if processes is not None else None
        self._slurm_pods = slurm_pods
        self._numbers = NumberMemory()
        self._net = ProcessNet()
        self._users = Users(processes.name_pod) if processes is not None else None

    def restore(self, numbers: Mapping[NumberKey, UnitId], now: float) -> None:
        """Takes over the device numbers (numbers.py) from before a restart. `now`: monotonic seconds."""
        self._numbers.note(numbers, now)

    def numbers(self) -> dict[NumberKey, UnitId]:
        """Returns the unit that each holder's device number means."""
        return self._numbers.units()

    def update(self, poll: Poll, devices: Devices, owners: Owners, now: float) -> HolderUpdate:
        """Returns the holders after this poll. `owners`: owners of processes, by unit. `now`: monotonic seconds."""
        grants = poll.grants
        if self._ended is not None:
            grants = self._ended.apply(grants, owners, now)
        grants, owners = self._slurm_pods.apply(grants, owners)
        # The newest snapshot comes last: if the driver renumbered its list, an index means the GPU that has it now.
        inventory = sorted(devices.answered.values(), key=lambda snapshot: snapshot.monotonic)
        incomplete = devices.incomplete
        resolution = resolve(grants, inventory, incomplete=incomplete, numbers=self._numbers.units())
        numbers = self._numbers.units()
        past: list[tuple[Allocation, Grant]] = []
        missed: list[Grant] = []
        for grant in poll.ended:  # each alone: holders that followed each other did not share a GPU
            found = resolve([grant], inventory, incomplete=incomplete, numbers=numbers).allocations
            past += found
            missed += [] if found else [grant]
        resolution = resolution._replace(missed=missed)
        self._numbers.note(resolution.numbers, now)
        left = _list_left(resolution, devices)
        names = {unit: tuple(found.uses) for unit, found in owners.items()}
        places = _places(inventory)
        resolution = self._net.check(resolution, names, places)
        if self._users is not None:
            users = self._users.find(resolution, owners, now, pods=poll.is_complete)
            resolution = resolution._replace(allocations=[*resolution.allocations, *users])
        uses = measure((allocation for allocation, _ in resolution.allocations), owners)
        return HolderUpdate(
            resolution,
            past,
            describe_unplaced(resolution.unresolved, places)
            | left
            | self._net.in_use
            | describe_reserved(resolution.reserved),
            None if poll.offers is None else find_offered(poll.offers, inventory, incomplete),
            uses if devices.lists_processes else {},
        )


def _list_left(resolution: Resolution, devices: Devices) -> dict[UnitId, str]:
    """Returns units that are not free although their holder has ended, each with the reason.

    Such a unit becomes free when the driver lists no process on it. If another pod possibly holds it, it stays on this
    list.
    """
    held = {allocation.unit for allocation, _ in resolution.allocations}
    left: dict[UnitId, str] = {}
    for unit, grant in resolution.ended.items():
        snapshot = devices.answered[unit.uuid]
        there = _count_on(unit, snapshot)
        if unit in held or (there == 0 and devices.lists_processes and not grant.why):
            continue
        which = "lists processes on the GPU" if there else "does not list the GPU's processes"
        left[unit] = f"{grant.holder.label} has ended, but {grant.why or f'the driver {which}'}"
    return left


def _count_on(unit: UnitId, snapshot: DeviceSnapshot) -> int | None:
    """Returns the number of processes that the driver lists on a unit, None if unknown."""
    if unit.mig_uuid and not snapshot.instances_known:
        return None  # the processes of an unlisted instance were not read
    if snapshot.processes is None:
        count = snapshot.facts.contexts
        return None if count is None else math.floor(count)
    places = {"", *(each.mig for each in snapshot.instances if each.uuid == unit.mig_uuid)}
    return sum(not unit.mig_uuid or process.mig in places for process in snapshot.processes.processes)


def _places(inventory: Sequence[DeviceSnapshot]) -> dict[UnitId, str]:
    """Returns every unit that a holder may have, with its name for messages: `gpu 3`, `gpu 3:1/0`."""
    places: dict[UnitId, str] = {}
    for snapshot in inventory:
        identity = snapshot.identity
        places[UnitId(identity.uuid)] = f"gpu {identity.index}"
        places |= {UnitId(identity.uuid, i.uuid): f"gpu {identity.index}:{i.mig}" for i in snapshot.instances}
    return places
