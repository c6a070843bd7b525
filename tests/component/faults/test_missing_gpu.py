"""GPUs that the driver does not list: on the bus, asleep, gone after a restart, or given to a virtual machine."""

from __future__ import annotations

import html
import json
from pathlib import Path

from tests.component.faults.fault_bench import COUNT, MISSING, NINTH, bus_of, heal, is_out, lose
from tests.testbed.faults import FaultTable, Rig, Seen, scrape_ms
from tests.testbed.kmsg import Kmsg
from tests.testbed.processes import fetch, run_exporter, wait_for
from tests.testbed.sysfs import add_function


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
        "row `missing` with the GPU's address; no UUID is known",
        f"`gpu_missing{{pci_bus_id}}` 1, GpuMissing, visible {COUNT} of {COUNT + 1}; `--once` exits with 4",
        "when the GPU is listed, rebound or removed",
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
        "the driver cannot start a GPU",
        "row `missing`: its probe failed",
        "`gpu_missing{pci_bus_id}` 1: with `--collector.xid.kmsg` at once, otherwise after similar GPUs have worked for 10 minutes",
        "when the GPU is listed, rebound or removed",
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
        "none: no fault",
        "when the GPU wakes",
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
        "no `gpu_up`, no gauges; its holder is unknown",
        '`gpu_devices_unmanaged{driver="vfio-pci"}` 1; one GPU less expected',
        "when the GPU is bound to nvidia again",
    )
