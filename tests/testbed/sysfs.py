"""A PCI bus as /sys shows it, in a folder of the test."""

from __future__ import annotations

import shutil
from pathlib import Path


def add_function(
    sysfs: Path,
    address: str,
    driver: str,
    *,
    vendor: str = "0x10de",
    kind: str = "0x030200",
    device: str = "0x26b9",
    driver_override: str = "(null)",
    runtime_status: str = "active",
    physfn: str = "",
) -> None:
    """Add a function to the bus, or bind the function at that address to another driver ("" is no driver). `kind`: its
    class. `physfn`: for a virtual function, the address of its physical function.
    """
    folder = sysfs / "bus/pci/devices" / address
    (folder / "power").mkdir(parents=True, exist_ok=True)
    texts = {"vendor": vendor, "class": kind, "device": device, "driver_override": driver_override}
    for name, text in {**texts, "power/runtime_status": runtime_status}.items():
        (folder / name).write_text(f"{text}\n", encoding="ascii")
    if physfn:
        (folder / "physfn").symlink_to(sysfs / "bus/pci/devices" / physfn)
    link = folder / "driver"
    link.unlink(missing_ok=True)
    if driver:
        target = sysfs / "bus/pci/drivers" / driver
        target.mkdir(parents=True, exist_ok=True)
        link.symlink_to(target)


def remove_function(sysfs: Path, address: str) -> None:
    """Remove a function from the bus."""
    device = sysfs / "bus/pci/devices" / address
    shutil.rmtree(device)
