"""Faults of the driver, the bus and the hardware under a running exporter. Writes docs/faults.md."""

from __future__ import annotations

import html
import json
import resource
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_exporter.devices.nvml import constants as nvml
from gpu_exporter.devices.nvml.recording import is_recording
from tests.testbed.faults import QUIET, FaultTable, Rig, Seen, look, scrape_ms, threads_of
from tests.testbed.kmsg import Kmsg
from tests.testbed.nvml.feeder import NvmlTable
from tests.testbed.processes import GPU_EXPORTER, Processes, fetch, run_exporter, wait_for
from tests.testbed.sysfs import add_function

COUNT = 8
PAGE = Path(__file__).resolve().parents[2] / "docs" / "faults.md"
OTHERS = f"{COUNT - 1} fresh"
ORDER = [
    "no libnvidia-ml",
    "driver not loaded",
    "driver is loaded later",
    "driver hangs at its start",
    "GPU lost before the start",
    "GPU lost while running",
    "GPU needs a reset",
    "GPU hangs at its start",
    "a call hangs on one GPU",
    "a call hangs on all GPUs",
    "a call fails on all GPUs",
    "one GPU answers no call (access to its device revoked)",
    "no permission for a call",
    "a call about a GPU's identity fails",
    "GPU asks for a reset and answers",
    "GPU gone from the driver's list after a restart",
    "GPU on the bus that the driver does not list",
    "the driver cannot start a GPU (its probe fails)",
    "GPU asleep (runtime power management)",
    "GPU given to a virtual machine",
    "driver released on request (SIGUSR1)",
    "driver replaced, in a container",
    "driver replaced, on a host",
    "XID, then the GPU is lost",
    "state directory full or read-only",
]


NINTH = "0000:40:00.0"
MISSING = f'gpu_missing{{pci_bus_id="{NINTH}"}} 1'
LOST = "`gpu_up` 0, counters stop increasing, gauges are not published"


@pytest.fixture(scope="module")
def matrix(request: pytest.FixtureRequest) -> Iterator[FaultTable]:
    """Collects the rows. A run of all tests compares them with the page, or writes the page."""
    table = FaultTable()
    yield table
    if table.rows.keys() != set(ORDER):  # not all tests ran: there is nothing to compare
        return
    text = table.render(ORDER, COUNT)
    before, mark, attacks = PAGE.read_text("utf-8").partition("\n## ")  # test_attacks.py writes the second table
    if request.config.getoption("--update-golden"):
        PAGE.write_text(text + mark + attacks, encoding="utf-8")
        return
    assert text == before, "docs/faults.md is stale: run `make faults` and review it"


@pytest.fixture
def rig(nvml_table: NvmlTable, nvml_environment: dict[str, str], processes: Processes, tmp_path: Path) -> Rig:
    return Rig(nvml_table, nvml_environment, processes, tmp_path, COUNT)


def lose(rig: Rig, index: int = 3, error: str = "NVML_ERROR_GPU_IS_LOST") -> None:
    rig.table.set_call(index, "*", error)


def heal(rig: Rig, index: int = 3) -> None:
    rig.table.set_call(index, "*")


def is_out(rig: Rig, seen: Seen, index: int = 3) -> bool:
    """Whether `gpu_up` of GPU `index` is 0 without current values, and all other GPUs have current values (state B)."""
    gpu = str(index)
    return (
        seen["gpu_up"].get(gpu) == 0
        and gpu not in seen["gpu_power_watts"]
        and gpu not in seen["gpu_utilization_ratio"]
        and rig.fresh(seen, "B") == rig.all(index)
        and {g for g, up in seen["gpu_up"].items() if up == 1} == rig.all(index)
        and seen.one("gpu_driver_up") == 1
    )


def never_idle(url: str) -> None:
    assert not any(look(url)["gpu_idle_seconds_total"].values())


def test_without_the_library_the_driver_is_down(rig: Rig, matrix: FaultTable) -> None:
    environment = {key: value for key, value in rig.environment.items() if key != "LD_LIBRARY_PATH"}
    running, url = rig.start(environment=environment)
    seen = look(url)
    assert seen.one("gpu_driver_up") == 0
    assert not seen["gpu_up"]
    assert scrape_ms(url) < 10
    assert "No GPU is expected to answer here: libnvidia-ml.so.1 cannot be loaded" in (fetch(f"{url}/") or "")
    assert json.loads(fetch(f"{url}/api/v1/status") or "")["health"] == "none_expected"
    assert (fetch(f"{url}/-/ready"), "level=warn" in running.log()) == ("ready\n", False)
    assert running.stop() == 0
    add_function(rig.sysfs, "0000:10:00.0", "nvidia")  # with a GPU on the bus, the missing library is a fault
    running, url = rig.start(environment=environment)
    assert "No GPU data: libnvidia-ml.so.1 cannot be loaded" in (fetch(f"{url}/") or "")
    assert json.loads(fetch(f"{url}/api/v1/status") or "")["health"] == "no_data"
    assert running.log().count('level=warning logger=sampling.driver msg="no GPU data: libnvidia-ml.so.1') == 1
    assert running.stop() == 0
    signs = "`gpu_driver_up` 0; log and page give the reason; not a fault if `gpu_devices_expected` is 0"
    matrix.add("no libnvidia-ml", "nothing", "nothing", signs, "when the library is installed, automatically")


