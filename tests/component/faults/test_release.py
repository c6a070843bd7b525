"""A driver that is released on request."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from tests.testbed.faults import FaultTable, Rig, Seen, scrape_ms, threads_of
from tests.testbed.processes import fastest, fetch, wait_for


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

    def release() -> float:
        """The seconds until the driver is free."""
        if not holds_driver():
            running.process.send_signal(signal.SIGHUP)
            wait_for(holds_driver, "the driver to be in use again")
        begin = time.monotonic()
        running.process.send_signal(signal.SIGUSR1)
        wait_for(lambda: not holds_driver(), "the driver to be free", each_s=0.01)
        return time.monotonic() - begin

    assert holds_driver()
    assert fastest(release, 2.0, 5) < 2.0
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
        "no `gpu_up`, no gauges; holders are unknown",
        "`gpu_driver_up` 0 within 2 s; log and page name the reason",
        "SIGHUP",
    )


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
    assert "because a call to the driver hangs" in running.log()
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
    wait_for(lambda: "has not released the driver yet" in running.log(), "the release to give up for now")
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
    wait_for(lambda: "has not released the driver yet" in running.log(), "the release to give up for now")
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
