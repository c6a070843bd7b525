"""Lists a vendor's GPUs on the PCI bus, and the kernel driver that is bound to each.

If NVIDIA's driver does not list a GPU, only the kernel knows whether the GPU is lost or was given away. This module
reads /sys/bus/pci/devices (vendor, device, class, driver, driver_override, power/runtime_status), and whether the
kernel module is loaded. It needs no privilege and no driver.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from gpu_exporter.common.model.units import normalize_pci
from gpu_exporter.common.vendor import Vendor

DISPLAY_CLASSES = ("0x0300", "0x0302")  # VGA and 3D controller; audio and bridges of the same board have other classes
UNBOUND = "none"
NO_OVERRIDE = ("", "(null)")
EVERYTHING = ("", "all", "void", "none")  # of the visible GPUs; other values are lists. CDI and plugins set void.
JOB = re.compile(r"/job_[0-9]+(/|$)", re.MULTILINE)  # a Slurm job in the path of a cgroup


class PciFunction(NamedTuple):
    """One GPU on the bus.

    - `driver`: name of the kernel driver, or UNBOUND.
    - `kind`: PCI device id, the same for all boards of a model.
    - `override`: the only driver that may bind the GPU, "" for any driver.
    - `asleep`: runtime power management has suspended the GPU.
    """

    address: str
    driver: str
    kind: str = ""
    override: str = ""
    asleep: bool = False


def list_functions(sysfs: Path, vendor: Vendor) -> list[PciFunction] | None:
    """Returns all GPUs of the vendor on the bus, None if the bus cannot be read."""
    found: list[PciFunction] = []
    try:
        entries = sorted((sysfs / "bus/pci/devices").iterdir())
    except OSError:
        return None
    for entry in entries:
        try:
            if _text(entry / "vendor") != vendor.pci_vendor or not _text(entry / "class").startswith(DISPLAY_CLASSES):
                continue
            if (entry / "physfn").exists():  # a virtual function of a shared board, not a GPU itself
                continue
            driver, override = entry / "driver", _text(entry / "driver_override")
            found.append(
                PciFunction(
                    normalize_pci(entry.name),
                    driver.resolve().name if driver.exists() else UNBOUND,
                    _text(entry / "device"),
                    "" if override in NO_OVERRIDE else override,
                    _text(entry / "power" / "runtime_status") == "suspended",
                )
            )
        except OSError:  # removed between listing and reading
            continue
    return found


def is_loaded(sysfs: Path, vendor: Vendor) -> bool:
    return (sysfs / "module" / vendor.kernel_driver).is_dir()


def is_subset(
    bound: int,
    vendor: Vendor,
    environ: Mapping[str, str] = os.environ,
    device_files: Iterable[str] | None = None,
    own_cgroup: Path = Path("/proc/self/cgroup"),
) -> bool:
    """Returns whether this container or job got only a part of the host's GPUs.

    `bound`: number of the host's GPUs that are bound to the vendor's driver. `device_files`: names in /dev; None lists
    /dev now. A container has only the device files of its own GPUs. A job's cgroup hides the other GPUs from the
    driver.
    """
    if environ.get(vendor.visible_variable, "").strip().lower() not in EVERYTHING:
        return True
    try:
        names = os.listdir("/dev") if device_files is None else device_files  # noqa: PTH208 - hundreds of names
    except OSError:
        names = ()
    there = sum(vendor.device_file.fullmatch(f"/dev/{name}") is not None for name in names)
    return 0 < there < bound or JOB.search(_text(own_cgroup)) is not None


def _text(path: Path) -> str:
    """Returns the text of a file, "" if it does not exist."""
    try:
        return path.read_text("ascii", "replace").strip()
    except OSError:
        return ""
