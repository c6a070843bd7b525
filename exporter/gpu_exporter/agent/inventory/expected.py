"""Keeps the list of GPUs that this node should have, in a file that survives restarts and reboots.

A GPU is expected from its first answer until one of three events:

- Another GPU answers at its PCI address: the GPU was replaced.
- The node comes back from a reboot with at least as many GPUs: the GPU was moved or removed on purpose.
- An administrator runs `gpu-exporter forget UUID`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from gpu_exporter.common.files import read_kept, write_atomically

log = logging.getLogger(__name__)
FILE = "devices.json"
VERSION = 1
LINKS_MAX = 256  # of any board
READ_MAX = 4 * 2**20  # bytes; a GPU needs 200


class UnusableList(Exception):
    """The file cannot be read. The text contains its path and the reason."""


class ExpectedDevice(NamedTuple):
    """One GPU that answered on this host before. `position`: its position in the driver's list. `links`: the most
    NVLinks that were up at the same time.
    """

    uuid: str
    pci_bus_id: str
    position: int
    name: str
    links: int = 0


class ExpectedDevices:
    """The list of expected GPUs, saved in a file if there is a directory for it. Used by one thread at a time."""

    def __init__(self, directory: Path | None, boot_id: str) -> None:
        self.devices: dict[str, ExpectedDevice] = {}
        self.seen: dict[str, str] = {}  # by UUID, the boot in which the GPU last answered; "" if unknown
        self.left_out: set[str] = set()  # addresses of GPUs that were forgotten and have not answered since
        self._path = directory / FILE if directory is not None else None
        self._boot_id = boot_id
        self._stored_boot_id = boot_id
        self._stamp: tuple[int, int] | None = None
        self._is_saved = True
        self._problem = ""  # of the file, as it was logged

    def load(self) -> None:
        """Loads the file. In later calls, applies the removals by `forget`. Logs and ignores an invalid file."""
        stamp = self._read_stamp()
        if self._path is None or stamp is None or stamp == self._stamp:
            return
        try:
            boot_id, devices, seen, self.left_out = _read(self._path)
        except UnusableList as exc:
            if str(exc) != self._problem:
                effect = (
                    "a GPU that is missing at this start is not reported"
                    if self._stamp is None
                    else "the exporter continues with the list that it read before"
                )
                log.warning("%s; %s", exc, effect)
            self._problem = str(exc)
            return
        self._problem = ""
        self.seen = {**seen, **self.seen}
        if self._stamp is None:
            self._stored_boot_id = boot_id
            self.devices = devices
        else:
            self.devices = {uuid: device for uuid, device in self.devices.items() if uuid in devices}
        self._stamp = stamp

    def note(self, present: Iterable[ExpectedDevice]) -> bool:
        """Records that these GPUs answer now. Returns True if the list has changed; the caller then saves it."""
        before, kept, left_out = self.devices, dict(self.devices), self.left_out
        answering: dict[str, ExpectedDevice] = {}
        for device in present:
            known = kept.get(device.uuid)
            if known is not None:
                device = known if not device.pci_bus_id else device  # an address that cannot be read now stays known
                device = device._replace(links=max(device.links, known.links))
            answering[device.uuid] = device
        places = {device.pci_bus_id: device for device in answering.values() if device.pci_bus_id}
        rebooted = self._stored_boot_id != self._boot_id
        if rebooted and len(answering) >= max(1, len(kept)):  # before that, some GPUs may still be starting
            kept.clear()
            self.left_out = set()  # another card may be at these addresses now
            self._stored_boot_id = self._boot_id
        for uuid, device in list(kept.items()):
            successor = places.get(device.pci_bus_id)
            if uuid in answering or successor is None:
                continue
            # Replaced by another GPU at its address. A GPU that had another address shows a renumbered bus.
            elsewhere = before.get(successor.uuid)
            if elsewhere is None or elsewhere.pci_bus_id == successor.pci_bus_id:
                del kept[uuid]
            else:  # the present address of the old GPU is unknown
                kept[uuid] = device._replace(pci_bus_id="")
        kept.update(answering)
        self.left_out = self.left_out - places.keys()
        self.devices = kept  # replaced as a whole: other threads may be reading
        seen = {uuid: boot for uuid, boot in self.seen.items() if uuid in kept}
        seen |= dict.fromkeys(answering, self._boot_id)
        is_changed, self.seen = seen != self.seen, seen
        if (
            kept != before
            or is_changed
            or left_out != self.left_out
            or (rebooted and self._stored_boot_id == self._boot_id)
        ):
            self._is_saved = False  # until a write succeeds
        return not self._is_saved

    def save(self) -> None:
        """Writes the file by rename. Raises OSError."""
        if self._path is None:
            self._is_saved = True
            return
        data = {
            "version": VERSION,
            "boot_id": self._stored_boot_id,
            "devices": [device._asdict() for device in self.devices.values()],
            "seen": self.seen,
            "left_out": sorted(self.left_out),
        }
        write_atomically(self._path, (json.dumps(data, indent=1) + "\n").encode())
        self._is_saved = True
        self._stamp = self._read_stamp()

    def _read_stamp(self) -> tuple[int, int] | None:
        if self._path is None:
            return None
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns


def _read(path: Path) -> tuple[str, dict[str, ExpectedDevice], dict[str, str], set[str]]:
    """Reads boot id, devices, boots of the last answers, and removed addresses from the file. Raises UnusableList."""
    try:
        data = json.loads(read_kept(path, READ_MAX).decode("utf-8"))
        if data["version"] != VERSION:
            raise ValueError(f"it has version {data['version']!r:.20}, but this release reads version {VERSION}")
        # A key that this release does not know is from a newer one.
        known = ({key: entry[key] for key in ExpectedDevice._fields if key in entry} for entry in data["devices"])
        devices = {entry["uuid"]: ExpectedDevice(**entry) for entry in known}
        for device in devices.values():
            for field, value, kind in zip(device._fields, device, (str, str, int, str, int), strict=True):
                if type(value) is not kind:
                    raise ValueError(f"{field} of a GPU has the wrong type {type(value).__name__}")
            if not 0 <= device.links <= LINKS_MAX:
                raise ValueError(f"links of a GPU is {device.links}, but must be 0 to {LINKS_MAX}")
        text = json.dumps(data, ensure_ascii=False)
        text.encode()  # raises ValueError for a lone surrogate, which no answer could contain
        seen = {uuid: boot for uuid, boot in data["seen"].items() if isinstance(boot, str)}
        left_out = {each for each in data["left_out"] if isinstance(each, str)}
        return str(data["boot_id"]), devices, seen, left_out
    except OSError as exc:
        raise UnusableList(f"{path}: {exc.strerror}") from exc
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        raise UnusableList(f"{path}: damaged ({type(exc).__name__}: {exc})") from exc


def forget(directory: Path, uuid: str) -> bool:
    """Removes a GPU from the file. A running exporter notices the change.

    Returns False if the file is missing or does not list the GPU. Raises OSError, UnusableList.
    """
    if not (directory / FILE).exists():
        return False
    known = _read(directory / FILE)
    if uuid not in known[1]:
        return False
    book = ExpectedDevices(directory, known[0])
    book.devices = {name: device for name, device in known[1].items() if name != uuid}
    book.seen = {name: boot for name, boot in known[2].items() if name != uuid}
    book.left_out = known[3] | ({known[1][uuid].pci_bus_id} - {""})
    book.save()
    return True
