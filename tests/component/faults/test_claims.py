"""Identity is a claim: GPUs with one UUID, an index that passes to another GPU, GPUs of others, and links that are gone."""

from __future__ import annotations

import json

import pytest

from gpu_exporter.common.model.rows import join_rows
from tests.component.faults.fault_bench import COUNT, bus_of
from tests.testbed.faults import QUIET, FaultTable, Rig, Seen, scrape_ms
from tests.testbed.processes import fetch, run_exporter, wait_for

TWIN_CALL = ("nvmlDeviceGetUUID", "NOT_UNIQUE")


def address(index: int) -> str:
    return f"0000:{0x10 + index:02x}:00.0"


def listed(rig: Rig) -> str:
    """The list of expected GPUs, "" before it is written."""
    path = rig.directory / "state" / "devices.json"
    return path.read_text("utf-8") if path.exists() else ""


def uuids(url: str) -> dict[str, str]:
    """The UUID of each GPU in the JSON status, by its PCI address. Fails if two GPUs have one name."""
    gpus = json.loads(fetch(f"{url}/api/v1/status") or "")["gpus"]
    found = {gpu["pci_bus_id"]: gpu["uuid"] for gpu in gpus}
    assert len(found) == len(gpus) == len(set(found.values()))
    return found


@pytest.mark.parametrize("late", [None, 2, 3])
def test_gpus_with_one_uuid_are_told_apart_in_every_order(rig: Rig, matrix: FaultTable, late: int | None) -> None:
    """`late`: the twin that does not answer at the first start."""
    own = rig.table.table.devices[2].uuid.decode()
    rig.table.table.devices[3].uuid = own.encode()
    state = f"--state.directory={rig.directory / 'state'}"
    if late is not None:
        rig.table.set_call(late, "*", "NVML_ERROR_GPU_IS_LOST")
    running, url = rig.start(state)
    if late is not None:
        rig.wait_until(url, "the others", lambda seen: rig.fresh(seen, "A") == rig.all(late))
        rig.table.set_call(late, "*")

    def is_told_apart(seen: Seen) -> bool:
        assert len(seen["gpu_up"]) == COUNT
        names = [f'gpu_up{{gpu="{index}",uuid="{own}@{address(index)}"}} 1' for index in (2, 3)]
        return rig.fresh(seen, "A") == rig.all() and all(name in seen.text for name in names)

    seen = rig.wait_until(url, "both GPUs", is_told_apart, timeout_s=30.0)
    names = uuids(url)
    assert (seen.one("gpu_devices_visible"), seen.one("gpu_devices_expected")) == (COUNT, COUNT)
    assert seen.errors[TWIN_CALL] == 1
    wait_for(lambda: all(f"{own}@{address(index)}" in listed(rig) for index in (2, 3)), "the list of GPUs")
    assert running.stop() == 0
    rig.table.set_call(2, "*", "NVML_ERROR_GPU_IS_LOST")  # only one twin answers after the restart
    running, url = rig.start(state)
    rig.wait_until(url, "the others", lambda seen: rig.fresh(seen, "A") == rig.all(2) and "2" in seen["gpu_up"])
    assert uuids(url) == names
    assert all(
        f'gpu_observed_seconds_total{{gpu="{index}",uuid="{own}@{address(index)}"}}' in seen.text for index in (2, 3)
    )
    rig.table.set_call(2, "*")
    rig.wait_until(url, "all GPUs", lambda seen: rig.fresh(seen, "A") == rig.all())
    assert uuids(url) == names
    assert scrape_ms(url) < 10
    if late is None:
        matrix.add(
            "two GPUs report one UUID",
            "fresh; uuid with the PCI address",
            '`gpu_exporter_driver_errors_total{error="NOT_UNIQUE"}`, a warning; this UUID has no holder',
            "when the UUIDs differ; then run `gpu-exporter forget UUID`",
        )


def test_once_tells_gpus_with_one_uuid_apart(rig: Rig) -> None:
    own = rig.table.table.devices[2].uuid
    rig.table.table.devices[3].uuid = own
    done = run_exporter("--once", "--state.directory=", "--format=json", *QUIET, environment=rig.environment)
    names = [gpu["uuid"] for gpu in json.loads(done.stdout)["gpus"]]
    assert (done.returncode, len(set(names)), len(names)) == (0, COUNT, COUNT)
    assert names[2:4] == [f"{own.decode()}@{address(index)}" for index in (2, 3)]


