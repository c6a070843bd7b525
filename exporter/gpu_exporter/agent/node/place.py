"""Decides which GPUs are shown, and with which status: answering, lost, away, hung or missing. Pure.

No other module decides this.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from gpu_exporter.agent.inventory.inventory import Inventory
from gpu_exporter.agent.sampling.driver import RELEASED_TEXT, DriverView
from gpu_exporter.common.model.readings import DeviceSnapshot
from gpu_exporter.common.model.units import NO_PLACE, TWIN, DeviceIdentity

HANGS = "its first call hangs in the driver"
NOT_READ = "the GPU was found, but not read yet"


class Placed(NamedTuple):
    """A GPU as it is shown. `hung`: a driver call has exceeded its deadline, so that the GPU's values are not shown.
    `links`: the most NVLinks that were up at the same time.
    """

    snapshot: DeviceSnapshot
    hung: bool = False
    links: int = 0


def position_key(index: int) -> str:
    """Returns the key of a GPU whose UUID is unknown."""
    return f"#{index}"


def address_key(address: str) -> str:
    """Returns the key of a GPU of which only the PCI address is known."""
    return f"@{address}"


def place(
    driver: DriverView, inventory: Inventory, known: Mapping[str, DeviceIdentity], monotonic: float, wall: float
) -> dict[str, Placed]:
    """Returns every GPU to show, ordered by NVML index. Keys: UUID, position_key or address_key.

    `known`: by UUID, identities of the GPUs that have answered since the start.
    """

    def silent(identity: DeviceIdentity, reason: str, away: bool = False) -> DeviceSnapshot:
        return DeviceSnapshot(identity, monotonic, wall, up=False, error=reason, away=away)

    links = {device.uuid: device.links for device in inventory.devices}

    def in_order(placed: Mapping[str, Placed]) -> dict[str, Placed]:
        def order(item: tuple[str, Placed]) -> tuple[bool, int]:
            index = item[1].snapshot.identity.index
            return index == NO_PLACE, index

        return {key: each._replace(links=links.get(key, 0)) for key, each in sorted(placed.items(), key=order)}

    if driver.released:  # includes GPUs that have just answered for the first time, and are not in the inventory yet
        here = {missing.identity.uuid: missing.identity for missing in inventory.missing((), {}, "")}
        here |= {uuid: identity for uuid, identity in known.items() if uuid not in inventory.forgotten}
        return in_order({uuid: Placed(silent(identity, RELEASED_TEXT, away=True)) for uuid, identity in here.items()})
    placed: dict[str, Placed] = {}
    errors: dict[int, str] = {}
    denied = _denied(driver)
    for index, (identity, snapshot, hung, error, _) in driver.positions.items():
        if index in denied:
            continue
        if identity is None:
            errors[index] = error or HANGS
        elif snapshot is None:
            if hung or driver.complete:
                placed[identity.uuid] = Placed(silent(identity, error or (HANGS if hung else NOT_READ)), hung)
        elif snapshot.up:
            placed[identity.uuid] = Placed(snapshot, hung)
        elif away := inventory.given_away(identity.pci_bus_id):
            placed[identity.uuid] = Placed(silent(identity, away, away=True))
        elif identity.uuid not in inventory.forgotten:
            placed[identity.uuid] = Placed(snapshot, hung)
    if driver.complete:
        named = [position.identity for position in driver.positions.values() if position.identity is not None]
        found, taken = {identity.uuid for identity in named}, {identity.index for identity in named}
        listed = [*_addresses(driver, inventory), *(None for _ in denied)]
        for missing in inventory.missing(found, errors, driver.error, listed, denied):
            identity = known.get(missing.identity.uuid, missing.identity)
            if any(uuid.startswith(f"{identity.uuid}{TWIN}") for uuid in found if identity.uuid):
                continue  # it was named so before a second GPU reported its UUID
            if identity.index in taken:  # another GPU has this index since the last boot
                identity = identity._replace(index=NO_PLACE)
            key = identity.uuid or address_key(identity.pci_bus_id)
            placed[key] = Placed(silent(identity, missing.reason, missing.away))
        for index, reason in errors.items():  # the driver lists a GPU here, but its identity is unknown
            placed[position_key(index)] = Placed(silent(unnamed(index), reason))
    return in_order(placed)


def unnamed(index: int) -> DeviceIdentity:
    """Returns the identity of an unknown GPU at a position of the driver's list."""
    return DeviceIdentity(index, "", "", "", "", -1, "")


def count_answering(driver: DriverView) -> int:
    return sum(position.answers for position in driver.positions.values())


def count_expected(driver: DriverView, inventory: Inventory) -> int:
    """Returns the number of GPUs that should answer, 0 while the driver is released on request."""
    if driver.released:
        return 0
    found = {position.identity.uuid for position in driver.positions.values() if position.identity is not None}
    return inventory.count(_addresses(driver, inventory), found, _denied(driver))


def _denied(driver: DriverView) -> list[int]:
    """Returns the positions of GPUs that this process has no permission to use, because they belong to others."""
    return [index for index, position in driver.positions.items() if position.denied]


def _addresses(driver: DriverView, inventory: Inventory) -> list[str | None]:
    """Returns the PCI address of each position in the driver's list, or None. Omits forgotten and denied GPUs."""
    identities = [position.identity for position in driver.positions.values() if not position.denied]
    return [
        None if identity is None else identity.pci_bus_id or None
        for identity in identities
        if identity is None or identity.uuid not in inventory.forgotten
    ]
