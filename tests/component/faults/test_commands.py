"""Commands that run once, with a fault in the driver or in a source."""

from __future__ import annotations

import signal
import socket
import time
from pathlib import Path

from gpu_exporter.agent.devices.nvml.recording import is_recording
from tests.component.faults.fault_bench import COUNT
from tests.testbed.faults import Rig
from tests.testbed.processes import GPU_EXPORTER, PROMPT_S, run_exporter, wait_for
from tests.testbed.sysfs import add_function


def test_once_warns_when_persistence_mode_is_off(rig: Rig) -> None:
    with rig.table.writing(2) as out:
        out.persistence = 0
    done = run_exporter("--once", "--state.directory=", environment=rig.environment)
    assert done.returncode == 0
    assert done.stderr.startswith("gpu-exporter: warning: persistence mode is off on 1 GPU:")


def test_once_reports_the_other_gpus_when_one_hangs(rig: Rig) -> None:
    rig.table.set_call(3, "nvmlDeviceGetPowerUsage", delay_s=600)
    begin = time.monotonic()
    done = run_exporter("--once", "--timeout=2s", "--state.directory=", environment=rig.environment)
    assert time.monotonic() - begin < PROMPT_S
    assert done.returncode == 4
    assert 'gpu_power_watts{gpu="2"' in done.stdout
    assert 'gpu_power_watts{gpu="3"' not in done.stdout
    assert 'gpu_up{gpu="3"' in done.stdout


def test_once_reports_a_gpu_on_the_bus_that_the_driver_does_not_list(rig: Rig) -> None:
    for index in range(COUNT + 1):
        add_function(rig.sysfs, f"0000:{0x10 + index:02x}:00.0", "nvidia")
    done = run_exporter("--once", "--state.directory=", f"--path.sysfs={rig.sysfs}", environment=rig.environment)
    assert done.returncode == 4
    assert f"gpu_devices_expected {COUNT + 1}" in done.stdout


def test_once_reports_the_gpus_when_a_source_does_not_answer(rig: Rig, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
        path = tmp_path / "kubelet.sock"
        silent.bind(str(path))
        silent.listen()
        done = run_exporter(
            "--once",
            "--timeout=2s",
            "--state.directory=",
            "--attribution.kubelet",
            f"--attribution.kubelet.socket={path}",
            "--no-attribution.slurm",
            environment=rig.environment,
        )
    assert done.returncode == 4, done.stderr
    assert 'gpu_power_watts{gpu="0"' in done.stdout
    assert 'gpu_exporter_attribution_up{source="kubelet"} 0' in done.stdout


def test_a_host_with_a_hung_gpu_can_be_recorded_and_ended_early(rig: Rig) -> None:
    rig.table.set_call(3, "nvmlDeviceGetUUID", delay_s=600)
    file = rig.directory / "node.rec.gz"
    running = rig.processes.start([*GPU_EXPORTER, "record", file, "--duration=60s"], rig.environment, name="record")
    wait_for(lambda: "Ctrl-C ends early" in running.log(), "the recording to begin")
    wait_for(lambda: running.log().count("NVIDIA H100") == COUNT - 1, "the others to be recorded")
    assert running.stop(signal.SIGINT) == 0
    assert "nvmlDeviceGetPowerUsage" in running.log()
    assert is_recording(file)
