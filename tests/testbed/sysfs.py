"""A PCI bus as /sys shows it, in a folder of our own."""

from __future__ import annotations

from pathlib import Path


def add_function(sysfs: Path, address: str, driver: str, *, vendor: str = "0x10de", kind: str = "0x030200") -> None:
    """Put a function on the bus, or bind the one at that address to another driver ("" is none)."""
    device = sysfs / "bus/pci/devices" / address
    device.mkdir(parents=True, exist_ok=True)
    (device / "vendor").write_text(f"{vendor}\n", encoding="ascii")
    (device / "class").write_text(f"{kind}\n", encoding="ascii")
    link = device / "driver"
    link.unlink(missing_ok=True)
    if driver:
        target = sysfs / "bus/pci/drivers" / driver
        target.mkdir(parents=True, exist_ok=True)
        link.symlink_to(target)


def remove_function(sysfs: Path, address: str) -> None:
    """Take a function off the bus."""
    device = sysfs / "bus/pci/devices" / address
    for entry in device.iterdir():
        entry.unlink()
    device.rmdir()
