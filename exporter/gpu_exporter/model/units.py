"""What the driver lists: GPUs and MIG instances."""

from __future__ import annotations

import re
from typing import NamedTuple

# Boards that MIG divides by four: at most 4 instances of 6 of 24 GB, or 24 of 96 GB
# (docs.nvidia.com/datacenter/tesla/mig-user-guide, "Supported GPUs"). RTX A3000 is another product, and has no MIG.
FOUR_SLICES = re.compile(r"\b(A30|RTX PRO 6000 Blackwell)\b")


class UnitId(NamedTuple):
    """What can be held: a whole GPU (`mig_uuid` empty) or one MIG instance of it."""

    uuid: str
    mig_uuid: str = ""


def normalize_pci(address: str) -> str:
    """One spelling for 00000000:3B:00.0 (NVML) and 0000:3b:00.0 (kernel), whose domain has more than four digits where
    it needs them: 10000:01:00.0 behind Intel's VMD. "" stays "".
    """
    domain, _, rest = address.lower().partition(":")
    return f"{domain.lstrip('0').rjust(4, '0')}:{rest}" if address else ""


NO_PLACE = -1
"""Index of a GPU that has no place in the driver's list: of it only its address is known."""


class DeviceIdentity(NamedTuple):
    """Facts that are read once: NVML index, UUID, product name, PCI address, minor number of /dev/nvidiaN."""

    index: int  # type: ignore[assignment]  # nobody asks these facts for tuple.index
    uuid: str
    name: str
    driver_version: str
    pci_bus_id: str
    minor: int
    mig_mode: str = "disabled"

    @property
    def mig_slices(self) -> int:
        """Compute slices of the board: 7, on FOUR_SLICES 4."""
        return 4 if FOUR_SLICES.search(self.name) else 7

    @property
    def mig_memory_slices(self) -> int:
        """Memory slices of the board: 8, on FOUR_SLICES 4."""
        return 4 if FOUR_SLICES.search(self.name) else 8
