"""`gpu-exporter record` on a host. The file shows the same node on another machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_exporter.agent.devices.nvml.recording import read_recording
from gpu_exporter.agent.devices.scenario import parse_scenario
from tests.limits import advise
from tests.testbed.nvml.feeder import NvmlTable, ScenarioFeeder
from tests.testbed.nvml.scenarios import GENERATIONS
from tests.testbed.processes import Processes, fetch, run_exporter, wait_for

QUIET = ("--no-attribution.slurm", "--no-attribution.kubelet")


@pytest.fixture
def feeder(nvml_table: NvmlTable) -> Iterator[ScenarioFeeder]:
    gpus = [GENERATIONS["h100"], GENERATIONS["h100-mig"], {**GENERATIONS["t4"], "xids": [{"at": 3, "code": 31}]}]
    feeder = ScenarioFeeder(parse_scenario({"gpus": gpus}), nvml_table)
    feeder.start()
    yield feeder
    feeder.stop()


@pytest.mark.slow
def test_a_recording_shows_the_same_node_on_another_machine(
    processes: Processes,
    nvml_environment: dict[str, str],
    nvml_table: NvmlTable,
    feeder: ScenarioFeeder,
    tmp_path: Path,
) -> None:
    file = tmp_path / "node.rec.gz"
    nvml_table.set_call(2, "nvmlDeviceGetEncoderUtilization", "NVML_ERROR_UNKNOWN")
    done = run_exporter(
        "record", file, "--duration=8s", "--interval=200ms", "--hash-identifiers", environment=nvml_environment
    )
    assert done.returncode == 0, done.stderr
    assert f"recording 3 GPUs for 8 s into {file}; Ctrl-C ends early" in done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["CALL", "TIMES", "P50", "US", "P99", "US", "REFUSED"]
    assert any("nvmlDeviceGetEncoderUtilization" in line and "NVML_ERROR_UNKNOWN" in line for line in lines)
    assert any(line.startswith("nvmlGpmMetricsGet") for line in lines)
    short = ("record", tmp_path / "short.rec.gz", "--duration=1s", "--interval=200ms", "--format=json")
    calls = json.loads(run_exporter(*short, environment=nvml_environment).stdout)["calls"]
    (refused,) = [each for each in calls if each["call"] == "nvmlDeviceGetEncoderUtilization"]
    assert (
        refused["refused"] == ["NVML_ERROR_UNKNOWN"] and refused["times"] > 0 < refused["p50_us"] <= refused["p99_us"]
    )
    advise("bytes of a recording of 8 s", file.stat().st_size, 100_000, so="record less often")

    # On another machine, without a driver.
    _, url = processes.start_exporter(*QUIET, f"--devices.replay={file}")

    def ask() -> str | None:
        text = fetch(f"{url}/metrics") or ""
        return text if 'xid="31"' in text else None

    body = wait_for(ask, "the recorded XID")
    assert feeder.stage.scenario.gpus[0].uuid not in body
    status = json.loads(fetch(f"{url}/api/v1/status") or "")
    assert [gpu["name"] for gpu in status["gpus"]] == ["NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3", "Tesla T4"]
    assert [instance["profile"] for instance in status["gpus"][1]["instances"]] == [
        "3g.40gb", "1g.10gb", "1c.2g.20gb", "1c.2g.20gb",
    ]  # fmt: skip
    assert status["gpus"][0]["utilization_ratio"] == 0.5
    assert 'gpu_mig_graphics_active_ratio{gpu="1"' in body
    assert 'call="nvmlDeviceGetEncoderUtilization",error="NVML_ERROR_UNKNOWN"' in body
    idle = [line for line in body.splitlines() if line.startswith('gpu_idle_seconds_total{gpu="0"')]
    assert [line.split()[-1] for line in idle] == ["0"]


def test_a_recording_contains_the_number_of_processes_but_no_process(
    nvml_environment: dict[str, str], feeder: ScenarioFeeder, tmp_path: Path
) -> None:
    file = tmp_path / "node.rec.gz"
    assert run_exporter("record", file, "--duration=500ms", environment=nvml_environment).returncode == 0
    _, _, answers = read_recording(file)
    calls = {call for call, _, _ in answers}
    assert (
        "nvmlDeviceGetComputeRunningProcesses_v3" in calls
    )  # the recording has the number of processes, but no process
    for (call, _, _), entry in answers.items():
        if "RunningProcesses" in call:
            assert all(isinstance(value, int | str) for _, value in entry.values)


def test_record_fails_without_a_driver_or_a_writable_file(
    nvml_environment: dict[str, str], feeder, tmp_path: Path
) -> None:
    environment = {key: value for key, value in nvml_environment.items() if key != "LD_LIBRARY_PATH"}
    done = run_exporter("record", tmp_path / "x.rec.gz", environment=environment)
    assert done.returncode == 3
    assert done.stderr.startswith("gpu-exporter: no GPU data: libnvidia-ml.so.1 cannot be loaded")
    done = run_exporter("record", tmp_path / "none" / "x.rec.gz", "--duration=1s", environment=nvml_environment)
    assert done.returncode == 2
    assert "No such file or directory" in done.stderr


def test_a_recording_is_a_whole_node_and_is_replayed_alone(
    tmp_path: Path, nvml_environment: dict[str, str], feeder: ScenarioFeeder
) -> None:
    file = tmp_path / "node.rec.gz"
    assert run_exporter("record", file, "--duration=500ms", environment=nvml_environment).returncode == 0
    done = run_exporter("--once", f"--devices.replay={file}", f"--devices.replay={file}")
    assert done.returncode == 2
    assert "a file of `gpu-exporter record` contains all GPUs of a node: give no other file" in done.stderr
    done = run_exporter("--once", *QUIET, "--state.directory=", "--format=table", f"--devices.replay={file}")
    wishes = [f"gpu-exporter: partial: gpu {index} asks for a reset" for index in range(3)]
    assert (done.returncode, done.stderr.splitlines()) == (4, wishes)
    assert "Tesla T4" in done.stdout
