"""`--once` reads each GPU in its own thread: an error of one GPU affects only this GPU, and is reported."""

from __future__ import annotations

import threading

import pytest

from gpu_exporter.agent.collectors import registry
from gpu_exporter.agent.devices.protocol import Device
from gpu_exporter.agent.devices.scenario import parse_scenario
from gpu_exporter.agent.devices.simulated import ScenarioTime, SimulatedBackend
from gpu_exporter.agent.sampling.activity.witnesses import ActivityRules
from gpu_exporter.agent.sampling.reader import Reader, Readers
from gpu_exporter.agent.sampling.sampler import DeviceSampler
from gpu_exporter.common.clock import SystemClock

GPU = {"model": "H100", "load": {"kind": "constant", "value": 0.5}}
LOST = {**GPU, "faults": [{"at": 0, "call": "*", "error": "NVML_ERROR_GPU_IS_LOST"}]}
WITHIN_S = 60.0


def read(gpus: list[dict[str, object]], broken: int | None = None) -> list[Reader]:
    """A reader for each GPU, after its end. `broken`: position of a GPU whose reading raises an unforeseen error."""
    clock = SystemClock()

    def make_sampler(device: Device) -> DeviceSampler:
        if device.identity.index == broken:
            raise TypeError("an unforeseen answer of the driver")
        return DeviceSampler(device, registry.ALL, clock, ActivityRules(1.0, 3, 0.3, 0.25))

    backend = SimulatedBackend(ScenarioTime(parse_scenario({"gpus": gpus}), clock))
    readers = Readers(backend, (), clock, make_sampler).take(clock.monotonic() + WITHIN_S)
    assert readers is not None
    assert all(reader.join(clock.monotonic() + WITHIN_S) for reader in readers)
    return readers


def test_a_bug_in_the_exporter_affects_one_gpu_and_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    unseen: list[object] = []
    monkeypatch.setattr(threading, "excepthook", unseen.append)
    first, second, third = read([GPU, GPU, GPU], broken=1)
    assert (first.error, third.error) == ("", "")
    assert first.snapshot is not None and first.snapshot.up and third.snapshot is not None
    text = "internal error (TypeError: an unforeseen answer of the driver): report it with the traceback in the log"
    assert (second.snapshot, second.error, unseen) == (None, text, [])


def test_a_lost_gpu_affects_no_other_gpu_and_is_counted() -> None:
    lost, other = read([LOST, GPU])
    assert other.snapshot is not None and other.snapshot.up
    assert lost.snapshot is None or not lost.snapshot.up
    assert {error for _, error in lost.errors} == {"NVML_ERROR_GPU_IS_LOST"}
