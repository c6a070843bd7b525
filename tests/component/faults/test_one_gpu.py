"""Faults of one GPU: lost, hanging at its start, without an answer, or in need of a reset."""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path

import pytest

from gpu_exporter.agent.devices.nvml import constants as nvml
from tests.component.faults.fault_bench import COUNT, LOST, heal, is_out, lose, never_idle, power_of
from tests.testbed.faults import QUIET, FaultTable, Rig, Seen, scrape_ms, threads_of
from tests.testbed.processes import PROMPT_S, fetch, run_exporter, wait_for


def test_a_gpu_that_was_lost_before_the_start_is_reported(rig: Rig, matrix: FaultTable) -> None:
    lose(rig)
    rig.set_state("B")
    _, url = rig.start()
    seen = rig.wait_until(url, "gpu 3 to be missed", lambda seen: is_out(rig, seen))
    assert (seen.one("gpu_devices_visible"), seen.one("gpu_devices_expected")) == (COUNT - 1, COUNT)
    assert scrape_ms(url) < 10
    assert "nvmlDeviceGetHandleByIndex answered NVML_ERROR_GPU_IS_LOST" in (fetch(f"{url}/api/v1/status") or "")
    heal(rig)
    seen = rig.wait_until(url, "gpu 3 to come", lambda seen: rig.fresh(seen, "B") == rig.all())
    assert seen["gpu_up"] == dict.fromkeys(rig.all(), 1.0)
    matrix.add(
        "GPU lost before the start",
        '`gpu_up{gpu="3"}` 0, with its uuid if known',
        f"visible {COUNT - 1} of {COUNT}; JSON, page and log name call and error",
        "within 5 s",
    )


@pytest.mark.parametrize(
    ("fault", "error"),
    [("GPU lost while running", "NVML_ERROR_GPU_IS_LOST"), ("GPU needs a reset", "NVML_ERROR_RESET_REQUIRED")],
)
def test_a_gpu_that_is_lost_at_run_time_is_reported(rig: Rig, matrix: FaultTable, fault: str, error: str) -> None:
    running, url = rig.start()
    rig.wait_until(url, "all GPUs", lambda seen: rig.fresh(seen, "A") == rig.all())
    threads = threads_of(running)
    lose(rig, error=error)
    rig.set_state("B")
    seen = rig.wait_until(url, "gpu 3 to be lost", lambda seen: is_out(rig, seen))
    assert {kind for _, kind in seen.errors} == {error}
    assert scrape_ms(url) < 10
    never_idle(url)
    heal(rig)
    rig.wait_until(url, "gpu 3 to come back", lambda seen: rig.fresh(seen, "B") == rig.all())
    assert threads_of(running) <= threads + 2
    signs = f'`gpu_exporter_driver_errors_total{{error="{error}"}}`; visible {COUNT - 1} of {COUNT}'
    matrix.add(fault, LOST, signs, "next cycle")


def test_a_gpu_that_hangs_at_its_start_is_reported(rig: Rig, matrix: FaultTable) -> None:
    rig.table.set_call(3, "nvmlDeviceGetUUID", delay_s=600)
    rig.set_state("B")
    running, url = rig.start()
    rig.wait_until(url, "gpu 3 to be missed", lambda seen: is_out(rig, seen))
    assert scrape_ms(url) < 10
    rig.table.set_call(3, "nvmlDeviceGetUUID")
    rig.wait_until(url, "gpu 3 to come", lambda seen: rig.fresh(seen, "B") == rig.all())
    rig.table.set_call(3, "*", delay_s=600)
    rig.wait_until(url, "gpu 3 to hang", lambda seen: is_out(rig, seen))
    begin = time.monotonic()
    assert running.stop(signal.SIGTERM) == 0
    assert time.monotonic() - begin < PROMPT_S
    matrix.add(
        "GPU hangs at its start",
        '`gpu_up{gpu="3"}` 0',
        "JSON and page: its first call hangs in the driver",
        "when the call returns; SIGTERM works meanwhile",
    )


def test_a_gpu_that_answers_no_call_is_down(rig: Rig, matrix: FaultTable) -> None:
    """This happens in a container after `systemctl daemon-reload` has revoked its devices."""
    _, url = rig.start()
    rig.wait_until(url, "all GPUs", lambda seen: rig.fresh(seen, "A") == rig.all())
    lose(rig, error="NVML_ERROR_UNKNOWN")
    rig.set_state("B")
    rig.wait_until(url, "gpu 3 to be out", lambda seen: is_out(rig, seen))
    assert scrape_ms(url) < 10
    assert "the driver answers no call" in (fetch(f"{url}/api/v1/status") or "")
    heal(rig)
    rig.wait_until(url, "gpu 3 to come back", lambda seen: rig.fresh(seen, "B") == rig.all())
    rig.table.table.init_rc = 999
    done = run_exporter("--once", "--state.directory=", environment=rig.environment)
    assert done.returncode == 3
    assert "`systemctl daemon-reload` on the host may have revoked its devices" in done.stderr
    matrix.add(
        "one GPU answers no call (access to its device revoked)",
        LOST,
        "`gpu_exporter_driver_errors_total{call,error}`; log and page name the GPU",
        "when the driver answers; recreate a container that lost its devices",
    )


