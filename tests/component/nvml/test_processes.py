"""Processes of boards and of MIG instances."""

from __future__ import annotations

import pytest

from gpu_exporter.agent.devices.errors import (
    NoPermission,
    NotSupported,
)
from gpu_exporter.agent.devices.nvml.backend import NvmlBackend
from gpu_exporter.common.clock import ManualClock
from gpu_exporter.common.model.readings import GpuProcess, ProcessList
from tests.component.nvml.nvml_bench import MakeBackend, feed, first_device
from tests.testbed.nvml.feeder import NvmlTable

MIB = 1024**2


def listed(pid: int, mig: str = "") -> GpuProcess:
    """The entry that `list_pids` makes."""
    return GpuProcess(pid, mig, pid * MIB)


def list_pids(table: NvmlTable, *processes: tuple[int, int, str]) -> None:
    """The first GPU's processes: (pid, kind, MIG ids or ""), each with as many MiB of memory as its pid."""
    with table.writing(0) as out:
        for position, (pid, kind, mig) in enumerate(processes):
            entry = out.processes[position]
            entry.pid, entry.graphics, entry.memory = pid, kind, pid * MIB
            ids = tuple(map(int, mig.split("/"))) if mig else (0xFFFFFFFF, 0xFFFFFFFF)
            entry.gpu_instance, entry.compute_instance = ids
        out.process_count = len(processes)


@pytest.mark.parametrize("size", [24, 32], ids=["nvmlProcessInfo_v2_t", "as-some-535-drivers"])
def test_processes_are_listed_with_their_pids(backend: NvmlBackend, nvml_table: NvmlTable, size: int) -> None:
    feed(nvml_table)
    nvml_table.table.process_bytes = size
    device = first_device(backend)
    assert device.read_processes() == (0, 0, ())
    list_pids(nvml_table, (4711, 0, ""), (4712, 1, ""), (4711, 1, ""), (4713, 0, ""))
    assert device.read_processes() == (2, 2, (listed(4711), listed(4713), listed(4712)))
    many = range(6000, 6100)  # more than the first buffer holds, so the driver refuses once
    list_pids(nvml_table, *((pid, 0, "") for pid in many))
    assert device.read_processes() == (100, 0, tuple(map(listed, many)))


def test_processes_of_mig_instances_are_read_from_the_board_or_each_instance(
    make_backend: MakeBackend, nvml_table: NvmlTable
) -> None:
    clock = ManualClock()
    feed(nvml_table, mig=[{"profile": "1g.10gb", "gi": 7}, {"profile": "2g.20gb", "gi": 3, "ci": 1}])
    list_pids(nvml_table, (4711, 0, "7/0"), (4712, 0, "3/1"), (4712, 1, "3/1"))
    device = first_device(make_backend(clock))
    found = (listed(4711, "7/0"), listed(4712, "3/1"))
    assert device.read_processes() == (2, 1, found)
    with nvml_table.writing(0) as out:
        out.processes_by_instance = 1  # as without the permission to list the board's processes
    assert device.read_processes() == (2, 1, found)
    for handle in ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses"):
        nvml_table.set_call(0, handle, "NVML_ERROR_NO_PERMISSION")
    with pytest.raises((NoPermission, NotSupported)):
        device.read_processes()
    with nvml_table.writing(0) as out:
        out.instance_count = 0  # there is no instance to ask
    with pytest.raises(NotSupported):
        device.read_processes()


def test_the_instances_are_asked_if_the_board_names_no_instance(backend: NvmlBackend, nvml_table: NvmlTable) -> None:
    feed(nvml_table, mig=[{"profile": "1g.10gb", "gi": 7}])
    list_pids(nvml_table, (4711, 0, ""))
    device = first_device(backend)
    assert device.read_processes() == (1, 0, (listed(4711),))  # no call reports the instance of the process
    with nvml_table.writing(0) as out:
        out.processes_by_instance = 2
    list_pids(nvml_table, (4711, 0, "7/0"))
    assert device.read_processes() == (1, 0, (listed(4711, "7/0"),))


def test_no_pid_is_printed() -> None:
    assert "4711" not in repr(ProcessList(1.0, (GpuProcess(4711),)))
