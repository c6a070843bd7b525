"""The list of expected GPUs and the bus together, as one immutable value, and who keeps it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import NamedTuple

from gpu_exporter.inventory.expected import ExpectedDevice, ExpectedDevices
from gpu_exporter.inventory.pci import UNBOUND, PciFunction, list_functions
from gpu_exporter.model import DeviceIdentity, normalize_pci
from gpu_exporter.vendor import NVIDIA, Vendor

FELL_OFF = "seen here before, but no longer in the driver's list"


class Missing(NamedTuple):
    """A GPU that was seen before and is not found now. `away`: taken away on purpose, so not lost."""

    identity: DeviceIdentity
    reason: str
    away: bool


class Inventory(NamedTuple):
    """`forgotten`: UUIDs that an administrator took out while their GPUs did not answer.

    `managed`: the kernel driver that has those GPUs of `functions` that are ours to read.
    """

    devices: tuple[ExpectedDevice, ...] = ()
    functions: tuple[PciFunction, ...] = ()
    forgotten: frozenset[str] = frozenset()
    managed: str = NVIDIA.kernel_driver

    def given_away(self, address: str) -> str:
        """Why the GPU at this address is not ours to read, "" when it is.

        Without any driver is on purpose only while ours has the others: else the driver itself is what is missing.
        """
        wanted = normalize_pci(address)
        driver = next((function.driver for function in self.functions if function.address == wanted), self.managed)
        if driver == self.managed or (driver == UNBOUND and not self._bound()):
            return ""
        return "bound to no kernel driver" if driver == UNBOUND else f"bound to kernel driver {driver}"

    def _bound(self) -> set[str]:
        return {function.address for function in self.functions if function.driver == self.managed}

    def missing(self, found: Collection[str], errors: dict[int, str], driver_error: str) -> list[Missing]:
        """Expected GPUs that are not among the UUIDs `found`. `errors`: by place in the driver's list, what its GPU
        answered instead of a name; those that explain a missing one are taken out.
        """
        entries: list[Missing] = []
        for device in self.devices:
            if device.uuid in found:
                continue
            identity = DeviceIdentity(device.position, device.uuid, device.name, "", device.pci_bus_id, -1, "")
            away = self.given_away(device.pci_bus_id)
            reason = away or errors.pop(device.position, "") or driver_error or FELL_OFF
            entries.append(Missing(identity, reason, bool(away)))
        return entries

    def count(self, listed: Iterable[str | None]) -> int:
        """GPUs that should answer. `listed`: PCI addresses in the driver's list, None where a place has no name."""
        places = [None if address is None else normalize_pci(address) for address in listed]
        known = {normalize_pci(device.pci_bus_id) for device in self.devices}
        everything = known | self._bound() | {address for address in places if address is not None}
        present = {address for address in everything if not self.given_away(address)}
        return max(len(present), sum(a is None or not self.given_away(a) for a in places))

    def unmanaged(self) -> tuple[tuple[str, int], ...]:
        """How many GPUs other kernel drivers have."""
        others = Counter(function.driver for function in self.functions if function.driver != self.managed)
        return tuple(sorted(others.items()))


class InventoryKeeper:
    """Reads the list and the bus, and publishes `value`, which any thread may read. Safe to call from every thread."""

    def __init__(self, expected: ExpectedDevices, sysfs: Path | None, vendor: Vendor = NVIDIA) -> None:
        """`sysfs`: where to look for the bus, None for a backend that has none."""
        self.value = Inventory(managed=vendor.kernel_driver)
        self._vendor = vendor
        self._expected = expected
        self._sysfs = sysfs
        self._lock = threading.Lock()

    def look(self) -> None:
        """Read the list and the bus again."""
        with self._lock:
            before = set(self._expected.devices)
            self._expected.load()
            gone = before - set(self._expected.devices)
            self._publish(forgotten=self.value.forgotten | gone, functions=self._list_functions())

    def look_at_bus(self) -> None:
        with self._lock:
            self._publish(functions=self._list_functions())

    def note(self, up: Iterable[DeviceIdentity]) -> None:
        """These GPUs answer. Raises OSError when the list cannot be kept in its file."""
        with self._lock:
            changed = self._expected.note(
                ExpectedDevice(identity.uuid, normalize_pci(identity.pci_bus_id), identity.index, identity.name)
                for identity in up
            )
            self._publish()
            if changed:
                self._expected.save()

    def remember(self, uuid: str) -> None:
        """A GPU that was forgotten answers again."""
        if uuid in self.value.forgotten:
            with self._lock:
                self._publish(forgotten=self.value.forgotten - {uuid})

    def _list_functions(self) -> tuple[PciFunction, ...]:
        return tuple(list_functions(self._sysfs, self._vendor) or ()) if self._sysfs is not None else ()

    def _publish(
        self, *, functions: tuple[PciFunction, ...] | None = None, forgotten: frozenset[str] | None = None
    ) -> None:
        self.value = self.value._replace(
            devices=tuple(self._expected.devices.values()),
            functions=self.value.functions if functions is None else functions,
            forgotten=self.value.forgotten if forgotten is None else forgotten,
        )
