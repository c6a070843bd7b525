"""The keeper of the inventory: the value that it publishes, and the effect of an administrator's `forget`."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_exporter.agent.inventory.expected import ExpectedDevices, forget
from gpu_exporter.agent.inventory.inventory import InventoryKeeper
from gpu_exporter.common.model.units import DeviceIdentity
from gpu_exporter.common.vendor import NVIDIA

A = DeviceIdentity(0, "GPU-a", "NVIDIA H100", "570.1", "00000000:10:00.0", 0)
B = DeviceIdentity(1, "GPU-b", "NVIDIA H100", "570.1", "00000000:11:00.0", 1)


def uuids(keeper: InventoryKeeper) -> list[str]:
    return [device.uuid for device in keeper.value.devices]


def put_on_bus(sysfs: Path, address: str, driver: str) -> None:
    """A GPU as the kernel shows it."""
    function = sysfs / "bus/pci/devices" / address
    function.mkdir(parents=True, exist_ok=True)
    (function / "vendor").write_text("0x10de\n")
    (function / "class").write_text("0x030200\n")
    (sysfs / "drivers" / driver).mkdir(parents=True, exist_ok=True)
    (function / "driver").unlink(missing_ok=True)
    (function / "driver").symlink_to(sysfs / "drivers" / driver)


def test_a_gpu_that_answers_is_also_expected_by_the_next_process(tmp_path: Path) -> None:
    keeper = InventoryKeeper(ExpectedDevices(tmp_path, "boot"), None, vendor=NVIDIA)
    keeper.look()
    before = keeper.value
    keeper.note([A, B])
    assert (uuids(keeper), before.devices) == (["GPU-a", "GPU-b"], ())  # a value that was read before does not change
    again = InventoryKeeper(ExpectedDevices(tmp_path, "boot"), None, vendor=NVIDIA)
    assert uuids(again) == []
    again.look()
    assert uuids(again) == ["GPU-a", "GPU-b"]


def test_forget_removes_a_gpu_until_it_answers_again(tmp_path: Path) -> None:
    keeper = InventoryKeeper(ExpectedDevices(tmp_path, "boot"), None, vendor=NVIDIA)
    keeper.note([A, B])
    keeper.look()
    assert forget(tmp_path, "GPU-a")
    keeper.look()
    assert (uuids(keeper), keeper.value.forgotten) == (["GPU-b"], {"GPU-a"})
    keeper.look()
    assert keeper.value.forgotten == {"GPU-a"}
    keeper.remember("GPU-a")
    assert keeper.value.forgotten == frozenset()
    keeper.note([A, B])
    assert sorted(uuids(keeper)) == ["GPU-a", "GPU-b"]


def test_the_bus_is_read_again_on_request(tmp_path: Path) -> None:
    put_on_bus(tmp_path, "0000:10:00.0", "nvidia")
    put_on_bus(tmp_path, "0000:11:00.0", "nvidia")
    keeper = InventoryKeeper(ExpectedDevices(None, "boot"), tmp_path, vendor=NVIDIA)
    keeper.look()
    assert keeper.value.given_away(A.pci_bus_id) == ""
    put_on_bus(tmp_path, "0000:10:00.0", "vfio-pci")
    assert keeper.value.given_away(A.pci_bus_id) == ""
    keeper.look_at_bus()
    assert keeper.value.given_away(A.pci_bus_id) == "bound to kernel driver vfio-pci"
    assert keeper.value.unmanaged() == (("vfio-pci", 1),)
    assert keeper.value.count(()) == 1


def test_a_list_that_cannot_be_saved_is_still_published(tmp_path: Path) -> None:
    (tmp_path / "devices.json").mkdir()
    keeper = InventoryKeeper(ExpectedDevices(tmp_path, "boot"), None, vendor=NVIDIA)
    with pytest.raises(OSError):
        keeper.note([A])
    assert uuids(keeper) == ["GPU-a"]
