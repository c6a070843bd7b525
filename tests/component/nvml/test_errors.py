"""Errors of the driver: counted, remembered, retried, and only where they belong."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_exporter.agent.collectors import registry
from gpu_exporter.agent.devices.errors import (
    DeviceError,
    DeviceLost,
    DriverChanged,
    DriverUnavailable,
    NoPermission,
    NotSupported,
)
from gpu_exporter.agent.devices.nvml.backend import NvmlBackend
from gpu_exporter.agent.devices.nvml.library import SYSTEM, Handle, LiveLibrary
from gpu_exporter.agent.devices.nvml.support import RETRY_S
from gpu_exporter.agent.devices.scenario import parse_scenario
from gpu_exporter.agent.runtime.wiring import activity_rules
from gpu_exporter.agent.sampling.sampler import DeviceSampler
from gpu_exporter.common.clock import ManualClock
from gpu_exporter.common.config.defaults import Settings
from tests.component.nvml.nvml_bench import MakeBackend, feed, first_device
from tests.testbed.nvml.feeder import NvmlTable, ScenarioFeeder


def test_a_failed_field_is_counted_and_affects_only_itself(backend: NvmlBackend, nvml_table: NvmlTable) -> None:
    feed(nvml_table)
    device = first_device(backend)
    nvml_table.set_field(0, 75, 0, error="NVML_ERROR_UNKNOWN")
    assert "thermal" not in device.read_throttle_seconds()
    assert "power_cap" in device.read_throttle_seconds()
    assert {(error.call, error.error) for error in device.take_errors()} == {
        ("nvmlDeviceGetFieldValues", "NVML_ERROR_UNKNOWN")
    }
    assert device.take_errors() == []
    nvml_table.set_field(0, 75, 0, error="NVML_ERROR_GPU_IS_LOST")
    assert "thermal" not in device.read_throttle_seconds()  # the other fields are answered, so the GPU is not lost
    assert [error.error for error in device.take_errors()] == ["NVML_ERROR_GPU_IS_LOST"]


def test_a_refused_call_is_remembered_and_retried_later(
    nvml_directory: Path, nvml_table: NvmlTable, make_backend: MakeBackend
) -> None:
    clock = ManualClock()
    feed(nvml_table)
    asked: list[str] = []

    class Listening(LiveLibrary):
        def ask(self, call: str, handle: Handle = SYSTEM, *arguments: object) -> object:
            asked.append(call)
            return super().ask(call, handle, *arguments)

    device = first_device(make_backend(clock, Listening()))
    nvml_table.set_call(0, "nvmlDeviceGetPowerUsage", "NVML_ERROR_NOT_SUPPORTED")
    for _ in range(3):
        with pytest.raises(NotSupported):
            device.read_power()
    assert asked.count("nvmlDeviceGetPowerUsage") == 1
    nvml_table.set_call(0, "nvmlDeviceGetPowerUsage")
    clock.advance(RETRY_S + 1)
    assert device.read_power() > 0
    for _ in range(3):
        device.read_clocks()
    assert asked.count("nvmlDeviceGetMaxClockInfo") == 1  # a static fact


def test_a_missing_permission_is_reported_once_with_the_remedy(
    make_backend: MakeBackend, nvml_table: NvmlTable, caplog: pytest.LogCaptureFixture
) -> None:
    clock = ManualClock()
    feed(nvml_table)
    device = first_device(make_backend(clock))
    nvml_table.set_call(0, "nvmlDeviceGetComputeRunningProcesses", "NVML_ERROR_NO_PERMISSION")
    with pytest.raises(NoPermission):
        device.read_processes()
    for _ in range(3):
        with pytest.raises(NotSupported):
            device.read_processes()
    clock.advance(RETRY_S + 1)
    with pytest.raises(NotSupported):  # refused again, which is not reported again
        device.read_processes()
    assert [record.getMessage() for record in caplog.records] == [
        "gpu 0: nvmlDeviceGetComputeRunningProcesses_v3 answered NVML_ERROR_NO_PERMISSION; to get this value, "
        "run as root with hostPID; on MIG also set NVIDIA_MIG_MONITOR_DEVICES=all"
    ]


def test_a_field_that_the_board_does_not_support_is_not_a_failure(backend: NvmlBackend, nvml_table: NvmlTable) -> None:
    """Some drivers answer INVALID_ARGUMENT where others answer NOT_SUPPORTED."""
    feed(nvml_table)
    device = first_device(backend)
    nvml_table.set_field(0, 82, 0, error="NVML_ERROR_INVALID_ARGUMENT")
    with pytest.raises(NotSupported):
        device.read_memory_temperature()
    assert device.take_errors() == []
    nvml_table.set_field(0, 82, 50)
    with pytest.raises(NotSupported):
        device.read_memory_temperature()  # the backend does not retry at once


def test_a_failure_reports_whether_the_call_was_answered_before(backend: NvmlBackend, nvml_table: NvmlTable) -> None:
    feed(nvml_table)
    device = first_device(backend)
    nvml_table.set_call(0, "nvmlDeviceGetOfaUtilization", "NVML_ERROR_UNKNOWN")
    with pytest.raises(DeviceError) as never:
        device.read_engine("ofa")
    nvml_table.set_call(0, "nvmlDeviceGetOfaUtilization")
    device.read_engine("ofa")
    nvml_table.set_call(0, "nvmlDeviceGetOfaUtilization", "NVML_ERROR_UNKNOWN")
    with pytest.raises(DeviceError) as lately:
        device.read_engine("ofa")
    assert (never.value.once_answered, lately.value.once_answered) == (False, True)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ("NVML_ERROR_NOT_SUPPORTED", NotSupported),
        ("NVML_ERROR_GPU_IS_LOST", DeviceLost),
        ("NVML_ERROR_RESET_REQUIRED", DeviceLost),
        ("NVML_ERROR_UNKNOWN", DeviceError),
        ("NVML_ERROR_NO_PERMISSION", NoPermission),
        ("NVML_ERROR_LIB_RM_VERSION_MISMATCH", DriverChanged),
    ],
)
def test_errors_are_counted_by_name(
    backend: NvmlBackend, nvml_table: NvmlTable, error: str, kind: type[DeviceError]
) -> None:
    feed(nvml_table)
    device = first_device(backend)
    nvml_table.set_call(0, "nvmlDeviceGetPowerUsage", error)
    with pytest.raises(kind) as caught:
        device.read_power()
    assert type(caught.value) is kind
    assert (caught.value.call, caught.value.error) == ("nvmlDeviceGetPowerUsage", error)
    assert device.read_temperature() > 0


def test_a_lost_handle_affects_only_its_gpu(backend: NvmlBackend, nvml_table: NvmlTable) -> None:
    ScenarioFeeder(parse_scenario({"gpus": [{"model": "H100"}] * 3}), nvml_table)
    nvml_table.set_call(1, "nvmlDeviceGetHandleByIndex", "NVML_ERROR_GPU_IS_LOST")
    backend.open()
    assert backend.count() == 3
    assert [backend.find(i).identity.index for i in (0, 2)] == [0, 2]
    with pytest.raises(DeviceLost, match="nvmlDeviceGetHandleByIndex answered NVML_ERROR_GPU_IS_LOST"):
        backend.find(1)


def test_an_error_names_a_driver_that_is_not_loaded(backend: NvmlBackend, nvml_table: NvmlTable) -> None:
    nvml_table.table.init_rc = 9
    with pytest.raises(
        DriverUnavailable, match=r"the NVIDIA kernel driver is not loaded \(NVML_ERROR_DRIVER_NOT_LOADED\)"
    ):
        backend.open()
    nvml_table.table.init_rc = 18
    with pytest.raises(DriverUnavailable, match="the driver library does not match the kernel module"):
        backend.open()


def test_not_ready_is_asked_in_each_cycle_and_never_remembered(
    make_backend: MakeBackend, nvml_table: NvmlTable
) -> None:
    feed(nvml_table)
    clock = ManualClock()
    nvml_table.set_call(0, "nvmlDeviceGetUtilizationRates", "NVML_ERROR_NOT_READY")
    sampler = DeviceSampler(first_device(make_backend(clock)), registry.DEFAULT, clock, activity_rules(Settings()))

    def not_ready() -> str:
        clock.advance(1.0)
        return sampler.sample().not_ready

    assert {not_ready() for _ in range(30)} == {"nvmlDeviceGetUtilizationRates"}
    nvml_table.set_call(0, "nvmlDeviceGetUtilizationRates")
    assert not_ready() == ""


def test_a_switch_of_mig_drops_values_of_the_other_mode(make_backend: MakeBackend, nvml_table: NvmlTable) -> None:
    """With MIG on, a fabric that failed only degrades the GPU."""
    feed(nvml_table)
    device, clock = nvml_table.table.devices[0], ManualClock()
    device.mig_mode, device.fabric[:] = 1, (3, 23, 0)
    sampler = DeviceSampler(first_device(make_backend(clock)), registry.DEFAULT, clock, activity_rules(Settings()))
    assert sampler.sample().facts.fabric == 4
    device.mig_mode, device.fabric[:] = 0, (3, 0, 0)
    seen = []
    for _ in range(2):
        clock.advance(1.0)
        seen.append(sampler.sample().facts.fabric)
    assert seen[-1] == 3