def test_the_exporter_finds_a_driver_that_is_loaded_later(rig: Rig, matrix: FaultTable) -> None:
    rig.table.table.init_rc = 9
    _, url = rig.start()
    seen = look(url)
    assert seen.one("gpu_driver_up") == 0
    assert not seen["gpu_up"]
    assert scrape_ms(url) < 10
    assert "kernel driver is not loaded" in (fetch(f"{url}/") or "")
    matrix.add(
        "driver not loaded", "nothing", "nothing", "`gpu_driver_up` 0; log and page give the reason", "see the next row"
    )
    rig.set_state("B")
    begin = time.monotonic()
    rig.table.table.init_rc = 0
    rig.wait_until(url, "all GPUs", lambda seen: rig.fresh(seen, "B") == rig.all())
    assert time.monotonic() - begin < 8
    matrix.add("driver is loaded later", "fresh", OTHERS, "`gpu_driver_up` 1", "within 5 s, automatically")


def test_a_failing_driver_is_a_fault_even_if_no_gpu_is_expected(rig: Rig) -> None:
    rig.table.table.init_rc = 999
    running, url = rig.start()
    assert look(url).one("gpu_devices_expected") == 0
    assert "No GPU data: the driver refuses without a reason" in (fetch(f"{url}/") or "")
    assert json.loads(fetch(f"{url}/api/v1/status") or "")["health"] == "no_data"
    assert "level=warning" in running.log()


def test_the_exporter_survives_a_driver_that_hangs_at_its_start(rig: Rig, matrix: FaultTable) -> None:
    rig.table.table.init_delay_us = 600_000_000
    running, url = rig.start()
    said = "No GPU data: the driver does not answer"  # a fault, although no GPU is known yet
    seen = rig.wait_until(url, "the hang to show", lambda seen: said in (fetch(f"{url}/") or ""))
    assert seen.one("gpu_driver_up") == 0
    assert scrape_ms(url) < 10
    rig.table.table.init_delay_us = 0
    rig.wait_until(url, "all GPUs", lambda seen: rig.fresh(seen, "A") == rig.all())
    rig.table.table.init_delay_us = 600_000_000
    assert running.stop(signal.SIGTERM) == 0
    matrix.add(
        "driver hangs at its start",
        "nothing",
        "nothing",
        "`gpu_driver_up` 0; page: the driver does not answer",
        "when the driver answers, automatically; SIGTERM works meanwhile",
    )


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
        '`gpu_up{gpu="3"}` 0 (with its uuid, if the exporter has seen the GPU before)',
        OTHERS,
        f"visible {COUNT - 1} of {COUNT} expected; JSON, page and log name the call and the error",
        "within 5 s, automatically",
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
    matrix.add(fault, LOST, OTHERS, signs, "with the next cycle, automatically")


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
    assert time.monotonic() - begin < 5
    matrix.add(
        "GPU hangs at its start",
        '`gpu_up{gpu="3"}` 0',
        OTHERS,
        "JSON and page: its first call hangs in the driver",
        "when the call returns, automatically; SIGTERM works meanwhile",
    )


def test_a_hung_call_on_one_gpu_affects_only_that_gpu(rig: Rig, matrix: FaultTable) -> None:
    running, url = rig.start()
    rig.wait_until(url, "all GPUs", lambda seen: rig.fresh(seen, "A") == rig.all())
    threads = threads_of(running)
    rig.table.set_call(3, "nvmlDeviceGetUtilizationRates", delay_s=600)
    rig.set_state("B")
    rig.wait_until(url, "gpu 3 to be withheld", lambda seen: is_out(rig, seen))
    assert scrape_ms(url) < 10
    assert threads_of(running) <= threads + 2
    never_idle(url)
    rig.table.set_call(3, "nvmlDeviceGetUtilizationRates")
    rig.wait_until(url, "gpu 3 to answer", lambda seen: rig.fresh(seen, "B") == rig.all())
    matrix.add(
        "a call hangs on one GPU",
        LOST,
        OTHERS,
        "JSON `hung`, page: hung",
        "with the next cycle, automatically; the exporter starts no further thread",
    )


