"""GPUs with one UUID get different names, whichever thread finds its GPU first."""

from __future__ import annotations

import threading

import pytest
from tests.testbed.processes import wait_for

from gpu_exporter.agent.devices.protocol import Device
from gpu_exporter.agent.devices.scenario import parse_scenario
from gpu_exporter.agent.devices.simulated import ScenarioTime, SimulatedBackend
from gpu_exporter.agent.runtime.agent import Agent
from gpu_exporter.agent.sampling.loop import DeviceLoop
from gpu_exporter.common.clock import SYSTEM_CLOCK
from gpu_exporter.common.config.defaults import Settings


class Twins(SimulatedBackend):
    """Two GPUs with one UUID. The second one is found first."""

    def __init__(self) -> None:
        stage = ScenarioTime(parse_scenario({"gpus": [{"model": "H100"}] * 2}), SYSTEM_CLOCK)
        super().__init__(stage)
        self.second_found = threading.Event()

    def find(self, position: int) -> Device:
        device = super().find(position)
        if position == 0:
            assert self.second_found.wait(60.0)
        device.identity = device.identity._replace(uuid="GPU-1")
        return device


def names(agent: Agent) -> list[str]:
    return [device.identity.uuid for device, _ in agent.devices._devices()]


def test_the_first_thread_finds_its_gpu_before_its_start_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, start = Twins(), DeviceLoop.start
    agent = Agent(Settings(), backend, [], SYSTEM_CLOCK)

    def start_slowly(loop: DeviceLoop) -> None:
        start(loop)
        if loop.position == 1:
            wait_for(lambda: 1 in agent.devices._found, "the second GPU")
            backend.second_found.set()
            wait_for(lambda: 0 in agent.devices._found, "the first GPU")

    monkeypatch.setattr(DeviceLoop, "start", start_slowly)
    agent.start()
    try:
        wait_for(lambda: sorted("@" in name for name in names(agent)) == [True, True], "two names", timeout_s=20.0)
        assert len(set(names(agent))) == 2
    finally:
        agent.stop()