def test_once_names_a_gpu_whose_twin_is_gone_as_the_daemon_did(rig: Rig) -> None:
    own = rig.table.table.devices[2].uuid.decode()
    first, second = rig.table.table.devices[2], rig.table.table.devices[3]
    kept, second.uuid = second.uuid, first.uuid
    state = f"--state.directory={rig.directory / 'state'}"
    running, url = rig.start(state)
    rig.wait_until(url, "all GPUs", lambda seen: rig.fresh(seen, "A") == rig.all())
    wait_for(lambda: all(f"{own}@{address(index)}" in listed(rig) for index in (2, 3)), "the list of GPUs")
    assert running.stop() == 0
    second.uuid = kept  # another board is in the slot
    running, url = rig.start(state)
    rig.wait_until(url, "all GPUs", lambda seen: rig.fresh(seen, "A") == rig.all())
    wait_for(lambda: f"{own}@{address(3)}" not in listed(rig), "the old name to go")
    assert running.stop() == 0
    done = run_exporter("--once", "--check=devices", "--format=json", state, *QUIET, environment=rig.environment)
    names = [gpu["uuid"] for gpu in json.loads(done.stdout)["gpus"]]
    assert (done.returncode, len(names), names[2]) == (0, COUNT, f"{own}@{address(2)}"), done.stderr


def test_an_index_that_passed_to_another_gpu_is_not_shown_twice(rig: Rig, matrix: FaultTable) -> None:
    """GPU 0 is gone after a boot, so the driver numbers the other GPUs anew."""
    lost = rig.table.table.devices[0].uuid.decode()
    state = f"--state.directory={rig.directory / 'state'}"
    running, url = rig.start(state)
    rig.wait_until(url, "all GPUs", lambda seen: rig.fresh(seen, "A") == rig.all())
    wait_for(lambda: bool(listed(rig)), "the list of GPUs")
    assert running.stop() == 0
    table = rig.table.table
    for index in range(COUNT - 1):
        device, following = table.devices[index], table.devices[index + 1]
        device.uuid, device.bus_id, device.minor = following.uuid, following.bus_id, following.minor
    table.device_count = COUNT - 1
    running, url = rig.start(state)
    rig.wait_until(
        url, "the GPU to be missed", lambda seen: f'gpu_up{{gpu="{address(0)}",uuid="{lost}"}} 0' in seen.text
    )
    rows = list(join_rows(json.loads(fetch(f"{url}/api/v1/status") or "")))
    assert len({row.gpu for row in rows}) == len(rows) == COUNT
    assert [row.state for row in rows if row.gpu == address(0)] == ["lost"]
    assert scrape_ms(url) < 10
    matrix.add(
        "GPU gone after a boot; another GPU has its index",
        "`gpu_up` 0 with the PCI address as label `gpu`",
        f"visible {COUNT - 1} of {COUNT}, GpuLost",
        "when the GPU is back or replaced, or after `gpu-exporter forget UUID`",
    )


@pytest.mark.parametrize("call", ["nvmlDeviceGetHandleByIndex", "nvmlDeviceGetUUID"])
def test_a_gpu_of_others_is_neither_lost_nor_expected(rig: Rig, matrix: FaultTable, call: str) -> None:
    """A container sees a part of the GPUs: the driver lists all, and refuses the others."""
    bus_of(rig)
    state = f"--state.directory={rig.directory / 'state'}"
    for known in (False, True):  # also a GPU that an earlier exporter of this node could use
        rig.table.set_call(3, call, "NVML_ERROR_NO_PERMISSION")
        running, url = rig.start(state)
        seen = rig.wait_until(url, "the others", lambda seen: rig.fresh(seen, "A") == rig.all(3))
        rig.hold(url, 1.0, lambda seen: _is_absent(seen))
        assert seen.one("gpu_driver_up") == 1
        done = run_exporter("--once", "--check=devices", "--state.directory=", *QUIET, environment=rig.environment)
        assert (done.returncode, "partial" in done.stderr) == (0, False), done.stderr
        assert running.stop() == 0
        if not known:
            rig.table.set_call(3, call)
            running, url = rig.start(state)
            rig.wait_until(url, "all GPUs", lambda seen: rig.fresh(seen, "A") == rig.all())
            wait_for(lambda: bool(listed(rig)), "the list of GPUs")
            assert running.stop() == 0
    if call == "nvmlDeviceGetHandleByIndex":
        matrix.add(
            "GPU that this container may not use",
            "nothing: the GPU is not lost",
            f"visible {COUNT - 1} of {COUNT - 1} expected; one line in the log",
            "when the driver permits its use",
        )