def test_a_requested_reset_is_reported(rig: Rig, matrix: FaultTable) -> None:
    _, url = rig.start("--state.directory=")
    rig.wait_until(url, "all GPUs", lambda seen: rig.fresh(seen, "A") == rig.all())
    rig.table.set_field(3, nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, 1)
    rig.set_state("B")
    rig.wait_until(url, "the wish", lambda seen: seen["gpu_recovery_action"].get("3") == 1.0)
    rig.wait_until(url, "all GPUs", lambda seen: rig.fresh(seen, "B") == rig.all())
    status = json.loads(fetch(f"{url}/api/v1/status") or "")
    assert (status["devices_health"], status["gpus"][3]["conditions"][0]["text"]) == ("partial", "asks for a reset")
    assert "asks for a reset" in (fetch(f"{url}/") or "")
    done = run_exporter("--once", "--state.directory=", *QUIET, environment=rig.environment)
    assert (done.returncode, done.stderr.count("partial: gpu 3 asks for a reset")) == (4, 1)
    matrix.add(
        "GPU asks for a reset and answers",
        "fresh; row and page: asks for a reset",
        "`gpu_recovery_action` 1, GpuUnusable; `--once` exits with 4",
        "after the reset",
    )


def test_xids_remain_when_their_gpu_is_lost(rig: Rig, matrix: FaultTable, tmp_path: Path) -> None:
    state = f"--state.directory={tmp_path}"
    _, url = rig.start(state)
    uuid = rig.table.table.devices[3].uuid.decode()
    zero = f'gpu_xid_events_total{{gpu="3",uuid="{uuid}",class="hardware"}} '
    # Wait for all GPUs: with each new GPU the exporter registers again, and events before that are not counted.
    begun = [f'gpu_xid_events_total{{gpu="{index}",' for index in range(COUNT)]
    rig.wait_until(url, "counts to begin at 0", lambda seen: all(each in seen.text for each in begun))
    check = ("--once", "--check=xid", state, *QUIET)
    assert run_exporter(*check, environment=rig.environment).returncode == 0
    rig.table.push_event(3, 79)
    rig.table.push_event(0, 31)
    lose(rig)
    rig.set_state("B")
    seen = rig.wait_until(url, "the XID", lambda seen: is_out(rig, seen) and f"{zero}1\n" in seen.text)
    assert 'xid="79",class="hardware"} 1' in seen.text
    seen = rig.wait_until(url, "the other XID", lambda seen: 'xid="31",class="application"} 1' in seen.text)
    done = run_exporter(*check, environment=rig.environment)
    assert (done.returncode, done.stderr.count("partial: ")) == (4, 1), done.stderr
    assert re.search(r"failed checks: xid: gpu 3: XID 79 \d+s ago \(reset the GPU\)\n", done.stderr)
    assert scrape_ms(url) < 10
    matrix.add(
        "XID, then the GPU is lost",
        "lost; its XIDs remain",
        "`gpu_xid_events_total{class}` from 0 to 1, `gpu_xid_errors_total{xid,class}`, the log; `--once` exits with 4 for an hour",
        "as for a lost GPU",
    )


def test_a_gpu_with_too_slow_cycles_is_down_and_does_not_flap(rig: Rig) -> None:
    _, url = rig.start()
    rig.wait_until(url, "all GPUs", lambda seen: rig.fresh(seen, "A") == rig.all())
    rig.table.set_call(3, "nvmlDeviceGetPowerUsage", delay_s=0.8)
    rig.wait_until(url, "gpu 3 to be down", lambda seen: seen["gpu_up"].get("3") == 0)

    def stays_down(seen: Seen) -> None:
        assert (seen["gpu_up"]["3"], power_of(seen, "3"), seen.one("gpu_devices_visible")) == (0, None, COUNT - 1)

    rig.hold(url, 3.0, stays_down)
    rig.table.set_call(3, "nvmlDeviceGetPowerUsage")
    rig.wait_until(url, "gpu 3 to be up", lambda seen: rig.fresh(seen, "A") == rig.all())


def test_a_gpu_that_was_lost_at_run_time_can_be_forgotten(rig: Rig) -> None:
    state = f"--state.directory={rig.directory / 'state'}"
    _, url = rig.start(state)
    rig.wait_until(url, "all GPUs", lambda seen: rig.fresh(seen, "A") == rig.all())
    wait_for(lambda: (rig.directory / "state" / "devices.json").exists(), "the list of GPUs")
    lose(rig)
    rig.wait_until(url, "gpu 3 to be lost", lambda seen: seen["gpu_up"].get("3") == 0)
    done = run_exporter("forget", rig.table.table.devices[3].uuid.decode(), state)
    assert done.returncode == 0
    assert "is no longer expected" in done.stdout
    rig.wait_until(
        url, "gpu 3 to go", lambda seen: "3" not in seen["gpu_up"] and seen.one("gpu_devices_expected") == COUNT - 1
    )
    heal(rig)
    rig.wait_until(url, "gpu 3 to be back", lambda seen: rig.fresh(seen, "A") == rig.all())
