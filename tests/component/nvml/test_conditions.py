"""What is wrong with a GPU, on the fake C library: row, JSON, exit code and series agree on each condition."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from gpu_exporter.agent.devices.nvml import constants as nvml
from gpu_exporter.agent.devices.scenario import parse_scenario
from gpu_exporter.common.model.rows import join_rows
from tests.component.nvml.nvml_bench import feed
from tests.testbed.nvml.feeder import ERROR_NUMBERS, NvmlTable, ScenarioFeeder
from tests.testbed.processes import run_exporter

REFUSED = ERROR_NUMBERS["NVML_ERROR_INSUFFICIENT_RESOURCES"]
Change = Callable[[NvmlTable], Any]


def device(table: NvmlTable) -> Any:
    return table.table.devices[0]


def ask_for(action: int) -> Change:
    return lambda table: table.set_field(0, nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, action)


def remap(pending: int, failed: int, action: int = 0) -> Change:
    def change(table: NvmlTable) -> None:
        device(table).remapped[:] = (1, 1, pending, failed)
        ask_for(action)(table)

    return change


def fabric(state: int, status: int = 0, health: int = 0, *, newest: int = 0, mig: int = 0) -> Change:
    def change(table: NvmlTable) -> None:
        device(table).fabric[:] = (state, status, health)
        device(table).fabric_version, device(table).mig_mode = newest, mig

    return change


def refuse(*calls: str) -> Change:
    return lambda table: [table.set_call(0, call, "NVML_ERROR_NOT_READY") for call in calls]


def lose(table: NvmlTable) -> None:
    table.set_call(0, "*", "NVML_ERROR_GPU_IS_LOST")


# The host of a test has been up for longer than the fabric may take (ten minutes), or the condition is degraded.
@pytest.mark.parametrize(
    ("change", "name", "severity", "text"),
    [
        (ask_for(1), "recovery_action", "unusable", "asks for a reset"),
        (ask_for(4), "recovery_action", "unusable", "asks for a drain and a reset"),
        (remap(0, 1), "row_remap_failed", "unusable", "a row remap failed: replace the board"),
        (remap(1, 0), "row_remap_pending", "degraded", "a row remap waits for a reset"),
        (remap(1, 0, action=4), "row_remap_pending", "degraded", "a row remap waits for a reset"),
        (fabric(1), "fabric_not_ready", "unusable", "NVLink fabric not ready (not started)"),
        (fabric(2), "fabric_not_ready", "unusable", "NVLink fabric not ready (in progress)"),
        (fabric(2, newest=2), "fabric_not_ready", "unusable", "NVLink fabric not ready (in progress)"),
        (fabric(2, newest=1), "fabric_not_ready", "unusable", "NVLink fabric not ready (in progress)"),
        (fabric(2, mig=1), "fabric_not_ready", "degraded", "NVLink fabric not ready (in progress)"),
        (fabric(3, REFUSED), "fabric_failed", "unusable", "NVLink fabric failed (insufficient resources)"),
        (fabric(3, 0, 0b01 | 0b10 << 4), "fabric_degraded", "degraded", "NVLink fabric degraded (degraded bandwidth)"),
        (refuse("nvmlDeviceGetUtilizationRates"), "not_ready", "unusable", "nvidia-smi conf-compute -srs 1"),
        (
            refuse("nvmlDeviceGetTotalEnergyConsumption"),
            "not_ready",
            "unusable",
            "not in ready state; with confidential computing",
        ),
        (lose, "lost", "unusable", "NVML_ERROR_GPU_IS_LOST"),
    ],
)
def test_row_json_exit_code_and_series_agree(
    nvml_environment: dict[str, str], nvml_table: NvmlTable, change: Change, name: str, severity: str, text: str
) -> None:
    ScenarioFeeder(parse_scenario({"gpus": [{"model": "H100"}, {"model": "H100"}]}), nvml_table)
    change(nvml_table)
    quiet = ("--once", "--state.directory=", "--no-attribution.slurm", "--no-attribution.kubelet", "--check=devices")
    done = run_exporter(*quiet, "--format=json", environment=nvml_environment)
    status = json.loads(done.stdout)
    first, second = status["gpus"]
    found = {each["name"]: each for each in first["conditions"]}
    assert (found[name]["severity"], text in found[name]["text"]) == (severity, True), found
    unusable = any(each["severity"] == "unusable" for each in first["conditions"])
    assert unusable == (severity == "unusable")
    assert done.returncode == (4 if unusable else 0)
    assert status["devices_health"] == ("partial" if unusable else "ok")
    assert (text in done.stderr) == unusable, "the exit code says why"
    assert ("failed checks: " in done.stderr) == unusable
    assert [text in row.why for row in join_rows(status)] == [True, False]
    assert second["conditions"] == []
    prom = run_exporter(*quiet, environment=nvml_environment)
    uuid = first["uuid"]
    own = f'uuid="{uuid}",' if uuid else ""  # a GPU that was never read has none
    labels = f'{{gpu="0",{own}condition="{name}",severity="{severity}"}} 1\n'
    assert f"gpu_condition{labels}" in prom.stdout and 'gpu_condition{gpu="1"' not in prom.stdout
    assert prom.returncode == done.returncode


@pytest.mark.parametrize(
    "change",
    [
        fabric(0),  # a board without NVSwitches
        fabric(3, 0, 0b10 | 0b10 << 2 | 0b10 << 4 | 0b10 << 6 | 1 << 8),  # every problem is reported as absent
        fabric(3, 0, 0xFFFFFFFF),
        remap(0, 0),
        lambda table: table.set_call(0, "nvmlDeviceGetGpuFabricInfo", "NVML_ERROR_NOT_SUPPORTED"),
        lambda table: table.set_call(0, "nvmlDeviceGetNvLinkState", "NVML_ERROR_NOT_SUPPORTED"),
        refuse("nvmlDeviceGetEncoderUtilization"),  # no call that shows whether the GPU is ready
    ],
)
def test_a_healthy_gpu_has_no_condition(
    nvml_environment: dict[str, str], nvml_table: NvmlTable, change: Change
) -> None:
    feed(nvml_table)
    change(nvml_table)
    quiet = ("--once", "--state.directory=", "--no-attribution.slurm", "--no-attribution.kubelet", "--check=devices")
    done = run_exporter(*quiet, "--format=json", environment=nvml_environment)
    assert (done.returncode, json.loads(done.stdout)["gpus"][0]["conditions"]) == (0, [])
