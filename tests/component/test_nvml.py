"""pynvml and our backend on the C library: every published value equals the scenario's truth."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gpu_exporter.devices.errors import DeviceError, DeviceLost, DriverUnavailable, NotSupported
from gpu_exporter.devices.nvml.backend import NvmlBackend, NvmlDevice
from gpu_exporter.devices.scenario import load_scenario, parse_scenario
from tests.testbed.nvml.feeder import NvmlTable, ScenarioFeeder
from tests.testbed.processes import GPU_EXPORTER, run_exporter, wait_for

DEMO = Path(__file__).resolve().parents[2] / "exporter" / "gpu_exporter" / "demo.yaml"


@pytest.fixture
def backend(nvml_directory: Path, nvml_table: NvmlTable, monkeypatch: pytest.MonkeyPatch):
    """The backend on our library, in this process: the loader finds it by its name once it is loaded."""
    ctypes.CDLL(str(nvml_directory / "libnvidia-ml.so.1"), mode=ctypes.RTLD_GLOBAL)
    monkeypatch.setenv("GPU_EXPORTER_NVML_TABLE", str(nvml_table.path))
    backend = NvmlBackend()
    yield backend
    backend.close()


def first_device(backend: NvmlBackend) -> NvmlDevice:
    backend.open()
    device = backend.discover()[0].device
    assert isinstance(device, NvmlDevice)
    return device


def feed(table: NvmlTable, **gpu: object) -> ScenarioFeeder:
    return ScenarioFeeder(parse_scenario({"gpus": [{"model": "H100", **gpu}]}), table)


def test_every_value_is_converted_to_base_units(backend: NvmlBackend, nvml_table: NvmlTable) -> None:
    """Numbers chosen so that any two units confused give another result."""
    feed(nvml_table)
    with nvml_table.writing(0) as out:
        out.utilization, out.encoder, out.decoder = 37, 11, 13
        out.power_mw, out.power_limit_mw, out.energy_mj = 345_678, 700_000, 123_456_789
        out.temperature, out.sm_clock_mhz, out.memory_clock_mhz, out.sm_clock_max_mhz = 61, 1755, 2619, 1980
        out.memory_total, out.memory_used, out.memory_free, out.memory_reserved = 1000, 300, 600, 100
        out.throttle_supported = 0b100000011
        out.throttle_ns[0], out.throttle_ns[1], out.throttle_ns[8] = 1_500_000_000, 2_000_000_000, 250_000_000
        out.reasons, out.reasons_supported = 0x44, 0x4 | 0x40 | 0x80
    device = first_device(backend)
    assert device.read_utilization() == 0.37
    assert device.read_encoder_utilization() == 0.11
    assert device.read_decoder_utilization() == 0.13
    assert device.read_power() == 345.678
    assert device.read_power_limit() == 700.0
    assert device.read_energy() == 123_456.789
    assert device.read_temperature() == 61.0
    assert device.read_clocks() == (1.755e9, 2.619e9, 1.98e9)
    assert device.read_memory() == (1000, 300, 600, 100)
    assert device.read_throttle_seconds() == {"power_cap": 1.5, "thermal": 2.0, "hw_power_brake": 0.25}
    assert device.read_throttle_active() == {"power_cap": True, "hw_thermal": True, "hw_power_brake": False}


def test_the_sample_ring_is_read_from_where_we_were(backend: NvmlBackend, nvml_table: NvmlTable) -> None:
    feed(nvml_table)
    with nvml_table.writing(0) as out:
        out.sample_count = 0
        for i in range(5):
            nvml_table.push_sample(0, 1_700_000_000.0 + i / 4, i * 20)
    device = first_device(backend)
    assert [sample.ratio for sample in device.read_utilization_samples(0.0)] == [0.0, 0.2, 0.4, 0.6, 0.8]
    assert [sample.wall for sample in device.read_utilization_samples(1_700_000_000.5)] == [
        1_700_000_000.75,
        1_700_000_001.0,
    ]
    assert device.read_utilization_samples(1_700_000_001.0) == ()


def test_mig_instances_with_holes(backend: NvmlBackend, nvml_table: NvmlTable) -> None:
    feed(nvml_table, mig=[{"profile": "3g.40gb"}, {"profile": "1g.10gb"}, {"profile": "2g.20gb"}])
    with nvml_table.writing(0) as out:
        out.instances[1].uuid = b""
    device = first_device(backend)
    assert device.identity.mig_mode == "enabled"
    instances = device.list_instances()
    assert [i.identity.profile for i in instances] == ["3g.40gb", "2g.20gb"]
    assert [i.identity.mig for i in instances] == ["1/0", "3/0"]
    assert instances[1].read_memory().total == 20 * 1024**3
    with pytest.raises(NotSupported):
        device.read_utilization()
    with pytest.raises(NotSupported):
        instances[0].read_graphics_active()


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ("NVML_ERROR_NOT_SUPPORTED", NotSupported),
        ("NVML_ERROR_GPU_IS_LOST", DeviceLost),
        ("NVML_ERROR_RESET_REQUIRED", DeviceLost),
        ("NVML_ERROR_UNKNOWN", DeviceError),
        ("NVML_ERROR_NO_PERMISSION", DeviceError),
    ],
)
def test_errors_by_their_names(
    backend: NvmlBackend, nvml_table: NvmlTable, error: str, kind: type[DeviceError]
) -> None:
    feed(nvml_table)
    device = first_device(backend)
    nvml_table.set_call(0, "nvmlDeviceGetPowerUsage", error)
    with pytest.raises(kind) as caught:
        device.read_power()
    assert type(caught.value) is kind
    assert (caught.value.call, caught.value.error) == ("nvmlDeviceGetPowerUsage", error)
    assert device.read_temperature() > 0


def test_one_lost_handle_costs_one_gpu(backend: NvmlBackend, nvml_table: NvmlTable) -> None:
    ScenarioFeeder(parse_scenario({"gpus": [{"model": "H100"}] * 3}), nvml_table)
    nvml_table.set_call(1, "nvmlDeviceGetHandleByIndex", "NVML_ERROR_GPU_IS_LOST")
    backend.open()
    found = backend.discover()
    assert [entry.device is not None for entry in found] == [True, False, True]
    assert found[1].error == "nvmlDeviceGetHandleByIndex answered NVML_ERROR_GPU_IS_LOST"


def test_a_driver_that_is_not_loaded_is_named(backend: NvmlBackend, nvml_table: NvmlTable) -> None:
    nvml_table.table.init_rc = 9
    with pytest.raises(
        DriverUnavailable, match=r"the NVIDIA kernel driver is not loaded \(NVML_ERROR_DRIVER_NOT_LOADED\)"
    ):
        backend.open()
    nvml_table.table.init_rc = 18
    with pytest.raises(DriverUnavailable, match="the driver library does not match the kernel module"):
        backend.open()


def once(environment: dict[str, str], *flags: str) -> subprocess.CompletedProcess[str]:
    quiet = ("--state.directory=", "--no-attribution.slurm", "--no-attribution.kubelet")
    return run_exporter("--once", *quiet, *flags, environment=environment)


def test_once_publishes_the_scenarios_truth(nvml_environment: dict[str, str], nvml_table: NvmlTable) -> None:
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
    assert values["gpu_utilization_ratio", "0", None] == 0.93
    assert values["gpu_utilization_ratio", "7", None] == 0.0
    assert ("gpu_utilization_ratio", "6", None) not in values
    assert values["gpu_mig_memory_total_bytes", "6", "1/0"] == 40 * 1024**3
    assert values["gpu_mig_activity_supported", "6", "1/0"] == 0
    assert ("gpu_mig_busy_seconds_total", "6", "1/0") not in values
    assert values["gpu_driver_up", None, None] == 1


def test_once_as_json_and_table(nvml_environment: dict[str, str], nvml_table: NvmlTable) -> None:
    feed(nvml_table, load={"kind": "constant", "value": 0.5})
    data = json.loads(once(nvml_environment, "--format=json").stdout)
    assert data["gpus"][0]["name"] == "NVIDIA H100 80GB HBM3"
    assert data["gpus"][0]["utilization_ratio"] in (0.0, 0.5)  # before the feeder's first period: not yet loaded
    assert once(nvml_environment, "--format=table").stdout.startswith("GPU  NAME")


def test_once_writes_a_textfile_by_rename(
    nvml_environment: dict[str, str], nvml_table: NvmlTable, tmp_path: Path
) -> None:
    feed(nvml_table)
    output = tmp_path / "gpu.prom"
    done = once(nvml_environment, f"--output={output}")
    assert (done.returncode, done.stdout) == (0, "")
    assert "gpu_driver_up 1" in output.read_text("utf-8")
    assert output.stat().st_mode & 0o777 == 0o644
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".gpu.prom")] == []


def test_once_says_partial_when_a_gpu_is_lost(nvml_environment: dict[str, str], nvml_table: NvmlTable) -> None:
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


def test_once_without_a_driver_is_one_clear_line(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "LD_LIBRARY_PATH"}
    done = once(environment, f"--output={tmp_path / 'gpu.prom'}")
    assert done.returncode == 3
    assert done.stdout == ""
    assert done.stderr == (
        "gpu-exporter: no GPU data: libnvidia-ml.so.1 cannot be loaded (NVML_ERROR_LIBRARY_NOT_FOUND): "
        "no NVIDIA driver on this host, or it is not mounted here\n"
    )
    assert "gpu_driver_up 0" in (tmp_path / "gpu.prom").read_text("utf-8")


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
