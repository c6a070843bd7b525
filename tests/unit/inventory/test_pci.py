"""GPUs as the kernel lists them."""

from __future__ import annotations

from pathlib import Path

from tests.testbed.sysfs import add_function

from gpu_exporter.agent.inventory.pci import PciFunction, list_functions
from gpu_exporter.common.model.units import normalize_pci
from gpu_exporter.common.vendor import NVIDIA


def test_gpus_on_the_bus_are_listed_with_their_kernel_driver(tmp_path: Path) -> None:
    add_function(tmp_path, "0000:10:00.0", "nvidia")
    add_function(tmp_path, "0000:11:00.0", "vfio-pci", kind="0x030000")
    add_function(tmp_path, "0000:12:00.0", "")
    add_function(tmp_path, "0000:10:00.1", "snd_hda_intel", kind="0x040300")  # the audio function of a board
    add_function(tmp_path, "0000:00:1f.0", "igc", vendor="0x8086")
    assert list_functions(tmp_path, vendor=NVIDIA) == [
        PciFunction("0000:10:00.0", "nvidia", "0x26b9"),
        PciFunction("0000:11:00.0", "vfio-pci", "0x26b9"),
        PciFunction("0000:12:00.0", "none", "0x26b9"),
    ]


def test_an_unreadable_bus_is_unknown_and_not_empty(tmp_path: Path) -> None:
    assert list_functions(tmp_path / "nowhere", vendor=NVIDIA) is None


def test_pci_addresses_have_one_notation() -> None:
    assert normalize_pci("00000000:3B:00.0") == normalize_pci("0000:3b:00.0") == "0000:3b:00.0"
    assert normalize_pci("00010000:3B:00.0") == normalize_pci("10000:3b:00.0") == "10000:3b:00.0"  # another GPU
    assert normalize_pci("0000000F:01:00.0") == "000f:01:00.0"
    assert normalize_pci("") == ""