def test_hung_calls_on_all_gpus_leave_no_stale_value(rig: Rig, matrix: FaultTable) -> None:
    """With the default settings, as in the comparison with other exporters: a stale value is never published."""
    running, url = rig.start(settings="sampling: {interval: 1s}\n")
    rig.wait_until(url, "all GPUs", lambda seen: rig.fresh(seen, "A") == rig.all())
    threads = threads_of(running)
    for index in range(COUNT):
        rig.table.set_call(index, "nvmlDeviceGetUtilizationRates", delay_s=60)
    rig.wait_until(url, "the hang to show", lambda seen: seen.one("gpu_driver_up") == 0, 5)
    rig.set_state("B")

    def nothing_stale(seen: Seen) -> None:
        assert not seen["gpu_power_watts"]
        assert not seen["gpu_utilization_ratio"]
        assert seen["gpu_up"] == dict.fromkeys(rig.all(), 0.0)
        assert fetch(f"{url}/") is not None
        assert fetch(f"{url}/-/healthy") is not None

    rig.hold(url, 3.0, nothing_stale)
    assert scrape_ms(url) < 10
    assert threads_of(running) <= threads + 2
    never_idle(url)
    for index in range(COUNT):
        rig.table.set_call(index, "nvmlDeviceGetUtilizationRates")
    begin = time.monotonic()
    rig.wait_until(url, "fresh values", lambda seen: rig.fresh(seen, "B") == rig.all())
    assert time.monotonic() - begin < 3
    for index in range(COUNT):
        rig.table.set_call(index, "nvmlDeviceGetUtilizationRates", delay_s=60)
    rig.wait_until(url, "the hang to show again", lambda seen: seen.one("gpu_driver_up") == 0)
    begin = time.monotonic()
    assert running.stop(signal.SIGTERM) == 0
    assert time.monotonic() - begin < 3
    matrix.add(
        "a call hangs on all GPUs",
        "`gpu_up` 0 two seconds later, gauges are not published",
        "the same",
        "`gpu_driver_up` 0, page: every GPU's driver call hangs",
        "with the next cycle, automatically; the exporter starts no further thread; SIGTERM works meanwhile",
    )


def test_a_call_that_fails_on_all_gpus_removes_only_its_series(rig: Rig, matrix: FaultTable) -> None:
    _, url = rig.start()
    rig.wait_until(url, "all GPUs", lambda seen: rig.fresh(seen, "A") == rig.all())
    for index in range(COUNT):
        rig.table.set_call(index, "nvmlDeviceGetUtilizationRates", "NVML_ERROR_UNKNOWN")
        rig.table.set_call(index, "nvmlDeviceGetSamples", "NVML_ERROR_UNKNOWN")
    rig.set_state("B")
    seen = rig.wait_until(
        url,
        "utilization to go",
        lambda seen: not seen["gpu_utilization_ratio"] and rig.fresh(seen, "B") == rig.all(),
    )
    assert seen.errors["nvmlDeviceGetUtilizationRates", "NVML_ERROR_UNKNOWN"] > 0
    assert seen["gpu_up"] == dict.fromkeys(rig.all(), 1.0)
    assert 'gpu_exporter_collector_success{collector="utilization"} 0' in seen.text
    assert 'gpu_exporter_collector_success{collector="power"} 1' in seen.text
    assert scrape_ms(url) < 10
    never_idle(url)
    for index in range(COUNT):
        heal(rig, index)
    rig.wait_until(url, "utilization", lambda seen: set(seen["gpu_utilization_ratio"]) == rig.all())
    matrix.add(
        "a call fails on all GPUs",
        "the series of this call are absent, all others are fresh",
        "the same",
        "`gpu_exporter_driver_errors_total{call,error}`, `gpu_exporter_collector_success` 0",
        "with the next cycle, automatically",
    )


def test_a_gpu_that_answers_no_call_is_down(rig: Rig, matrix: FaultTable) -> None:
    """This happens in a container after `systemctl daemon-reload` has revoked its devices."""
    _, url = rig.start()
    rig.wait_until(url, "all GPUs", lambda seen: rig.fresh(seen, "A") == rig.all())
    lose(rig, error="NVML_ERROR_UNKNOWN")
    rig.set_state("B")
    rig.wait_until(url, "gpu 3 to be out", lambda seen: is_out(rig, seen))
    assert scrape_ms(url) < 10
    assert "no call is answered" in (fetch(f"{url}/api/v1/status") or "")
    heal(rig)
    rig.wait_until(url, "gpu 3 to come back", lambda seen: rig.fresh(seen, "B") == rig.all())
    rig.table.table.init_rc = 999
    done = run_exporter("--once", "--state.directory=", environment=rig.environment)
    assert done.returncode == 3
    assert "`systemctl daemon-reload` on the host may have revoked its devices" in done.stderr
    matrix.add(
        "one GPU answers no call (access to its device revoked)",
        LOST,
        OTHERS,
        "errors by call; log and page: no call is answered, with the GPU",
        "when calls are answered, automatically; a container without its devices must be recreated, as the log says",
    )


def test_a_missing_permission_is_reported_once_per_gpu(rig: Rig, matrix: FaultTable) -> None:
    for index in range(COUNT):
        rig.table.set_call(index, "nvmlDeviceGetComputeRunningProcesses", "NVML_ERROR_NO_PERMISSION")
    rig.set_state("B")
    running, url = rig.start()
    rig.wait_until(url, "all GPUs", lambda seen: rig.fresh(seen, "B") == rig.all())
    call = ("nvmlDeviceGetComputeRunningProcesses_v3", "NVML_ERROR_NO_PERMISSION")

    def counted_once(seen: Seen) -> None:
        assert seen.errors == {call: COUNT}  # once per GPU, not in every cycle

    rig.wait_until(url, "every GPU to be refused", lambda seen: seen.errors.get(call) == COUNT)
    rig.hold(url, 0.5, counted_once)
    assert running.log().count("to get this value, run as root with hostPID") == COUNT
    assert scrape_ms(url) < 10
    matrix.add(
        "no permission for a call",
        "the series of this call are absent, all others are fresh",
        "the same",
        "one line in the log names the missing permission; the error is counted once",
        "the exporter retries after 10 minutes",
    )


