"""The test to copy with template.py: a value, a missing value, a call that fails, an implausible value."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.unit.collectors.template import FAN, GPU_FAN_SPEED_RATIO

from gpu_exporter.agent.collectors.contract import Cycle, Totals
from gpu_exporter.agent.devices.errors import OUT_OF_RANGE, DeviceError, NotSupported


class Device:
    """Only what this collector asks for."""

    def __init__(self, read_fan_speed: Callable[[], float]) -> None:
        self.read_fan_speed = read_fan_speed


def collect(read: Callable[[], float]) -> Cycle:
    cycle = Cycle(Device(read), {}, lambda: 0.0, Totals())  # type: ignore[arg-type]
    assert FAN.collect is not None
    FAN.collect(cycle)
    return cycle


def fail(exc: DeviceError) -> Callable[[], float]:
    def read() -> float:
        raise exc

    return read


def test_a_value_is_published() -> None:
    assert collect(lambda: 0.4).value(GPU_FAN_SPEED_RATIO) == 0.4


@pytest.mark.parametrize(
    ("read", "errors", "remarks"),
    [
        (fail(NotSupported("nvmlDeviceGetFanSpeed", "NVML_ERROR_NOT_SUPPORTED")), [], []),
        (fail(DeviceError("nvmlDeviceGetFanSpeed", "NVML_ERROR_UNKNOWN")), [("nvmlDeviceGetFanSpeed", "NVML_ERROR_UNKNOWN")], []),
        (lambda: 7.0, [], [("nvmlDeviceGetFanSpeed", OUT_OF_RANGE)]),
    ],
    ids=["not supported", "failed", "implausible"],
)  # fmt: skip
def test_a_value_that_is_missing_is_absent_and_a_failure_is_counted(
    read: Callable[[], float], errors: list[tuple[str, str]], remarks: list[tuple[str, str]]
) -> None:
    cycle = collect(read)
    assert cycle.samples == []
    assert (cycle.errors, cycle.remarks) == (errors, remarks)
