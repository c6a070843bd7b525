"""Combines the expected GPUs and the GPUs on the PCI bus into one immutable value, and keeps the value up to date."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gpu_exporter.agent.inventory.expected import ExpectedDevice, ExpectedDevices
from gpu_exporter.agent.inventory.pci import PciFunction, is_loaded, is_subset, list_functions
from gpu_exporter.agent.inventory.standing import PROVEN_S, Case, Standing, judge
from gpu_exporter.common.model.units import NO_PLACE, TWIN, DeviceIdentity, normalize_pci
from gpu_exporter.common.vendor import Vendor

NO_LINKS: Mapping[str, int] = {}
FELL_OFF = "the driver listed it before, and lists it no more"


class Missing(NamedTuple):
    """An expected GPU that does not answer. `away`: the GPU was removed on purpose or is asleep, so it is not lost."""

    identity: DeviceIdentity
    reason: str
    away: bool


class Inventory(NamedTuple):
    """Expected GPUs (`devices`), and GPUs on the PCI bus (`functions`).

    - `forgotten`: UUIDs that an administrator removed while their GPUs did not answer.
    - `left_out`: PCI addresses of GPUs that an administrator removed.
    - `managed`: name of the kernel driver whose GPUs the exporter reads.
    - `seen`: UUIDs of `devices` that were up in this boot.
    - `failed`: addresses of GPUs that the driver failed to start since they last answered.
    - `proven`: PCI device ids of which a card has answered for PROVEN_S.
    - `is_loaded`: the vendor's kernel module is loaded.
    - `is_subset`: this container or job got only a part of the host's GPUs.
    """

    devices: tuple[ExpectedDevice, ...] = ()
    functions: tuple[PciFunction, ...] = ()
    forgotten: frozenset[str] = frozenset()
    managed: str = ""
    seen: frozenset[str] = frozenset()
    left_out: frozenset[str] = frozenset()
    failed: frozenset[str] = frozenset()
    proven: frozenset[str] = frozenset()
    is_loaded: bool = False
    is_subset: bool = False

    def standing(self, address: str) -> Standing:
        """Returns why a GPU does not answer or is not listed: missing, away, asleep or foreign (standing.py)."""
        wanted = normalize_pci(address)
        function = next((each for each in self.functions if each.address == wanted), None)
        known = [each for each in self.devices if each.pci_bus_id == wanted]
        now = any(each.uuid in self.seen for each in known)
        return judge(
            Case(
                function,
                self.managed,
                is_gone=not self._bound() and not self.is_loaded,
                seen="now" if now else "before" if known else "never",
                probe_failed=wanted in self.failed,
                has_sibling=function is not None and function.kind in self.proven,
                is_subset=self.is_subset,
            )
        )

    def given_away(self, address: str) -> str:
        """Returns why the exporter should no longer read a GPU that has answered before; "" if it should."""
        wanted = normalize_pci(address)
        function = next((each for each in self.functions if each.address == wanted), None)
        is_gone = not self._bound() and not self.is_loaded
        found = judge(Case(function, self.managed, is_gone, seen="now", probe_failed=wanted in self.failed))
        return found.reason if found.kind in ("away", "asleep") else ""

    def _bound(self) -> set[str]:
        return {function.address for function in self.functions if function.driver == self.managed}

    def missing(
        self,
        found: Collection[str],
        errors: dict[int, str],
        driver_error: str,
        listed: Iterable[str | None] = (),
        denied: Collection[int] = (),
    ) -> list[Missing]:
        """Returns the GPUs that should answer but are not in `found` (UUIDs): expected GPUs, and GPUs on the bus.

        - `errors`: by position in the driver's list, the error of each GPU that did not report its name. Errors that
          explain a missing GPU are removed from this mapping.
        - `listed`: PCI addresses in the driver's list, None for a position without an address.
        - `denied`: positions that this process has no permission to use. Their GPUs are not missing.
        """
        entries: list[Missing] = []
        others = self._list_denied(found, denied)
        for device in self.devices:
            if device.uuid in found or device.uuid in others:
                continue
            identity = DeviceIdentity(device.position, device.uuid, device.name, "", device.pci_bus_id, -1, "")
            standing = self.standing(device.pci_bus_id)
            away = standing.kind in ("away", "asleep")
            reason = standing.reason if away else errors.pop(device.position, "") or driver_error
            entries.append(Missing(identity, reason or standing.reason or FELL_OFF, away))
        places = list(listed)
        # A position of the driver's list without a readable GPU or address may be any of the unseen GPUs.
        unclear = len(errors) + sum(each is None for each in places)
        unseen = self._unseen({normalize_pci(each) for each in places if each is not None})
        for address, standing in unseen[unclear:] if not driver_error else ():
            identity = DeviceIdentity(NO_PLACE, "", "", "", address, -1, "")
            entries.append(Missing(identity, standing.reason, away=False))
        return entries

    def _list_denied(self, found: Collection[str], denied: Collection[int]) -> set[str]:
        """Returns the UUIDs of known GPUs that may be at the denied positions. If the bus can be read, only GPUs on the
        bus count. If there are more such GPUs than positions, the GPUs that had these positions before are preferred.
        """
        there = {function.address for function in self.functions}
        absent = [each for each in self.devices if each.uuid not in found and (not there or each.pci_bus_id in there)]
        absent.sort(key=lambda device: device.position not in denied)
        return {device.uuid for device in absent[: len(denied)]}

    def _unseen(self, listed: Collection[str]) -> list[tuple[str, Standing]]:
        """Returns GPUs on the bus that have never answered and still count as missing, with their PCI address."""
        known = {device.pci_bus_id for device in self.devices} | self.left_out
        others = (each.address for each in self.functions if each.address not in known and each.address not in listed)
        standings = [(address, self.standing(address)) for address in others]
        return [(address, standing) for address, standing in standings if standing.kind == "missing"]

    def count(self, listed: Iterable[str | None], found: Collection[str] = (), denied: Collection[int] = ()) -> int:
        """Returns the number of GPUs that should answer.

        `listed`: PCI addresses in the driver's list, None for a position without an address. `found`: UUIDs in the
        list. `denied`: positions that this process has no permission to use; `listed` does not contain them.
        """
        others = self._list_denied(found, denied)
        expected = [each for each in self.devices if each.uuid not in others]
        places = [None if not address else normalize_pci(address) for address in listed]
        named = {address for address in places if address is not None}
        present = {address for address in named if not self.given_away(address)}
        known = {device.pci_bus_id for device in expected if device.pci_bus_id}
        present |= {address for address in known - named if self.standing(address).kind == "missing"}
        present |= {address for address, _ in self._unseen(named)[len(denied) :]}  # any of them may be a denied GPU
        # A GPU with an unknown address either is at a position without an address, or is missing.
        lost = sum(not device.pci_bus_id and device.uuid not in found for device in expected)
        return max(len(present) + lost, sum(a is None or not self.given_away(a) for a in places))

    def unmanaged(self) -> tuple[tuple[str, int], ...]:
        """Returns the name of each other kernel driver, with the number of GPUs that it drives."""
        others = Counter(function.driver for function in self.functions if function.driver != self.managed)
        return tuple(sorted(others.items()))


class InventoryKeeper:
    """Reads the list and the bus, and keeps `value` up to date. Thread-safe."""

    def __init__(
        self,
        expected: ExpectedDevices,
        sysfs: Path | None,
        vendor: Vendor,
        boot_id: str = "",
        subset: Callable[[int], bool] | None = None,
    ) -> None:
        """- `sysfs`: path of the PCI bus, None for a backend without a bus.
        - `boot_id`: id of this boot, "" if unknown.
        - `subset`: replaces is_subset; takes a number of GPUs, and returns whether this container or job got only a
          part of them.
        """
        self._boot_id = boot_id
        self._subset = subset or (lambda bound: is_subset(bound, vendor))
        self._answered: dict[str, float] = {}  # by address, since when the GPU has answered (monotonic seconds)
        self.value = Inventory(managed=vendor.kernel_driver)
        self._vendor = vendor
        self._expected = expected
        self._sysfs = sysfs
        self._lock = threading.Lock()

    def look(self) -> None:
        """Reads the list and the bus again."""
        with self._lock:
            before = set(self._expected.devices)
            self._expected.load()
            gone = before - set(self._expected.devices)
            self._publish(forgotten=self.value.forgotten | gone, functions=self._list_functions())

    def look_at_bus(self) -> None:
        with self._lock:
            self._publish(functions=self._list_functions())

    def note(self, up: Iterable[DeviceIdentity], now: float = 0.0, links: Mapping[str, int] = NO_LINKS) -> None:
        """Records that these GPUs answer at `now` (monotonic seconds). Raises OSError if the list cannot be saved.

        `links`: by UUID, the number of NVLinks that are up.
        """
        present = [
            ExpectedDevice(
                identity.uuid,
                normalize_pci(identity.pci_bus_id),
                identity.index,
                identity.name,
                links.get(identity.uuid, 0),
            )
            for identity in up
        ]
        with self._lock:
            addresses = [device.pci_bus_id for device in present]
            self._answered = {address: self._answered.get(address, now) for address in addresses}
            changed = self._expected.note(present)
            failed = self.value.failed - set(addresses)
            kinds = {function.address: function.kind for function in self.value.functions}
            proven = {
                kinds[address]
                for address, since in self._answered.items()
                if kinds.get(address) and now - since >= PROVEN_S
            }
            self._publish(proven=self.value.proven | proven, failed=failed)
            if changed:
                self._expected.save()

    def note_failed_probes(self, addresses: Collection[str]) -> None:
        """Records the PCI addresses of GPUs that the driver could not start. They come from the kernel's log."""
        with self._lock:
            self._publish(failed=self.value.failed | frozenset(map(normalize_pci, addresses)))

    def has_twin(self, uuid: str) -> bool:
        """Returns whether several GPUs have reported this UUID here."""
        return any(device.uuid.startswith(f"{uuid}{TWIN}") for device in self.value.devices)

    def remember(self, uuid: str) -> None:
        """Records that a forgotten GPU answers again."""
        if uuid in self.value.forgotten:
            with self._lock:
                self._publish(forgotten=self.value.forgotten - {uuid})

    def _list_functions(self) -> tuple[PciFunction, ...]:
        return tuple(list_functions(self._sysfs, self._vendor) or ()) if self._sysfs is not None else ()

    def _publish(self, **changes: Any) -> None:
        """Replaces `value`. `changes`: new values of fields of Inventory."""
        value = self.value._replace(**changes)
        bound = sum(function.driver == value.managed for function in value.functions)
        self.value = value._replace(
            devices=tuple(self._expected.devices.values()),
            seen=frozenset(uuid for uuid, boot in self._expected.seen.items() if boot == self._boot_id != ""),
            left_out=frozenset(self._expected.left_out),
            is_loaded=self._sysfs is not None and is_loaded(self._sysfs, self._vendor),
            is_subset=bound > 0 and self._subset(bound),
        )