def test_a_failed_identity_call_leaves_only_its_label_empty(rig: Rig, matrix: FaultTable) -> None:
    calls = ("nvmlDeviceGetName", "nvmlDeviceGetPciInfo", "nvmlDeviceGetMinorNumber", "nvmlDeviceGetMigMode")
    for call in calls:
        rig.table.set_call(3, call, "NVML_ERROR_UNKNOWN")
    rig.set_state("B")
    _, url = rig.start()
    seen = rig.wait_until(url, "all GPUs", lambda seen: rig.fresh(seen, "B") == rig.all())
    uuid = rig.table.table.devices[3].uuid.decode()
    assert f'gpu_up{{gpu="3",uuid="{uuid}"}} 1' in seen.text
    rig.wait_until(url, "counts", lambda seen: all((call, "NVML_ERROR_UNKNOWN") in seen.errors for call in calls))
    heal(rig)
    named = f'gpu_info{{gpu="3",uuid="{uuid}",name="NVIDIA H100'
    rig.wait_until(url, "the name", lambda seen: named in seen.text)
    matrix.add(
        "a call about a GPU's identity fails",
        "fresh; the label of `gpu_info` is empty",
        OTHERS,
        "`gpu_exporter_driver_errors_total{call,error}`",
        "when the call is answered, automatically",
    )


def test_a_requested_reset_is_reported(rig: Rig, matrix: FaultTable) -> None:
    _, url = rig.start("--state.directory=")
    rig.wait_until(url, "all GPUs", lambda seen: rig.fresh(seen, "A") == rig.all())
    rig.table.set_field(3, nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, 1)
    rig.set_state("B")
    rig.wait_until(url, "the wish", lambda seen: seen["gpu_recovery_action"].get("3") == 1.0)
    rig.wait_until(url, "all GPUs", lambda seen: rig.fresh(seen, "B") == rig.all())
    status = json.loads(fetch(f"{url}/api/v1/status") or "")
    assert (status["devices_health"], status["gpus"][3]["asks"]) == ("partial", "asks for a reset")
    assert "asks for a reset" in (fetch(f"{url}/") or "")
    done = run_exporter("--once", "--state.directory=", *QUIET, environment=rig.environment)
    assert (done.returncode, done.stderr.count("partial: gpu 3 asks for a reset")) == (4, 1)
    matrix.add(
        "GPU asks for a reset and answers",
        "fresh; row and page: asks for a reset",
        OTHERS,
        "`gpu_recovery_action` 1, alert GpuRecoveryNeeded; `--check=devices` and `--once` name the GPU and exit with 4",
        "after the reset, automatically",
    )


def bus_of(rig: Rig) -> None:
    """Put every GPU of the driver's list on the bus, bound to the driver."""
    for index in range(COUNT):
        add_function(rig.sysfs, f"0000:{0x10 + index:02x}:00.0", "nvidia")


def test_a_gpu_on_the_bus_that_the_driver_does_not_list_is_missing(rig: Rig, matrix: FaultTable) -> None:
    bus_of(rig)
    add_function(rig.sysfs, NINTH, "nvidia")
    _, url = rig.start()
    seen = rig.wait_until(url, "all GPUs", lambda seen: rig.fresh(seen, "A") == rig.all())
    seen = rig.wait_until(url, "the ninth to be missed", lambda seen: MISSING in seen.text)
    assert (seen.one("gpu_devices_visible"), seen.one("gpu_devices_expected")) == (COUNT, COUNT + 1)
    why = f"{NINTH}: bound to kernel driver nvidia, but not in the driver's list"
    assert [each for each in json.loads(fetch(f"{url}/api/v1/status") or "")["gaps"] if why in each]
    assert html.escape(why.partition(": ")[2]) in (fetch(f"{url}/") or "")
    done = run_exporter("--once", "--state.directory=", f"--path.sysfs={rig.sysfs}", environment=rig.environment)
    assert (done.returncode, why in done.stderr) == (4, True), done.stderr
    add_function(rig.sysfs, NINTH, "vfio-pci")
    rig.wait_until(url, "it to be given away", lambda seen: "gpu_missing" not in seen.text)
    matrix.add(
        "GPU on the bus that the driver does not list",
        "row `missing` with its address; no UUID is known",
        f"{COUNT} fresh",
        f"`gpu_missing{{pci_bus_id}}` 1, alert GpuMissing, visible {COUNT} of {COUNT + 1}; `--once` names the GPU and exits with 4",
        "when the GPU is listed, bound to another driver, or removed from the bus",
    )


