"""What the tests of faults break, and how they look at it."""

from __future__ import annotations

from tests.testbed.faults import Rig, Seen, look
from tests.testbed.sysfs import add_function

COUNT = 8
NINTH = "0000:40:00.0"
MISSING = f'gpu_missing{{pci_bus_id="{NINTH}"}} 1'
LOST = "lost"


def lose(rig: Rig, index: int = 3, error: str = "NVML_ERROR_GPU_IS_LOST") -> None:
    rig.table.set_call(index, "*", error)


def heal(rig: Rig, index: int = 3) -> None:
    rig.table.set_call(index, "*")


def is_out(rig: Rig, seen: Seen, index: int = 3) -> bool:
    """Whether `gpu_up` of GPU `index` is 0 without current values, and all other GPUs have current values (state B)."""
    gpu = str(index)
    return (
        seen["gpu_up"].get(gpu) == 0
        and gpu not in seen["gpu_power_watts"]
        and gpu not in seen["gpu_utilization_ratio"]
        and rig.fresh(seen, "B") == rig.all(index)
        and {g for g, up in seen["gpu_up"].items() if up == 1} == rig.all(index)
        and seen.one("gpu_driver_up") == 1
    )


def never_idle(url: str) -> None:
    assert not any(look(url)["gpu_idle_seconds_total"].values())


def bus_of(rig: Rig) -> None:
    """Put every GPU of the driver's list on the bus, bound to the driver."""
    for index in range(COUNT):
        add_function(rig.sysfs, f"0000:{0x10 + index:02x}:00.0", "nvidia")


def power_of(seen: Seen, gpu: str) -> float | None:
    return seen["gpu_power_watts"].get(gpu)