def test_a_driver_that_refuses_every_gpu_is_a_fault(rig: Rig) -> None:
    for index in range(COUNT):
        rig.table.set_call(index, "nvmlDeviceGetHandleByIndex", "NVML_ERROR_NO_PERMISSION")
    _, url = rig.start("--state.directory=")
    rig.wait_until(url, "the refusal", lambda seen: seen.one("gpu_driver_up") == 0)
    status = json.loads(fetch(f"{url}/api/v1/status") or "")
    assert status["devices_health"] == "no_data" and "refuses all of them" in status["driver_error"]
    done = run_exporter("--once", "--check=devices", "--state.directory=", *QUIET, environment=rig.environment)
    assert (done.returncode, "refuses all of them" in done.stderr) == (3, True), done.stderr
    for index in range(COUNT):
        rig.table.set_call(index, "nvmlDeviceGetHandleByIndex")
    rig.wait_until(url, "all GPUs", lambda seen: rig.fresh(seen, "A") == rig.all() and seen.one("gpu_driver_up") == 1)


def _is_absent(seen: Seen) -> None:
    assert "3" not in seen["gpu_up"] and "gpu_missing" not in seen.values
    assert (seen.one("gpu_devices_visible"), seen.one("gpu_devices_expected")) == (COUNT - 1, COUNT - 1)


def test_nvlinks_that_are_gone_are_named_also_after_a_restart(rig: Rig, matrix: FaultTable) -> None:
    """GPU 3 loses all links, GPU 4 one link. GPU 5 never had any."""

    def links(index: int, up: int) -> None:
        with rig.table.writing(index) as out:
            out.nvlinks[:] = [2] * up + [1] * (18 - up)

    rig.table.table.devices[5].nvlinks[:] = [0] * 18
    state = f"--state.directory={rig.directory / 'state'}"
    running, url = rig.start(state)
    rig.wait_until(url, "the links", lambda seen: set(seen["gpu_nvlinks_active"].values()) == {18.0})
    assert "gpu_condition{" not in (fetch(f"{url}/metrics") or "")
    wait_for(lambda: listed(rig).count('"links": 18') == COUNT - 1, "the list of GPUs")
    assert running.stop() == 0
    links(3, 0)
    links(4, 17)
    running, url = rig.start(state)
    seen = rig.wait_until(url, "the links", lambda seen: seen["gpu_nvlinks_active"].get("3") == 0.0)
    assert seen["gpu_nvlinks_active"]["4"] == 17.0 and "5" not in seen["gpu_nvlinks_active"]
    table = fetch(f"{url}/api/v1/table") or ""
    assert (table.count("0 of 18 NVLinks are up"), table.count("17 of 18 NVLinks are up")) == (1, 1)
    for index, severity in ((3, "degraded"), (4, "degraded")):  # after a reset, links train for some seconds
        uuid = rig.table.table.devices[index].uuid.decode()
        labels = f'{{gpu="{index}",uuid="{uuid}",condition="nvlinks_down",severity="{severity}"}} 1\n'
        assert f"gpu_condition{labels}" in seen.text
    assert seen.text.count("gpu_condition{") == 2
    assert run_exporter("--once", "--check=devices", state, *QUIET, environment=rig.environment).returncode == 0
    unusable = 'condition="nvlinks_down",severity="unusable"} 1'
    rig.wait_until(url, "a minute without links", lambda seen: seen.text.count(unusable) == 1, timeout_s=120.0)
    done = run_exporter("--once", "--check=devices", state, *QUIET, environment=rig.environment)
    assert (done.returncode, done.stderr.count("partial:")) == (4, 1)
    assert "gpu 3: 0 of 18 NVLinks are up" in done.stderr
    for index in (3, 4):  # the bridge was removed on purpose
        assert run_exporter("forget", rig.table.table.devices[index].uuid.decode(), state).returncode == 0
    rig.wait_until(url, "no condition", lambda seen: "gpu_condition{" not in seen.text)
    matrix.add(
        "all NVLinks of a GPU are gone",
        "fresh; row: 0 of 18 NVLinks are up",
        "`gpu_nvlinks_active` 0, `gpu_condition`; after a minute GpuUnusable, and `--once` exits with 4",
        "when a link is up, or after `gpu-exporter forget UUID`",
    )
