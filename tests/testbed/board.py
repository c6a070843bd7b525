"""A fake NVML library with scripted answers: each call of each GPU can be set, or made to fail, separately."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from gpu_exporter.agent.collectors import registry
from gpu_exporter.agent.devices.errors import DeviceError, NotSupported, device_error
from gpu_exporter.agent.devices.nvml import constants as nvml
from gpu_exporter.agent.devices.nvml.backend import NvmlBackend
from gpu_exporter.agent.devices.nvml.library import SYSTEM, Handle
from gpu_exporter.agent.devices.nvml.recording import Recorder
from gpu_exporter.agent.runtime.wiring import activity_rules
from gpu_exporter.agent.sampling.sampler import DeviceSampler
from gpu_exporter.common.clock import ManualClock
from gpu_exporter.common.config.defaults import Settings

FIELDS, SAMPLES, GPM = "nvmlDeviceGetFieldValues", "nvmlDeviceGetSamples", "nvmlGpmMetricsGet"
GIB = 2**30
Question: TypeAlias = tuple[str, str, tuple[Any, ...]]  # call, place of the device, arguments


@dataclass
class Board:
    """One GPU. `answers`: by call, or by call and arguments; the name of an error is raised. `fields`: by field id.

    `instances`: for a board with MIG, the answers of each instance by call.
    """

    answers: dict[Any, Any] = field(default_factory=dict)
    fields: dict[int, Any] = field(default_factory=dict)
    instances: Sequence[dict[str, Any]] = ()


def healthy(index: int = 0, **more: Any) -> Board:
    """A board of the Ada generation, half busy."""
    answers: dict[Any, Any] = {
        "nvmlDeviceGetUUID": f"GPU-{index:08d}-0000-4000-8000-000000000000",
        "nvmlDeviceGetName": "NVIDIA L40S",
        "nvmlDeviceGetPciInfo": f"00000000:{0x10 + index:02X}:00.0",
        "nvmlDeviceGetMinorNumber": index,
        "nvmlDeviceGetPersistenceMode": 1,
        "nvmlDeviceGetUtilizationRates": [50, 12],
        "nvmlDeviceGetEncoderUtilization": 3,
        "nvmlDeviceGetDecoderUtilization": 4,
        "nvmlDeviceGetMemoryInfo": [48 * GIB, 10 * GIB, 37 * GIB, GIB],
        "nvmlDeviceGetPowerUsage": 123456,
        "nvmlDeviceGetEnforcedPowerLimit": 300000,
        "nvmlDeviceGetTotalEnergyConsumption": 987654321,
        "nvmlDeviceGetTemperatureV": 55,
        "nvmlDeviceGetTemperature": 55,
        "nvmlDeviceGetTemperatureThreshold": 90,
        "nvmlDeviceGetClockInfo": 2505,
        "nvmlDeviceGetMaxClockInfo": 3105,
        "nvmlDeviceGetPerformanceState": 2,
        "nvmlDeviceGetTotalEccErrors": 5,
        "nvmlDeviceGetRemappedRows": [1, 2, 0, 0],
        "nvmlDeviceGetComputeRunningProcesses_v3": 2,
        "nvmlDeviceGetGraphicsRunningProcesses_v3": 1,
        "nvmlDeviceGetMigMode": 0,
        "nvmlGpmQueryDeviceSupport": 1,
        GPM: [1.0, [[metric, 0, 50.0] for metric in nvml.GPM_METRICS]],
        SAMPLES: "NVML_ERROR_NOT_SUPPORTED",
        **more,
    }
    fields = dict.fromkeys((74, 75, 76, 77, 78, 79, 269, 270, 271), 7_000_000_000)
    fields |= {29: 1, 30: 2, 82: 60, 94: 3, 197: 10**9, 198: 2 * 10**9, 138: 10**6, 139: 10**6, 230: 0}
    return Board(answers, fields)


def with_mig(index: int = 0, **more: Any) -> Board:
    """A healthy board with two MIG instances, at positions 0 and 2 of seven."""
    refused = dict.fromkeys(
        ("nvmlDeviceGetUtilizationRates", "nvmlDeviceGetEncoderUtilization", "nvmlDeviceGetDecoderUtilization"),
        "NVML_ERROR_NOT_SUPPORTED",
    )
    board = healthy(index, **{"nvmlDeviceGetMigMode": 1, "nvmlDeviceGetMaxMigDeviceCount": 7, **refused, **more})
    board.answers["nvmlGpuInstanceGetInfo"] = [14, 0]
    board.instances = [
        {
            "nvmlDeviceGetUUID": f"MIG-0000000{number}-0000-4000-8000-000000000000",
            "nvmlDeviceGetAttributes_v2": [2, 9856, 2],
            "nvmlDeviceGetGpuInstanceId": 3 + number,
            "nvmlDeviceGetComputeInstanceId": 0,
            "nvmlDeviceGetName": "NVIDIA L40S MIG 2g.10gb",
            "nvmlDeviceGetMemoryInfo": [10 * GIB, 2 * GIB, 8 * GIB, 0],
            "nvmlDeviceGetComputeRunningProcesses_v3": 1,
            "nvmlDeviceGetGraphicsRunningProcesses_v3": 1,
        }
        for number in range(2)
    ]
    return board


class Boards:
    """A driver with these boards. `set`: replacement answers of single questions. `asked`: every question so far."""

    def __init__(self, *boards: Board, driver: str = "580.95.05") -> None:
        self.boards = boards
        self.driver = driver
        self.set: dict[Question, Any] = {}
        self.asked: dict[Question, Any] = {}

    def open(self) -> None:
        return

    def close(self) -> None:
        return

    def ask(self, call: str, handle: Handle = SYSTEM, *arguments: Any) -> Any:
        if call in ("nvmlGpmSampleFree", "nvmlEventSetFree"):
            return None
        if call == FIELDS:
            return tuple(self._field(handle, *each) for each in arguments[0])
        known = tuple(arguments) if call not in (GPM, SAMPLES, "nvmlDeviceGetProcessUtilization") else arguments[:1]
        question = (call, handle.name, known)
        answer = self.set[question] if question in self.set else self._answer(call, handle.name, known)
        self.asked.setdefault(question, answer)
        if isinstance(answer, str) and answer.startswith("NVML_ERROR"):
            raise device_error(call, answer)
        if call in ("nvmlDeviceGetHandleByIndex", "nvmlDeviceGetMigDeviceHandleByIndex"):
            return Handle(answer)
        return answer

    def _field(self, handle: Handle, number: int, scope: int) -> tuple[int, Any]:
        question = (FIELDS, handle.name, (number, scope))
        known = self.boards[int(handle.name)].fields
        value = self.set[question] if question in self.set else known.get(number, "NVML_ERROR_NOT_SUPPORTED")
        self.asked.setdefault(question, value)
        if isinstance(value, str):
            return CODES[value], 0
        return 0, value

    def _answer(self, call: str, place: str, arguments: tuple[Any, ...]) -> Any:
        if call == "nvmlSystemGetDriverVersion":
            return self.driver
        if call == "nvmlDeviceGetCount":
            return len(self.boards)
        if call == "nvmlDeviceGetHandleByIndex":
            return str(arguments[0])
        if not place:
            raise NotSupported(call, "NVML_ERROR_NOT_SUPPORTED")
        index, _, position = place.partition("/")
        board = self.boards[int(index)]
        if call == "nvmlDeviceGetMigDeviceHandleByIndex":
            at = arguments[0]
            is_there = at % 2 == 0 and at // 2 < len(board.instances)
            return f"{place}/{at}" if is_there else "NVML_ERROR_NOT_FOUND"
        answers: Mapping[Any, Any] = board.instances[int(position) // 2] if position else board.answers
        for key in ((call, *arguments), call):
            if key in answers:
                return answers[key]
        return "NVML_ERROR_NOT_SUPPORTED"


CODES = {name: code for code, name in nvml.ERROR_NAMES.items()}


def record(boards: Boards, path: Path, seconds: float = 3600.0) -> None:
    """Write the answers of these boards as a recording that `--devices.replay` plays."""
    clock = ManualClock()
    recorder = Recorder(boards, hashed=False, clock=clock.monotonic)
    backend = NvmlBackend(recorder, clock)
    backend.open()
    for _ in range(2):
        for position in range(backend.count()):
            try:
                device = backend.find(position)
                DeviceSampler(device, registry.ALL, clock, activity_rules(Settings())).sample()
                device.read_persistence_mode()
            except DeviceError:
                continue
        clock.advance(seconds)
    path.write_bytes(recorder.render(exporter="TEST"))
