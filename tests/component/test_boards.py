"""Answers of boards from public reports, as recordings: each board is named, up, and shows only values that it reported.

The numbers come from the report that is named with each board; names, UUIDs and addresses are invented.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.testbed.board import GIB, Board, Boards, healthy, record, with_mig
from tests.testbed.processes import GPU_EXPORTER

UNSUPPORTED, DENIED, DEPRECATED = "NVML_ERROR_NOT_SUPPORTED", "NVML_ERROR_NO_PERMISSION", "NVML_ERROR_DEPRECATED"
MEMORY, CLOCK, LIMIT = "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetClockInfo", "nvmlDeviceGetEnforcedPowerLimit"
UTILIZATION, POWER, ENERGY = (
    "nvmlDeviceGetUtilizationRates",
    "nvmlDeviceGetPowerUsage",
    "nvmlDeviceGetTotalEnergyConsumption",
)
HANDLE = "nvmlDeviceGetHandleByIndex"
RESET = {"name": "recovery_action", "severity": "unusable", "text": "asks for a reset"}


class Case(NamedTuple):
    """`shown`: of each GPU's object in JSON; `there`, `absent`: series, by the beginning of their line; `said`: of
    standard error; `asked`: answers of single questions.
    """

    boards: Sequence[Board]
    shown: Sequence[Mapping[str, Any]]
    there: Sequence[str] = ()
    absent: Sequence[str] = ()
    exit_code: int = 0
    said: str = ""
    asked: Mapping[Any, Any] = {}


def gb10(**more: Any) -> Board:
    """NVIDIA/daqiri#30, XuehaiPan/nvitop#208: the memory clock and the limit are not supported, the SM clock is."""
    own = {LIMIT: UNSUPPORTED, POWER: 11170, UTILIZATION: [36, 0], **more}
    board = healthy(nvmlDeviceGetName="NVIDIA GB10", nvmlDeviceGetPciInfo="0000000F:01:00.0", **own)
    board.answers[CLOCK, 2] = UNSUPPORTED
    return board


def only(**answers: Any) -> Board:
    """A board that answers only these calls."""
    return Board(dict(answers))


