"""A GPU that answers no call is down, for every error of the driver and for any length of time."""

from __future__ import annotations

import pytest
from tests.testbed.board import Board, Boards, healthy

from gpu_exporter.agent.collectors import registry
from gpu_exporter.agent.devices.errors import DeviceError, device_error
from gpu_exporter.agent.devices.nvml.backend import NvmlBackend
from gpu_exporter.agent.runtime.wiring import activity_rules
from gpu_exporter.agent.sampling.loop import DeviceLoop, LoopEvents
from gpu_exporter.agent.sampling.sampler import DeviceSampler
from gpu_exporter.common.clock import ManualClock
from gpu_exporter.common.config.defaults import Settings
from gpu_exporter.common.model.readings import DeviceSnapshot

OPENS = ("nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetUUID", "nvmlSystemGetDriverVersion")


class Mute(Boards):
    """From `begins` on every call fails with `error`; the calls of OPENS fail `opens_s` seconds later."""

    def __init__(self, clock: ManualClock, error: str, opens_s: float) -> None:
        super().__init__(healthy())
        self._clock, self._error, self._opens_s = clock, error, opens_s
        self.begins = float("inf")
        self.denied = ""
        self.keeps: frozenset[str] = frozenset()  # errors that the driver continues to return

    def ask(self, call: str, *arguments: object) -> object:  # type: ignore[override]
        since = self._clock.monotonic() - self.begins
        if call == self.denied:
            raise device_error(call, "NVML_ERROR_NO_PERMISSION")
        if since >= 0 and call != "nvmlGpmSampleFree" and (call not in OPENS or since > self._opens_s):
            if self.keeps:
                try:
                    super().ask(call, *arguments)  # type: ignore[arg-type]
                except DeviceError as exc:
                    if exc.error in self.keeps:
                        raise
            raise device_error(call, self._error)
        return super().ask(call, *arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("keeps", [frozenset[str](), frozenset(["NVML_ERROR_NOT_SUPPORTED"])], ids=["all", "some"])
@pytest.mark.parametrize("answers_first", [True, False])
@pytest.mark.parametrize("opens_s", [-1.0, 7.0, 20.0, 1e9])
@pytest.mark.parametrize("interval_s", [0.25, 1.0])
@pytest.mark.parametrize("error", ["NVML_ERROR_UNKNOWN", "NVML_ERROR_TIMEOUT", "NVML_ERROR_NO_PERMISSION"])
def test_a_mute_gpu_remains_down(
    error: str, interval_s: float, opens_s: float, answers_first: bool, keeps: frozenset[str]
) -> None:
    """`keeps`: an old board with few supported calls still returns these errors while every other call fails."""
    clock = ManualClock()
    boards = Mute(clock, error, opens_s)
    boards.keeps = keeps
    if keeps:
        answers = boards.boards[0].answers
        for call in sorted(answers)[::2]:
            if call not in (*OPENS, "nvmlDeviceGetUtilizationRates", "nvmlDeviceGetPowerUsage"):
                answers[call] = "NVML_ERROR_NOT_SUPPORTED"
        boards.boards[0].fields.clear()
    snapshots: list[DeviceSnapshot] = []
    backend = NvmlBackend(boards, clock)
    loop = DeviceLoop(
        0,
        backend.find,
        lambda device: DeviceSampler(device, registry.DEFAULT, clock, activity_rules(Settings())),
        clock,
        interval_s,
        10.0,
        LoopEvents(snapshots.append, lambda reason: None, lambda: None),
    )
    for _ in range(5 if answers_first else 0):
        loop._cycle()
        clock.advance(interval_s)
    up = [each.up for each in snapshots]
    boards.begins = clock.monotonic()
    for _ in range(int(700 / interval_s)):
        loop._cycle()
        clock.advance(interval_s)
    assert up == [True] * len(up)
    expected_up = (
        error == "NVML_ERROR_NO_PERMISSION" and not answers_first
    )  # missing permission: not a fault of the GPU
    if not expected_up:
        assert not any(each.up for each in snapshots[len(up) :])


def test_a_board_with_few_supported_calls_and_one_failing_call_is_up() -> None:
    """As Jetson boards and vGPU guests: slow questions are not asked in every cycle."""
    refused = {call: "NVML_ERROR_NOT_SUPPORTED" for call in healthy().answers if call != "nvmlDeviceGetUUID"}
    kept = {call: healthy().answers[call] for call in ("nvmlDeviceGetName", "nvmlDeviceGetEnforcedPowerLimit")}
    board = Board({**healthy().answers, **refused, **kept, "nvmlDeviceGetMinorNumber": "NVML_ERROR_UNKNOWN"})
    clock = ManualClock()
    backend = NvmlBackend(Boards(board), clock)
    sampler = DeviceSampler(backend.find(0), registry.DEFAULT, clock, activity_rules(Settings()))
    up = []
    for _ in range(60):
        up.append(sampler.sample().up)
        clock.advance(1.0)
    assert up.count(False) <= 3, "only while the failing call is still asked in every cycle"


@pytest.mark.parametrize("call", ["nvmlDeviceGetMigMode", "nvmlDeviceGetComputeRunningProcesses_v3"])
def test_a_missing_permission_hides_no_mute_gpu(call: str) -> None:
    clock = ManualClock()
    boards = Mute(clock, "NVML_ERROR_UNKNOWN", 1e9)
    boards.begins = 0.0
    boards.denied = call
    sampler = DeviceSampler(NvmlBackend(boards, clock).find(0), registry.DEFAULT, clock, activity_rules(Settings()))
    for _ in range(60):
        assert not sampler.sample().up
        clock.advance(1.0)


def test_a_board_that_supports_nothing_is_up() -> None:
    clock = ManualClock()
    boards = Mute(clock, "NVML_ERROR_NOT_SUPPORTED", 1e9)
    boards.begins = 0.0
    sampler = DeviceSampler(NvmlBackend(boards, clock).find(0), registry.DEFAULT, clock, activity_rules(Settings()))
    for _ in range(20):
        assert sampler.sample().up
        clock.advance(1.0)
