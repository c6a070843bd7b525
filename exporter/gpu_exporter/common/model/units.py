"""The units that the driver lists: GPUs and MIG instances."""

from __future__ import annotations

import re
from typing import NamedTuple

# Boards that MIG divides into fewer than seven slices: at most 4 instances of 6 of 24 GB, or 24 of 96 GB; at most 2
# instances of 24 of 48 GB, or 16 of 32 GB (docs.nvidia.com/datacenter/tesla/mig-user-guide, "Supported GPUs"). RTX
# A3000 is another product, without MIG.
FEW_SLICES = (
    (re.compile(r"\b(A30|RTX PRO 6000 Blackwell)\b"), 4),
    (re.compile(r"\bRTX PRO (4500|5000) Blackwell\b"), 2),
)


class UnitId(NamedTuple):
    """A unit that can be held: a whole GPU (`mig_uuid` empty) or one of its MIG instances."""

    uuid: str
    mig_uuid: str = ""


def normalize_pci(address: str) -> str:
    """Converts a PCI address to the kernel's notation: 00000000:3B:00.0 (NVML) becomes 0000:3b:00.0. A domain keeps
    more than four digits if it needs them: 10000:01:00.0 behind Intel's VMD. "" remains "".
    """
    domain, _, rest = address.lower().partition(":")
    return f"{domain.lstrip('0').rjust(4, '0')}:{rest}" if address else ""


NO_PLACE = -1
"""Index of a GPU that has no position in the driver's list: only its address is known."""


TWIN = "@"
"""Separates UUID and PCI address in the name of a GPU whose UUID another GPU of the host reports too."""


class DeviceIdentity(NamedTuple):
    """The facts of a GPU that are read once: NVML index, UUID, product name, PCI address, minor number of /dev/nvidiaN.

    `cpus`: numbers of the CPUs that are near the GPU, empty if the driver does not report them.
    """

    index: int  # type: ignore[assignment]  # this hides tuple.index, which no caller uses
    uuid: str
    name: str
    driver_version: str
    pci_bus_id: str
    minor: int
    mig_mode: str = "disabled"
    cpus: frozenset[int] = frozenset()

    @property
    def label(self) -> str:
        """The index, or the PCI address (if unknown, the UUID) of a GPU that is not in the driver's list."""
        return str(self.index) if self.index != NO_PLACE else self.pci_bus_id or self.uuid

    @property
    def told_apart(self) -> DeviceIdentity:
        """The same identity with the PCI address added to the UUID, for GPUs of a host that report the same UUID."""
        own = self.uuid.partition(TWIN)[0]
        return self._replace(uuid=f"{own}{TWIN}{normalize_pci(self.pci_bus_id) or self.index}")

    @property
    def mig_slices(self) -> int:
        """Number of compute slices of the board: as in FEW_SLICES, otherwise 7."""
        return self._few_slices or 7

    @property
    def mig_memory_slices(self) -> int:
        """Number of memory slices of the board: as in FEW_SLICES, otherwise 8."""
        return self._few_slices or 8

    @property
    def _few_slices(self) -> int:
        return next((slices for pattern, slices in FEW_SLICES if pattern.search(self.name)), 0)
