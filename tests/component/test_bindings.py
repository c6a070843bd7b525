"""Older bindings pass the same tests, and with older drivers the exporter publishes what the driver supports."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gpu_exporter.agent.devices.scenario import Scenario
from tests.testbed.nvml.build import build_library
from tests.testbed.nvml.feeder import NvmlTable, ScenarioFeeder
from tests.testbed.nvml.scenarios import build
from tests.testbed.processes import run_exporter, wait_for
from tests.testbed.programs import fresh_entry

ROOT = Path(__file__).resolve().parents[2]
OLDER = ("12.535.161", "12.560.30")  # every other test runs with the newest, 13.x
# The tests that reach the driver through the binding. Other tests put a fake in its place.
SUITE = ("tests/component/nvml", "tests/component/test_generations.py")


def install_binding(version: str) -> Path:
    """A folder with only this binding. It is installed once, into the test bed's cache."""
    with fresh_entry(f"nvidia-ml-py-{version}") as (target, making):
        if making is not None:
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(making)]
            subprocess.run([*command, f"nvidia-ml-py=={version}"], check=True)
            making.rename(target)
    return target


@pytest.mark.slow
@pytest.mark.parametrize("version", OLDER)
def test_an_older_binding_passes_the_same_suite(version: str) -> None:
    folder = install_binding(version)
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    loaded = subprocess.run(
        [sys.executable, "-c", "import pynvml; print(pynvml.__file__)"],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert Path(loaded.stdout.strip()).parent == folder
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *SUITE, "-k", "not wrong_conversion"],
        env=environment, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


def publish(table: NvmlTable, driver: str, scenario: Scenario) -> dict[tuple[str, str], float]:
    """The output of `--once` with this driver: values by family and last label."""
    feeder = ScenarioFeeder(scenario, table)
    feeder.start()
    try:
        wait_for(lambda: table.table.devices[0].sample_count >= 2, "the ring to fill")
        directory = build_library(driver)
        environment = {
            **os.environ,
            "LD_LIBRARY_PATH": str(directory),
            "GPU_EXPORTER_NVML_TABLE": str(table.path),
        }
        flags = ("--collector.throttle-active", "--no-attribution.slurm", "--no-attribution.kubelet")
        done = run_exporter("--once", "--state.directory=", *flags, environment=environment)
    finally:
        feeder.stop()
    # Every scenario has a GPU that asks for a reset, so that every driver is asked for it.
    assert (done.returncode, done.stderr) == (4, "gpu-exporter: partial: gpu 0 asks for a reset\n")
    assert "gpu_exporter_driver_errors_total" not in done.stdout  # an old driver is not an error
    return {
        (sample.name, next(iter(reversed(sample.labels.values())), "")): sample.value
        for family in text_string_to_metric_families(done.stdout)
        for sample in family.samples
    }


@pytest.mark.parametrize("driver", ["470", "535", "580"])
def test_an_older_driver_reports_the_values_it_supports(nvml_table: NvmlTable, driver: str) -> None:
    scenario = build("a100")
    published = publish(nvml_table, driver, scenario)
    uuid = scenario.gpus[0].uuid
    assert published["gpu_power_limit_watts", uuid] == 400.0
    assert published["gpu_temperature_celsius", uuid] > 20.0
    assert published["gpu_throttle_active", "power_cap"] == 1.0
    assert published["gpu_throttle_active", "sw_thermal"] == 0.0
    assert published["gpu_compute_processes", uuid] == 2.0
    reserved = 512 * 1024**2
    used = 12 * 1024**3
    # The older call includes the driver's reserved memory in the used memory.
    assert published["gpu_memory_used_bytes", uuid] == (used + reserved if driver == "470" else used)
    assert (("gpu_memory_reserved_bytes", uuid) in published) is (driver != "470")
    assert published["gpu_memory_total_bytes", uuid] == scenario.gpus[0].product.memory


@pytest.mark.parametrize(("driver", "gpm"), [("470", False), ("535", True), ("580", True)])
def test_drivers_with_gpm_report_gpm(nvml_table: NvmlTable, driver: str, gpm: bool) -> None:
    scenario = build("h100")
    published = publish(nvml_table, driver, scenario)
    uuid = scenario.gpus[0].uuid
    assert (("gpu_sm_active_ratio", uuid) in published) is gpm
    assert (("gpu_temperature_margin_celsius", uuid) in published) is (driver == "580")
