"""Faults of the driver: not there, not loaded, hanging, replaced."""

from __future__ import annotations

import json
import signal
import time

import pytest

from tests.component.faults.fault_bench import COUNT, heal, lose
from tests.testbed.faults import FaultTable, Rig, look, scrape_ms
from tests.testbed.processes import PROMPT_S, fetch, wait_for
from tests.testbed.sysfs import add_function


def test_without_the_library_the_driver_is_down(rig: Rig, matrix: FaultTable) -> None:
    environment = {key: value for key, value in rig.environment.items() if key != "LD_LIBRARY_PATH"}
    running, url = rig.start(environment=environment)
    seen = look(url)
    assert seen.one("gpu_driver_up") == 0
    assert not seen["gpu_up"]
    assert scrape_ms(url) < 10
    assert "The exporter expects no GPU here: libnvidia-ml.so.1 cannot be loaded" in (fetch(f"{url}/") or "")
    assert json.loads(fetch(f"{url}/api/v1/status") or "")["health"] == "none_expected"
    assert (fetch(f"{url}/-/ready"), "level=warn" in running.log()) == ("ready\n", False)
    assert running.stop() == 0
    add_function(rig.sysfs, "0000:10:00.0", "nvidia")  # with a GPU on the bus, the missing library is a fault
    running, url = rig.start(environment=environment)
    assert "No GPU data: libnvidia-ml.so.1 cannot be loaded" in (fetch(f"{url}/") or "")
    assert json.loads(fetch(f"{url}/api/v1/status") or "")["health"] == "no_data"
    assert running.log().count('level=warning logger=agent.sampling.driver msg="no GPU data: libnvidia-ml.so.1') == 1
    assert running.stop() == 0
    signs = "`gpu_driver_up` 0; log and page name the reason; if no GPU is expected, the exporter reports no fault"
    matrix.add("no libnvidia-ml", "nothing", signs, "when the library is installed")


def test_the_exporter_finds_a_driver_that_is_loaded_later(rig: Rig, matrix: FaultTable) -> None:
    rig.table.table.init_rc = 9
    _, url = rig.start()
    seen = look(url)
    assert seen.one("gpu_driver_up") == 0
    assert not seen["gpu_up"]
    assert scrape_ms(url) < 10
    assert "kernel driver is not loaded" in (fetch(f"{url}/") or "")
    matrix.add("driver not loaded", "nothing", "`gpu_driver_up` 0; log and page name the reason", "see the next row")
    rig.set_state("B")
    begin = time.monotonic()
    rig.table.table.init_rc = 0
    rig.wait_until(url, "all GPUs", lambda seen: rig.fresh(seen, "B") == rig.all())
    assert time.monotonic() - begin < 5 + PROMPT_S
    matrix.add("driver is loaded later", "fresh", "`gpu_driver_up` 1", "within 5 s")


def test_a_failing_driver_is_a_fault_even_if_no_gpu_is_expected(rig: Rig) -> None:
    rig.table.table.init_rc = 999
    running, url = rig.start()
    assert look(url).one("gpu_devices_expected") == 0
    assert "No GPU data: the driver gives no reason" in (fetch(f"{url}/") or "")
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
        "`gpu_driver_up` 0; page: the driver does not answer",
        "when the driver answers; SIGTERM works meanwhile",
    )


def test_the_exporter_detects_a_replaced_driver_by_its_list(rig: Rig) -> None:
    running, url = rig.start("--driver.changed=exit")
    rig.wait_until(url, "all GPUs", lambda seen: rig.fresh(seen, "A") == rig.all())
    rig.table.table.count_rc = 18  # NVML_ERROR_LIB_RM_VERSION_MISMATCH, read every few seconds
    assert running.process.wait(60) == 5


def test_the_exporter_ends_when_the_driver_is_replaced_in_a_container(rig: Rig, matrix: FaultTable) -> None:
    running, url = rig.start(environment={**rig.environment, "container": "podman"})  # as Podman and systemd set it
    rig.wait_until(url, "all GPUs", lambda seen: rig.fresh(seen, "A") == rig.all())
    for index in range(COUNT):
        lose(rig, index, "NVML_ERROR_LIB_RM_VERSION_MISMATCH")
    assert running.process.wait(60) == 5
    assert "the driver was replaced" in running.log()
    matrix.add(
        "driver replaced, in a container",
        "nothing",
        "the process ends with status 5; the log names the reason",
        "the kubelet restarts the container",
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
    assert running.process.wait(60) == 5
    matrix.add(
        "driver replaced, on a host",
        "fresh after a moment",
        "the log gives the reason",
        "the process restarts itself and keeps its counters; soon after another restart, it ends with status 5",
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