def test_a_gpu_that_the_driver_cannot_start_is_missing(rig: Rig, matrix: FaultTable, tmp_path: Path) -> None:
    bus_of(rig)
    add_function(rig.sysfs, NINTH, "")
    kmsg = Kmsg(tmp_path / "kmsg")
    _, url = rig.start("--collector.xid.kmsg", f"--path.kmsg={kmsg.path}")
    seen = rig.wait_until(url, "all GPUs", lambda seen: rig.fresh(seen, "A") == rig.all())
    assert MISSING not in seen.text, "a card without a driver may be a virtual machine's"
    kmsg.write(f"nvidia: probe of {NINTH} failed with error -1")
    rig.wait_until(url, "the ninth to be missed", lambda seen: MISSING in seen.text)
    assert "its probe failed" in (fetch(f"{url}/") or "")
    kmsg.close()
    matrix.add(
        "the driver cannot start a GPU (its probe fails)",
        "row `missing`: its probe failed",
        f"{COUNT} fresh",
        "`gpu_missing{pci_bus_id}` 1: at once with `--collector.xid.kmsg`, otherwise when similar GPUs have worked for 10 minutes",
        "when the GPU is listed, bound to another driver, or removed from the bus",
    )


def test_a_sleeping_gpu_is_not_a_fault(rig: Rig, matrix: FaultTable) -> None:
    bus_of(rig)
    add_function(rig.sysfs, NINTH, "nvidia", runtime_status="suspended")
    _, url = rig.start()
    rig.wait_until(url, "all GPUs", lambda seen: rig.fresh(seen, "A") == rig.all())

    def is_no_fault(seen: Seen) -> None:
        assert MISSING not in seen.text
        assert seen.one("gpu_devices_expected") == COUNT

    rig.hold(url, 1.0, is_no_fault)
    assert json.loads(fetch(f"{url}/api/v1/status") or "")["health"] == "ok"
    matrix.add(
        "GPU asleep (runtime power management)",
        "no series",
        f"{COUNT} fresh",
        "none: this is not a fault",
        "when the GPU wakes, automatically",
    )


def test_a_gpu_that_leaves_the_list_over_a_restart_is_reported(rig: Rig, matrix: FaultTable) -> None:
    state = f"--state.directory={rig.directory / 'state'}"
    running, url = rig.start(state)
    rig.wait_until(url, "all GPUs", lambda seen: rig.fresh(seen, "A") == rig.all())
    wait_for(lambda: (rig.directory / "state" / "devices.json").exists(), "the list of GPUs")
    assert running.stop() == 0
    gone = rig.table.table.devices[COUNT - 1].uuid.decode()
    rig.table.table.device_count = COUNT - 1
    rig.set_state("B")
    running, url = rig.start(state)
    seen = rig.wait_until(url, "the last GPU to be missed", lambda seen: is_out(rig, seen, COUNT - 1))
    assert f'gpu_up{{gpu="{COUNT - 1}",uuid="{gone}"}} 0' in seen.text
    assert (seen.one("gpu_devices_visible"), seen.one("gpu_devices_expected")) == (COUNT - 1, COUNT)
    assert scrape_ms(url) < 10
    done = run_exporter("forget", gone, state)
    assert (done.returncode, done.stderr) == (0, "")
    rig.wait_until(
        url,
        "the GPU to be forgotten",
        lambda seen: gone not in seen.text and seen.one("gpu_devices_expected") == COUNT - 1,
    )
    matrix.add(
        "GPU gone from the driver's list after a restart",
        "`gpu_up` 0 with index and uuid",
        OTHERS,
        f"visible {COUNT - 1} of {COUNT} expected",
        "when the GPU is back or replaced, or after `gpu-exporter forget UUID`",
    )


def test_a_gpu_of_a_virtual_machine_is_not_expected(rig: Rig, matrix: FaultTable) -> None:
    for index in range(COUNT):
        add_function(rig.sysfs, f"0000:{0x10 + index:02x}:00.0", "nvidia")
    add_function(rig.sysfs, "0000:40:00.0", "")
    holders = rig.directory / "holders.yaml"
    uuid = rig.table.table.devices[3].uuid.decode()
    holders.write_text(f'[{{"uuid": "{uuid}", "job": "77"}}]', encoding="utf-8")
    _, url = rig.start(f"--attribution.static={holders}")
    seen = rig.wait_until(url, "all GPUs", lambda seen: rig.fresh(seen, "A") == rig.all())
    seen = rig.wait_until(url, "the holder", lambda seen: 'job_id="77"' in seen.text)
    assert 'gpu_devices_unmanaged{driver="none"} 1' in seen.text
    add_function(rig.sysfs, "0000:13:00.0", "vfio-pci")
    lose(rig)
    rig.set_state("B")
    seen = rig.wait_until(
        url,
        "gpu 3 to be away",
        lambda seen: (
            "3" not in seen["gpu_up"]
            and 'gpu_devices_unmanaged{driver="vfio-pci"} 1' in seen.text
            and rig.fresh(seen, "B") == rig.all(3)
            and seen.one("gpu_devices_expected") == COUNT - 1
        ),
    )
    assert "3" not in seen["gpu_power_watts"]
    assert 'job_id="77"' in seen.text
    assert scrape_ms(url) < 10
    assert "bound to kernel driver vfio-pci" in (fetch(f"{url}/") or "")
    add_function(rig.sysfs, "0000:13:00.0", "nvidia")
    heal(rig)
    seen = rig.wait_until(url, "gpu 3 to be back", lambda seen: rig.fresh(seen, "B") == rig.all())
    matrix.add(
        "GPU given to a virtual machine",
        "no `gpu_up` and no gauges: not expected, so not lost; its holder remains, as unknown",
        OTHERS,
        '`gpu_devices_unmanaged{driver="vfio-pci"}` 1; one GPU less is expected',
        "when the GPU is bound to nvidia again, automatically",
    )


