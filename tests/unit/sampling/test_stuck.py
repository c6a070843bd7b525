"""A utilization of 100 % at rest is no evidence; the utilization of a working GPU is valid at any clock speed."""

from __future__ import annotations

from typing import Any

import pytest
from tests.testbed.board import Boards, healthy

from gpu_exporter.agent.collectors import registry
from gpu_exporter.agent.devices.nvml.backend import NvmlBackend
from gpu_exporter.agent.runtime.wiring import activity_rules
from gpu_exporter.agent.sampling.activity.stuck import LASTS_S
from gpu_exporter.agent.sampling.sampler import DeviceSampler
from gpu_exporter.common.clock import ManualClock
from gpu_exporter.common.config.defaults import Settings
from gpu_exporter.common.model.readings import DeviceSnapshot

STUCK: dict[str, Any] = {
    "nvmlDeviceGetUtilizationRates": [100, 1],
    "nvmlDeviceGetComputeRunningProcesses_v3": 0,
    "nvmlDeviceGetGraphicsRunningProcesses_v3": 0,
    "nvmlDeviceGetPowerUsage": 8000,
    "nvmlDeviceGetEnforcedPowerLimit": 145000,
    "nvmlDeviceGetPerformanceState": 8,
    "nvmlGpmQueryDeviceSupport": 0,
}


def last(seconds: float, **changes: Any) -> DeviceSnapshot:
    clock = ManualClock()
    backend = NvmlBackend(Boards(healthy(**{**STUCK, **changes})), clock)
    sampler = DeviceSampler(backend.find(0), registry.ALL, clock, activity_rules(Settings()))
    for _ in range(int(seconds)):
        clock.advance(1.0)
        snapshot = sampler.sample()
    return snapshot


def test_a_stuck_utilization_counter_is_ignored_after_a_minute() -> None:
    before = last(LASTS_S - 2)
    assert before.contradiction == "" and before.activity is not None and before.activity.spans
    after = last(LASTS_S + 6)
    assert (
        after.contradiction == "the driver reports 100 % at rest (P8, 8 W) and lists no process: the counter is stuck"
    )
    assert after.activity is None and after.up


@pytest.mark.parametrize(
    "changes",
    [
        {"nvmlDeviceGetComputeRunningProcesses_v3": 1},
        {"nvmlDeviceGetGraphicsRunningProcesses_v3": 1},
        {"nvmlDeviceGetComputeRunningProcesses_v3": "NVML_ERROR_UNKNOWN"},  # it is unknown whether there is a process
        {"nvmlDeviceGetPowerUsage": 60000},
        {"nvmlDeviceGetPerformanceState": 0},
        {"nvmlDeviceGetPerformanceState": "NVML_ERROR_NOT_SUPPORTED"},
        {"nvmlDeviceGetUtilizationRates": [60, 1]},
    ],
)
def test_the_utilization_of_a_gpu_that_may_work_is_used(changes: dict[str, Any]) -> None:
    snapshot = last(LASTS_S + 10, **changes)
    assert snapshot.contradiction == ""
    assert snapshot.activity is not None and snapshot.activity.spans
