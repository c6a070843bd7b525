"""A first device on the fake C library, and a scenario that feeds it."""

from __future__ import annotations

from collections.abc import Callable

from gpu_exporter.agent.devices.nvml.backend import NvmlBackend
from gpu_exporter.agent.devices.nvml.device import NvmlDevice
from gpu_exporter.agent.devices.scenario import parse_scenario
from tests.testbed.nvml.feeder import NvmlTable, ScenarioFeeder

MakeBackend = Callable[..., NvmlBackend]


def first_device(backend: NvmlBackend) -> NvmlDevice:
    backend.open()
    device = backend.find(0)
    assert isinstance(device, NvmlDevice)
    return device


def feed(table: NvmlTable, **gpu: object) -> ScenarioFeeder:
    return ScenarioFeeder(parse_scenario({"gpus": [{"model": "H100", **gpu}]}), table)