CASES = {
    "a GB10 knows one clock of two": Case(
        [gb10(nvmlDeviceGetMemoryInfo=UNSUPPORTED)],
        [{"name": "NVIDIA GB10", "up": True, "utilization_ratio": 0.36, "power_watts": 11.17}],
        ["gpu_sm_clock_hertz"],
        ["gpu_memory_clock_hertz", "gpu_memory_used_bytes", "gpu_power_limit_watts"],
    ),
    "host memory is not reported as board memory": Case(  # Syllo/nvtop#463 #449 #511, aristocratos/btop#1611
        [gb10(nvmlDeviceGetMemoryInfo=[130663165952, 9251205120, 121411960832, 0])],
        [{"up": True, "memory_used_bytes": None, "memory_total_bytes": None}],
        ["gpu_sm_clock_hertz"],
        ["gpu_memory_used_bytes", "gpu_memory_total_bytes"],
    ),
    "an Orin answers its name and UUID": Case(  # ultralytics#20680, Chen-zexi/vllm-cli#11
        [only(nvmlDeviceGetUUID="ddae9891-0000-5edd-0000-3a33c5adc75f", nvmlDeviceGetName="Orin (nvgpu)")],
        [{"name": "Orin (nvgpu)", "uuid": "ddae9891-0000-5edd-0000-3a33c5adc75f", "up": True, "power_watts": None}],
        ["gpu_up{"],
        ["gpu_utilization_ratio", "gpu_power_watts"],
    ),
    "identity calls fail alone": Case(  # utkuozdemir/nvidia_gpu_exporter, the class of case 08
        [
            healthy(0, nvmlDeviceGetMinorNumber="NVML_ERROR_UNKNOWN"),
            healthy(1, nvmlDeviceGetMinorNumber=DENIED),
            healthy(2, nvmlDeviceGetPciInfo=UNSUPPORTED),
            healthy(3, nvmlDeviceGetName=UNSUPPORTED, nvmlDeviceGetMigMode=DENIED),
        ],
        [{"up": True, "utilization_ratio": 0.5}] * 4,
        ['gpu_up{gpu="3",'],
        said="gpu 1: nvmlDeviceGetMinorNumber answered NVML_ERROR_NO_PERMISSION; to get this value, run as root",
    ),
    "a vGPU guest has neither power nor temperature": Case(  # utkuozdemir/nvidia_gpu_exporter#384
        [
            healthy(
                **dict.fromkeys(
                    (POWER, LIMIT, ENERGY, "nvmlDeviceGetTemperatureV", "nvmlDeviceGetTemperature"), UNSUPPORTED
                ),
                **{MEMORY: [16 * GIB, 3 * GIB, 12 * GIB, GIB]},
            )
        ],
        [{"up": True, "memory_used_bytes": 3.0 * GIB, "power_watts": None, "temperature_celsius": None}],
        ["gpu_memory_used_bytes"],
        ["gpu_energy_joules_total", "gpu_power_watts", "gpu_temperature_celsius"],
    ),
    "a requested reset is reported": Case(  # utkuozdemir#393, scitix/sichek#121
        [healthy(0), Board(healthy(1).answers, {**healthy(1).fields, 230: 1})],
        [{"conditions": []}, {"up": True, "conditions": [RESET]}],
        exit_code=4,
        said="partial: gpu 1 asks for a reset",
    ),
    "PCI domains are as long as in the kernel": Case(  # beam-cloud/beta9#984, NVIDIA/nvidia-docker#1316
        [
            healthy(0, nvmlDeviceGetPciInfo="00000000:01:00.0"),
            healthy(1, nvmlDeviceGetPciInfo="00010000:01:00.0"),
            healthy(2, nvmlDeviceGetPciInfo="0000460E:00:00.0"),
        ],
        [{"pci_bus_id": "00000000:01:00.0"}, {"pci_bus_id": "00010000:01:00.0"}, {"pci_bus_id": "0000460e:00:00.0"}],
    ),
    "a MIG board without a total": Case(  # rapidsai/jupyterlab-nvdashboard#234
        [with_mig(nvmlDeviceGetMemoryInfo=[0, 0, 0, 0])],
        [{"up": True, "memory_total_bytes": None, "mig_mode": "enabled"}],
        ["gpu_mig_memory_used_bytes", 'gpu_mig_info{gpu="0"'],
        ["gpu_memory_total_bytes", "gpu_memory_used_bytes"],
    ),
    "a MIG board that shows its memory only to root": Case(  # NVIDIA/k8s-device-plugin#1683
        [
            with_mig(
                **dict.fromkeys(
                    (MEMORY, "nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetGraphicsRunningProcesses_v3"),
                    DENIED,
                )
            )
        ],
        [{"up": True, "memory_used_bytes": None}],
        ["gpu_mig_memory_used_bytes"],
        ["gpu_memory_used_bytes"],
        said="nvmlDeviceGetMemoryInfo answered NVML_ERROR_NO_PERMISSION; to get this value, with MIG on: run as root",
    ),
    "MIG mode is on and there is no instance": Case(
        [healthy(0, nvmlDeviceGetMigMode=1, **{UTILIZATION: UNSUPPORTED}), healthy(1)],
        [{"up": True, "utilization_ratio": None, "instances": []}, {"up": True, "utilization_ratio": 0.5}],
    ),
    "a call that the driver calls deprecated is not supported": Case(  # 1Panel#11910, driver 610
        [healthy(nvmlDeviceGetRemappedRows=DEPRECATED, nvmlDeviceGetTemperatureThreshold=DEPRECATED)],
        [{"up": True, "utilization_ratio": 0.5}],
        ["gpu_temperature_celsius"],
        ["gpu_remapped_rows", "gpu_temperature_limit"],
    ),
    "persistence mode off is a warning": Case(
        [healthy(nvmlDeviceGetPersistenceMode=0)], [{"up": True}], said="persistence mode is off on 1 GPU"
    ),
    "a mobile GPU without a limit": Case(  # Syllo/nvtop#79
        [healthy(**{LIMIT: 4294967295, ENERGY: 0, POWER: 0})],
        [{"up": True, "power_watts": None}],
        ["gpu_utilization_ratio"],
        ["gpu_power_limit_watts", "gpu_power_watts"],
    ),
    "a utilization with all bits set is not published": Case(  # NVIDIA/go-dcgm#75
        [healthy(**{UTILIZATION: [4294967295, 4294967295]})],
        [{"up": True, "utilization_ratio": None}],
        ["gpu_power_watts"],
        ["gpu_utilization_ratio"],
    ),
    "a full board at 1.4 kW": Case(  # NVIDIA/k8s-test-infra#676
        [healthy(**{MEMORY: [298013687808, 297690726400, 0, 734003200], POWER: 1390000, LIMIT: 1400000})],
        [{"up": True, "memory_used_bytes": 297690726400.0, "power_watts": 1390.0}],
        ["gpu_power_limit_watts"],
    ),
    "a driver without a GPU": Case([], [], exit_code=0, said="no GPU is expected here"),
    "a GPU whose handle cannot be opened": Case(  # deepspeed#5482, dcgm-exporter#604
        [healthy(0), healthy(1), healthy(2)],
        [{"up": True}, {"up": False, "error": f"{HANDLE} answered NVML_ERROR_IRQ_ISSUE"}, {"up": True}],
        exit_code=4,
        said=f"partial: gpu 1: {HANDLE} answered NVML_ERROR_IRQ_ISSUE",
        asked={(HANDLE, "", (1,)): "NVML_ERROR_IRQ_ISSUE"},
    ),
}


def once(recording: Path, form: str) -> subprocess.CompletedProcess[str]:
    flags = (f"--devices.replay={recording}", f"--format={form}", "--state.directory=", "--no-attribution.slurm")
    return subprocess.run([*GPU_EXPORTER, "--once", *flags], capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize("name", CASES)
def test_a_board_shows_only_the_values_it_reported(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    boards = Boards(*case.boards)
    boards.set.update(case.asked)
    record(boards, tmp_path / "board.gz")
    done = once(tmp_path / "board.gz", "json")
    assert done.returncode == case.exit_code, done.stderr
    assert case.said in done.stderr
    assert "Traceback" not in done.stderr
    found = json.loads(done.stdout)["gpus"]
    assert len(found) == len(case.shown)
    for gpu, shown in zip(found, case.shown, strict=True):
        assert {key: gpu[key] for key in shown} == shown
    lines = once(tmp_path / "board.gz", "prometheus").stdout.splitlines()
    assert [each for each in case.there if not any(line.startswith(each) for line in lines)] == []
    assert [line for line in lines if line.startswith(tuple(case.absent))] == [] or not case.absent