def test_the_exporter_releases_the_driver_on_request(rig: Rig, matrix: FaultTable) -> None:
    holders = rig.directory / "holders.yaml"
    uuid = rig.table.table.devices[3].uuid.decode()
    holders.write_text(f'[{{"uuid": "{uuid}", "job": "77"}}]', encoding="utf-8")
    running, url = rig.start(f"--attribution.static={holders}")
    start = 'gpu_allocation_start_timestamp_seconds{gpu="3"'
    before = rig.wait_until(url, "the holder", lambda seen: start in seen.text and rig.fresh(seen, "A") == rig.all())

    def holds_driver() -> bool:
        return str(rig.table.path) in Path(f"/proc/{running.process.pid}/maps").read_text("utf-8")

    def line(seen: Seen) -> str:
        return next(line for line in seen.text.splitlines() if line.startswith(start))

    assert holds_driver()
    begin = time.monotonic()
    running.process.send_signal(signal.SIGUSR1)
    wait_for(lambda: not holds_driver(), "the driver to be free", 5, 0.01)
    assert time.monotonic() - begin < 2
    rig.set_state("B")
    seen = rig.wait_until(url, "the release to show", lambda seen: seen.one("gpu_driver_up") == 0)
    assert not seen["gpu_up"]
    assert not seen["gpu_power_watts"]
    assert line(seen) == line(before)
    assert scrape_ms(url) < 10

    def stays_free(_: Seen) -> None:
        assert not holds_driver()

    rig.hold(url, 1.0, stays_free)
    running.process.send_signal(signal.SIGHUP)
    seen = rig.wait_until(url, "all GPUs again", lambda seen: rig.fresh(seen, "B") == rig.all())
    assert line(seen) == line(before)
    assert running.stop() == 0
    matrix.add(
        "driver released on request (SIGUSR1)",
        "no `gpu_up` and no gauges: released, not lost; holders remain, as unknown",
        "the same",
        "driver released within 2 s; `gpu_driver_up` 0; log and page give the reason",
        "SIGHUP",
    )


def test_the_exporter_detects_a_replaced_driver_by_its_list(rig: Rig) -> None:
    running, url = rig.start("--driver.changed=exit")
    rig.wait_until(url, "all GPUs", lambda seen: rig.fresh(seen, "A") == rig.all())
    rig.table.table.count_rc = 18  # NVML_ERROR_LIB_RM_VERSION_MISMATCH, read every few seconds
    assert running.process.wait(15) == 5


def test_the_exporter_ends_when_the_driver_is_replaced_in_a_container(rig: Rig, matrix: FaultTable) -> None:
    running, url = rig.start(environment={**rig.environment, "container": "podman"})  # as Podman and systemd set it
    rig.wait_until(url, "all GPUs", lambda seen: rig.fresh(seen, "A") == rig.all())
    for index in range(COUNT):
        lose(rig, index, "NVML_ERROR_LIB_RM_VERSION_MISMATCH")
    assert running.process.wait(10) == 5
    assert "the driver was replaced" in running.log()
    matrix.add(
        "driver replaced, in a container",
        "nothing",
        "the same",
        "the process ends with status 5; the log gives the reason",
        "the kubelet restarts the container with the new driver's library",
    )


def test_the_exporter_restarts_itself_when_the_driver_is_replaced_on_a_host(rig: Rig, matrix: FaultTable) -> None:
    running, url = rig.start(f"--state.directory={rig.directory / 'state'}", "--driver.changed=restart")
    rig.wait_until(url, "all GPUs", lambda seen: rig.fresh(seen, "A") == rig.all())
    for index in range(COUNT):
        lose(rig, index, "NVML_ERROR_LIB_RM_VERSION_MISMATCH")
    wait_for(lambda: "this process restarts" in running.log(), "the new start")
    for index in range(COUNT):
        heal(rig, index)
    rig.set_state("B")

    def is_back() -> bool:
        text = fetch(f"{url}/metrics") or ""
        return 'gpu_power_watts{gpu="0"' in text and running.process.poll() is None

    wait_for(is_back, "the exporter to be back")
    rig.wait_until(url, "all GPUs", lambda seen: rig.fresh(seen, "B") == rig.all())
    for index in range(COUNT):  # a second replacement soon after is left to the supervisor
        lose(rig, index, "NVML_ERROR_LIB_RM_VERSION_MISMATCH")
    assert running.process.wait(10) == 5
    matrix.add(
        "driver replaced, on a host",
        "fresh after a moment",
        "the same",
        "the log gives the reason",
        "the process restarts itself once and reads its counters from the state file; the second time it ends with status 5",
    )


