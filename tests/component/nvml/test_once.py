"""The command `--once` on the fake C library."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gpu_exporter.agent.devices.scenario import load_scenario, parse_scenario
from tests.component.nvml.nvml_bench import feed
from tests.testbed.nvml.feeder import NvmlTable, ScenarioFeeder
from tests.testbed.podresources import Kubelet
from tests.testbed.processes import GPU_EXPORTER, run_exporter, wait_for
from tests.testbed.sysfs import add_function

DEMO = Path(__file__).resolve().parents[3] / "exporter" / "gpu_exporter" / "cli" / "demo.yaml"


def once(environment: dict[str, str], *flags: str) -> subprocess.CompletedProcess[str]:
    quiet = ("--state.directory=", "--no-attribution.slurm", "--no-attribution.kubelet")
    return run_exporter("--once", *quiet, *flags, environment=environment)


def test_once_publishes_the_scenarios_values(nvml_environment: dict[str, str], nvml_table: NvmlTable) -> None:
    scenario = load_scenario(DEMO)
    feeder = ScenarioFeeder(scenario, nvml_table)
    feeder.start()
    try:
        wait_for(lambda: nvml_table.table.devices[0].sample_count >= 2, "the ring to fill")
        done = once(nvml_environment)
    finally:
        feeder.stop()
    assert (done.returncode, done.stderr) == (0, "")
    values = {
        (sample.name, sample.labels.get("gpu"), sample.labels.get("mig")): sample.value
        for family in text_string_to_metric_families(done.stdout)
        for sample in family.samples
    }
    for gpu in scenario.gpus:
        index = str(gpu.index)
        assert values["gpu_up", index, None] == 1
        assert values["gpu_memory_total_bytes", index, None] == gpu.product.memory
        assert values["gpu_power_limit_watts", index, None] == gpu.product.power_limit
        assert values["gpu_sm_clock_max_hertz", index, None] == gpu.product.sm_clock
    assert values["gpu_utilization_ratio", "0", None] == 1.0
    assert values["gpu_utilization_ratio", "7", None] == 0.0
    assert ("gpu_utilization_ratio", "6", None) not in values
    assert values["gpu_mig_memory_total_bytes", "6", "1/0"] == 40 * 1024**3
    assert values["gpu_mig_activity_supported", "6", "1/0"] == 1
    assert (
        0 <= values["gpu_mig_graphics_active_ratio", "6", "1/0"] <= 1
    )  # the exporter waited for the 100 ms of a GPM window
    assert values["gpu_driver_up", None, None] == 1


def test_once_prints_json_and_a_table(nvml_environment: dict[str, str], nvml_table: NvmlTable) -> None:
    feed(nvml_table, load={"kind": "constant", "value": 0.5})
    data = json.loads(once(nvml_environment, "--format=json").stdout)
    assert data["gpus"][0]["name"] == "NVIDIA H100 80GB HBM3"
    assert data["gpus"][0]["utilization_ratio"] in (0.0, 0.5)  # 0.0 before the feeder's first period
    assert once(nvml_environment, "--format=table").stdout.startswith("GPU  NAME")


def test_once_replaces_a_textfile_by_rename(
    nvml_environment: dict[str, str], nvml_table: NvmlTable, tmp_path: Path
) -> None:
    feed(nvml_table)
    output = tmp_path / "gpu.prom"
    done = once(nvml_environment, f"--output={output}")
    assert (done.returncode, done.stdout) == (0, "")
    assert "gpu_driver_up 1" in output.read_text("utf-8")
    assert output.stat().st_mode & 0o777 == 0o644
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".gpu.prom")] == []


def test_once_reports_a_partial_result_when_a_gpu_is_lost(
    nvml_environment: dict[str, str], nvml_table: NvmlTable
) -> None:
    ScenarioFeeder(parse_scenario({"gpus": [{"model": "H100"}] * 2}), nvml_table)
    nvml_table.set_call(1, "*", "NVML_ERROR_GPU_IS_LOST")
    done = once(nvml_environment)
    assert done.returncode == 4
    assert 'gpu_power_watts{gpu="0"' in done.stdout
    assert 'gpu_power_watts{gpu="1"' not in done.stdout


def test_once_gives_up_on_a_hung_driver_in_time(nvml_environment: dict[str, str], nvml_table: NvmlTable) -> None:
    feed(nvml_table)
    nvml_table.set_call(0, "nvmlDeviceGetPowerUsage", delay_s=600)
    done = once(nvml_environment, "--timeout=500ms")
    assert done.returncode == 3
    assert done.stderr == "gpu-exporter: no GPU data: the driver did not answer within 0.5 s\n"


@pytest.mark.parametrize(
    ("kernel_driver", "status", "what"),
    [
        ("nvidia", 3, "no GPU data"),
        ("", 3, "no GPU data"),
        ("vfio-pci", 0, "no GPU is expected here"),
        (None, 0, "no GPU is expected here"),
    ],
    ids=["a GPU with its driver", "a GPU whose driver is not loaded", "a GPU given away", "no GPU"],
)
def test_once_without_a_driver_prints_one_line_and_fails_only_if_a_gpu_is_missing(
    tmp_path: Path, kernel_driver: str | None, status: int, what: str
) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "LD_LIBRARY_PATH"}
    (tmp_path / "bus/pci/devices").mkdir(parents=True)
    if kernel_driver is not None:
        add_function(tmp_path, "0000:3b:00.0", kernel_driver)
    done = once(environment, f"--output={tmp_path / 'gpu.prom'}", f"--path.sysfs={tmp_path}")
    assert (done.returncode, done.stdout) == (status, "")
    assert done.stderr == (
        f"gpu-exporter: {what}: libnvidia-ml.so.1 cannot be loaded (NVML_ERROR_LIBRARY_NOT_FOUND): "
        "no NVIDIA driver on this host, or it is not mounted here\n"
    )
    assert "gpu_driver_up 0" in (tmp_path / "gpu.prom").read_text("utf-8")


@pytest.mark.parametrize("library", [True, False], ids=["a driver without a GPU", "no driver"])
@pytest.mark.parametrize(("offered", "status"), [(["GPU-a", "GPU-b"], 3), ([], 0)])
def test_once_fails_without_a_gpu_if_the_kubelet_offers_gpus(
    nvml_environment: dict[str, str],
    nvml_table: NvmlTable,
    tmp_path: Path,
    library: bool,
    offered: list[str],
    status: int,
) -> None:
    """The first boot of a node that keeps no files."""
    environment = {key: value for key, value in nvml_environment.items() if library or key != "LD_LIBRARY_PATH"}
    (tmp_path / "bus/pci/devices").mkdir(parents=True)
    kubelet = Kubelet(tmp_path / "kubelet.sock")
    kubelet.allocatable = offered
    kubelet.start()
    try:
        flags = (
            "--once",
            "--state.directory=",
            "--check=devices",
            f"--path.sysfs={tmp_path}",
            *kubelet.flags(tmp_path),
        )
        done = run_exporter(*flags, environment=environment)
    finally:
        kubelet.stop()
    assert done.returncode == status, done.stderr
    assert ("no GPU data" if status else "no GPU is expected here") in done.stderr


FORBIDDEN = ("prometheus_client", "yaml", "psutil", "http.server", "grpc", "kubernetes", "torch", "h2")


def test_once_loads_only_what_it_needs(nvml_environment: dict[str, str], nvml_table: NvmlTable) -> None:
    feed(nvml_table)
    done = subprocess.run(
        [
            sys.executable,
            "-X",
            "importtime",
            *GPU_EXPORTER[1:],
            "--once",
            "--state.directory=",
            "--no-attribution.slurm",
        ],
        env=nvml_environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    modules = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "pynvml" in modules
    for name in FORBIDDEN:
        assert not [module for module in modules if module == name or module.startswith(f"{name}.")]
