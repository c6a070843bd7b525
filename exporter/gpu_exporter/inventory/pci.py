"""A vendor's PCI functions as the kernel lists them: what should be there, and who has it.

A GPU that fell off the bus is missing from the driver's list or answers that it is lost; one that an administrator gave
to a virtual machine (vfio-pci) or unbound is neither lost nor ours. Only the kernel knows which of the two it is. Reads
/sys/bus/pci/devices/*/{vendor,class,driver}; needs no privilege and no driver.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from gpu_exporter.model import normalize_pci
from gpu_exporter.vendor import NVIDIA, Vendor

DISPLAY_CLASSES = ("0x0300", "0x0302")  # VGA and 3D controller; audio and bridges of the same board have others
UNBOUND = "none"


class PciFunction(NamedTuple):
    """One GPU on the bus. `driver` is the kernel driver's name, UNBOUND without one."""

    address: str
    driver: str


def list_functions(sysfs: Path = Path("/sys"), vendor: Vendor = NVIDIA) -> list[PciFunction] | None:
    """All of the vendor's GPUs on the bus, None where the bus cannot be read."""
    found: list[PciFunction] = []
    try:
        entries = sorted((sysfs / "bus/pci/devices").iterdir())
    except OSError:
        return None
    for entry in entries:
        try:
            if (entry / "vendor").read_text("ascii").strip() != vendor.pci_vendor:
                continue
            if not (entry / "class").read_text("ascii").startswith(DISPLAY_CLASSES):
                continue
            if (entry / "physfn").exists():  # a virtual function of a shared board: no GPU of its own
                continue
            driver = entry / "driver"
            found.append(PciFunction(normalize_pci(entry.name), driver.resolve().name if driver.exists() else UNBOUND))
        except OSError:  # gone between listing and reading
            continue
    return found