def test_xids_remain_when_their_gpu_is_lost(rig: Rig, matrix: FaultTable) -> None:
    _, url = rig.start()
    uuid = rig.table.table.devices[3].uuid.decode()
    zero = f'gpu_xid_events_total{{gpu="3",uuid="{uuid}",class="hardware"}} '
    # Wait for both GPUs: each thread registers its own GPU, and events before that are not counted.
    other = 'gpu_xid_events_total{gpu="0",'
    rig.wait_until(url, "counts to begin at 0", lambda seen: f"{zero}0\n" in seen.text and other in seen.text)
    rig.table.push_event(3, 79)
    rig.table.push_event(0, 31)
    lose(rig)
    rig.set_state("B")
    seen = rig.wait_until(url, "the XID", lambda seen: is_out(rig, seen) and f"{zero}1\n" in seen.text)
    assert 'xid="79",class="hardware"} 1' in seen.text
    seen = rig.wait_until(url, "the other XID", lambda seen: 'xid="31",class="application"} 1' in seen.text)
    assert scrape_ms(url) < 10
    matrix.add(
        "XID, then the GPU is lost",
        "`gpu_up` 0; its XIDs remain",
        OTHERS,
        "`gpu_xid_events_total{class}` from 0 to 1, `gpu_xid_errors_total{xid,class}`, last timestamp, log",
        "as for a lost GPU",
    )


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
    assert time.monotonic() - begin < 5
    assert done.returncode == 4
    assert 'gpu_power_watts{gpu="2"' in done.stdout
    assert 'gpu_power_watts{gpu="3"' not in done.stdout
    assert 'gpu_up{gpu="3"' in done.stdout


def power_of(seen: Seen, gpu: str) -> float | None:
    return seen["gpu_power_watts"].get(gpu)


def test_a_release_does_not_close_the_driver_during_a_hung_call(rig: Rig) -> None:
    """The driver stays open during a pending call, no thread is added, and the exporter ends without an error."""
    running, url = rig.start()
    rig.wait_until(url, "all GPUs", lambda seen: rig.fresh(seen, "A") == rig.all())
    rig.table.set_call(3, "nvmlDeviceGetPowerUsage", delay_s=600)
    rig.wait_until(url, "gpu 3 to hang", lambda seen: seen["gpu_up"].get("3") == 0)
    threads = threads_of(running)
    for _ in range(2):
        running.process.send_signal(signal.SIGUSR1)
        rig.wait_until(url, "the release", lambda seen: seen.one("gpu_driver_up") == 0)
        assert str(rig.table.path) in Path(f"/proc/{running.process.pid}/maps").read_text("utf-8")
        running.process.send_signal(signal.SIGHUP)
        rig.wait_until(url, "the others again", lambda seen: rig.fresh(seen, "A") == rig.all(3))
    assert "a call hangs in it" in running.log()
    assert threads_of(running) <= threads + 2
    running.process.send_signal(signal.SIGUSR1)
    rig.wait_until(url, "the release", lambda seen: seen.one("gpu_driver_up") == 0)
    rig.table.set_call(3, "nvmlDeviceGetPowerUsage")  # when the call returns, the driver is released
    wait_for(
        lambda: str(rig.table.path) not in Path(f"/proc/{running.process.pid}/maps").read_text("utf-8"),
        "the driver to be free",
    )
    running.process.send_signal(signal.SIGHUP)
    rig.wait_until(url, "all GPUs again", lambda seen: rig.fresh(seen, "A") == rig.all())
    rig.table.set_call(3, "nvmlDeviceGetPowerUsage", delay_s=600)
    rig.wait_until(url, "gpu 3 to hang", lambda seen: seen["gpu_up"].get("3") == 0)
    running.process.send_signal(signal.SIGUSR1)
    rig.wait_until(url, "the release", lambda seen: seen.one("gpu_driver_up") == 0)
    assert running.stop(signal.SIGTERM) == 0


def test_a_release_while_the_driver_is_being_opened_takes_effect(rig: Rig) -> None:
    rig.table.table.init_delay_us = 4_000_000
    running, url = rig.start()
    running.process.send_signal(signal.SIGUSR1)
    wait_for(lambda: "not released yet" in running.log(), "the release to give up for now")
    rig.table.table.init_delay_us = 0
    rig.wait_until(url, "the release to hold", lambda seen: "SIGHUP reopens it" in (fetch(f"{url}/") or ""))
    assert str(rig.table.path) not in Path(f"/proc/{running.process.pid}/maps").read_text("utf-8")
    running.process.send_signal(signal.SIGHUP)
    rig.wait_until(url, "all GPUs", lambda seen: rig.fresh(seen, "A") == rig.all())


def test_a_release_while_the_driver_is_being_asked_ends_every_loop_first(rig: Rig) -> None:
    running, url = rig.start()
    rig.wait_until(url, "all GPUs", lambda seen: rig.fresh(seen, "A") == rig.all())
    rig.table.table.count_delay_us = 600_000_000
    rig.wait_until(
        url, "the driver to be asked", lambda seen: "does not answer" in (fetch(f"{url}/api/v1/status") or "")
    )
    running.process.send_signal(signal.SIGUSR1)
    wait_for(lambda: "not released yet" in running.log(), "the release to give up for now")
    rig.table.table.count_delay_us = 0
    wait_for(
        lambda: str(rig.table.path) not in Path(f"/proc/{running.process.pid}/maps").read_text("utf-8"),
        "the driver to be free",
    )
    seen = rig.wait_until(url, "the release", lambda seen: "SIGHUP reopens it" in (fetch(f"{url}/") or ""))
    assert not seen["gpu_up"]
    running.process.send_signal(signal.SIGHUP)
    rig.wait_until(url, "all GPUs", lambda seen: rig.fresh(seen, "A") == rig.all())
    assert running.stop() == 0


