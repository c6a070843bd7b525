"""Which GPUs should be here: from the driver's list, the bus, and those that were seen before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import NamedTuple

from gpu_exporter.devices.pci import MANAGED, UNBOUND, PciFunction, list_functions, normalize
from gpu_exporter.ledger.expected import ExpectedDevice, ExpectedDevices
from gpu_exporter.model import DeviceIdentity

FELL_OFF = "seen here before, but no longer in the driver's list"


class Missing(NamedTuple):
    """A GPU that was seen before and is not found now. `away`: taken away on purpose, so not lost."""

    identity: DeviceIdentity
    reason: str
    away: bool


class Presence:
    """The bus and the list of expected GPUs together. One thread at a time."""

    def __init__(self, expected: ExpectedDevices, sysfs: Path | None) -> None:
        """`sysfs`: where to look for the bus, None for a backend that has none."""
        self._expected = expected
        self._sysfs = sysfs
        self._functions: tuple[PciFunction, ...] = ()

    def look(self) -> set[str]:
        """Read the bus and the list again. Returns the UUIDs that somebody had forgotten in between."""
        before = set(self._expected.devices)
        self._expected.load()
        self.look_at_bus()
        return before - set(self._expected.devices)

    def look_at_bus(self) -> None:
        self._functions = tuple(list_functions(self._sysfs) or ()) if self._sysfs is not None else ()

    def note(self, up: Iterable[DeviceIdentity]) -> None:
        """These GPUs answer. Raises OSError when the list cannot be kept."""
        changed = self._expected.note(
            ExpectedDevice(identity.uuid, normalize(identity.pci_bus_id), identity.index, identity.name)
            for identity in up
        )
        if changed:
            self._expected.save()

    def uuids(self) -> set[str]:
        return set(self._expected.devices)

    def given_away(self, address: str) -> str:
        """Why the GPU at this address is not ours to read, "" when it is.

        Without any driver is on purpose only while NVIDIA's has the others: else the driver itself is what is missing.
        """
        wanted = normalize(address)
        driver = next((function.driver for function in self._functions if function.address == wanted), MANAGED)
        if driver == MANAGED or (driver == UNBOUND and not self._bound()):
            return ""
        return "bound to no kernel driver" if driver == UNBOUND else f"bound to kernel driver {driver}"

    def _bound(self) -> set[str]:
        return {function.address for function in self._functions if function.driver == MANAGED}

    def missing(self, found: Collection[str], errors: dict[int, str], driver_error: str) -> list[Missing]:
        """Expected GPUs that are not among the UUIDs `found`. `errors`: by place in the driver's list, what its GPU
        answered instead of a name; those that explain a missing one are taken out.
        """
        entries: list[Missing] = []
        for device in self._expected.devices.values():
            if device.uuid in found:
                continue
            identity = DeviceIdentity(device.position, device.uuid, device.name, "", device.pci_bus_id, -1, "")
            away = self.given_away(device.pci_bus_id)
            reason = away or errors.pop(device.position, "") or driver_error or FELL_OFF
            entries.append(Missing(identity, reason, bool(away)))
        return entries

    def count(self, listed: Iterable[str | None]) -> int:
        """GPUs that should answer. `listed`: PCI addresses in the driver's list, None where a place has no name."""
        places = [None if address is None else normalize(address) for address in listed]
        known = {normalize(device.pci_bus_id) for device in self._expected.devices.values()}
        everything = known | self._bound() | {address for address in places if address is not None}
        present = {address for address in everything if not self.given_away(address)}
        return max(len(present), sum(a is None or not self.given_away(a) for a in places))

    def unmanaged(self) -> tuple[tuple[str, int], ...]:
        """How many GPUs other kernel drivers have."""
        others = Counter(function.driver for function in self._functions if function.driver != MANAGED)
        return tuple(sorted(others.items()))
