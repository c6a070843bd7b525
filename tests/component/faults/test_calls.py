"""Faults of single calls: hanging, failing, not permitted."""

from __future__ import annotations

import signal
import time

from tests.component.faults.fault_bench import COUNT, LOST, heal, is_out, never_idle
from tests.testbed.faults import FaultTable, Rig, Seen, scrape_ms, threads_of
from tests.testbed.processes import PROMPT_S, fetch


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
        "JSON `hung`, page: hung",
        "next cycle",
    )


def test_hung_calls_on_all_gpus_leave_no_stale_value(rig: Rig, matrix: FaultTable) -> None:
    """With the default settings, as in the comparison with other exporters: a stale value is never published."""
    running, url = rig.start(settings="sampling: {interval: 1s}\n")
    rig.wait_until(url, "all GPUs", lambda seen: rig.fresh(seen, "A") == rig.all())
    threads = threads_of(running)
    for index in range(COUNT):
        rig.table.set_call(index, "nvmlDeviceGetUtilizationRates", delay_s=60)
    rig.wait_until(url, "the hang to show", lambda seen: seen.one("gpu_driver_up") == 0)
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
    assert time.monotonic() - begin < PROMPT_S
    for index in range(COUNT):
        rig.table.set_call(index, "nvmlDeviceGetUtilizationRates", delay_s=60)
    rig.wait_until(url, "the hang to show again", lambda seen: seen.one("gpu_driver_up") == 0)
    begin = time.monotonic()
    assert running.stop(signal.SIGTERM) == 0
    assert time.monotonic() - begin < PROMPT_S
    matrix.add(
        "a call hangs on all GPUs",
        "lost after two seconds",
        "`gpu_driver_up` 0, page: every GPU's driver call hangs",
        "next cycle; SIGTERM works meanwhile",
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
        "no series of this call, all others fresh",
        "`gpu_exporter_driver_errors_total{call,error}`, `gpu_exporter_collector_success` 0",
        "next cycle",
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
        "no series of this call, all others fresh",
        "one line in the log; the error counts once",
        "at the next try, after 10 minutes",
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
        "fresh; a label of `gpu_info` is empty",
        "`gpu_exporter_driver_errors_total{call,error}`",
        "when the driver answers the call",
    )