def test_counters_continue_after_a_release(rig: Rig) -> None:
    rig.feeder = type(rig.feeder)(rig.feeder.stage.scenario, rig.table)  # on the real clock, so that GPM moves
    rig.feeder.start()
    try:
        running, url = rig.start()
        name = "gpu_sm_active_seconds_total"
        before = rig.wait_until(url, "some activity", lambda seen: seen[name].get("0", 0) > 0.3)[name]["0"]
        running.process.send_signal(signal.SIGUSR1)
        rig.wait_until(url, "the release", lambda seen: seen.one("gpu_driver_up") == 0)
        running.process.send_signal(signal.SIGHUP)
        after = rig.wait_until(url, "activity again", lambda seen: "0" in seen[name])[name]["0"]
    finally:
        rig.feeder.stop()
    assert after >= before


def test_failed_state_writes_are_reported_and_counted_until_they_succeed(rig: Rig, matrix: FaultTable) -> None:
    settings = "sampling: {interval: 200ms}\nattribution: {interval: 200ms}\nstate: {write_interval: 200ms}\n"
    running, url = rig.start(f"--state.directory={rig.directory / 'state'}", settings=settings)
    observed = "gpu_observed_seconds_total"
    errors, written = "gpu_exporter_state_write_errors_total", "gpu_exporter_state_last_write_timestamp_seconds"
    seen = rig.wait_until(url, "all GPUs", lambda seen: rig.fresh(seen, "A") == rig.all())
    first = seen.one(written) or 0.0
    seen = rig.wait_until(url, "two writes with counters", lambda seen: (seen.one(written) or 0) > first + 0.2)
    assert seen.one(errors) == 0
    # From now on every write of more than one byte fails, as on a full disk. Writes to the log may fail too.
    limit = resource.prlimit(running.process.pid, resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
    # The exporter retries every 200 ms: after ten tries no counter may grow.
    stopped = rig.wait_until(url, "the errors", lambda seen: (seen.one(errors) or 0) >= 10)
    last = stopped.one(written)
    assert last is not None
    (warning,) = json.loads(fetch(f"{url}/api/v1/status") or "")["warnings"]
    path = rig.directory / "state" / "state"
    assert warning.startswith(f"{path}: the state file cannot be written (File too large). Counters stop")
    assert warning in (fetch(f"{url}/") or "")

    def stays_stopped(seen: Seen) -> None:
        assert seen[observed] == stopped[observed]
        assert seen.one(written) == last

    rig.hold(url, 1.0, stays_stopped)
    resource.prlimit(running.process.pid, resource.RLIMIT_FSIZE, limit)
    rig.wait_until(url, "the next write", lambda seen: (seen.one(written) or 0) > last)
    rig.wait_until(url, "counters to go on", lambda seen: seen[observed]["0"] > stopped[observed]["0"])
    assert json.loads(fetch(f"{url}/api/v1/status") or "")["warnings"] == []
    assert running.stop() == 0
    matrix.add(
        "state directory full or read-only",
        "counters remain at the last written value; gauges are fresh",
        "the same",
        "`gpu_exporter_state_write_errors_total`, `gpu_exporter_state_last_write_timestamp_seconds`; log and page give the reason",
        "with the next successful write, automatically",
    )


@pytest.mark.parametrize("fault", ["not loaded", "hangs"])
def test_known_gpus_are_missing_when_the_driver_does_not_come_back(rig: Rig, fault: str) -> None:
    """For example after a reboot into a kernel without the driver's module, which is not intended."""
    state = f"--state.directory={rig.directory / 'state'}"
    running, url = rig.start(state)
    rig.wait_until(url, "all GPUs", lambda seen: rig.fresh(seen, "A") == rig.all())
    wait_for(lambda: (rig.directory / "state" / "devices.json").exists(), "the list of GPUs")
    assert running.stop() == 0
    for index in range(COUNT):
        add_function(rig.sysfs, f"0000:{0x10 + index:02x}:00.0", "")
    if fault == "hangs":
        rig.table.table.init_delay_us = 60_000_000
    else:
        rig.table.table.init_rc = 9
    _, url = rig.start(state)
    seen = rig.wait_until(url, "the GPUs to be missed", lambda seen: set(seen["gpu_up"]) == rig.all())
    assert set(seen["gpu_up"].values()) == {0.0}
    assert (seen.one("gpu_driver_up"), seen.one("gpu_devices_expected")) == (0, COUNT)
    rig.table.table.init_delay_us = rig.table.table.init_rc = 0
    rig.wait_until(url, "all GPUs", lambda seen: rig.fresh(seen, "A") == rig.all())


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
