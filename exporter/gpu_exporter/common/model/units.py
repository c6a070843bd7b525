"""The units that the driver lists: GPUs and MIG instances."""

from __future__ import annotations

import re
from typing import NamedTuple

# Boards that MIG divides into four slices: at most 4 instances of 6 of 24 GB, or 24 of 96 GB
# (docs.nvidia.com/datacenter/tesla/mig-user-guide, "Supported GPUs"). RTX A3000 is another product, without MIG.
FOUR_SLICES = re.compile(r"\b(A30|RTX PRO 6000 Blackwell)\b")


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
    def mig_slices(self) -> int:
        """Number of compute slices of the board: 4 on the products of FOUR_SLICES, otherwise 7."""
        return 4 if FOUR_SLICES.search(self.name) else 7

    @property
    def mig_memory_slices(self) -> int:
        """Number of memory slices of the board: 4 on the products of FOUR_SLICES, otherwise 8."""
        return 4 if FOUR_SLICES.search(self.name) else 8
