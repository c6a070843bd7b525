"""Reports of the exporter about itself: missing data that is a fault, warnings, and the state file."""

from __future__ import annotations

import json

import pytest

from gpu_exporter.agent.exposition.health import judge_health
from gpu_exporter.agent.exposition.json_format import render_json
from gpu_exporter.agent.exposition.page import render_page
from gpu_exporter.agent.exposition.publisher import no_history
from gpu_exporter.agent.exposition.series import list_series
from gpu_exporter.agent.exposition.table import render_table
from gpu_exporter.common.model.holders import SourceStatus
from gpu_exporter.common.model.readings import DeviceSnapshot, XidCounts
from gpu_exporter.common.model.units import DeviceIdentity
from gpu_exporter.common.model.views import AgentStatus, GpuView, StateStatus, View

CPU_ONLY = AgentStatus("TEST", "nvml", False, "libnvidia-ml.so.1 cannot be loaded", 0, 0, 1.0, None)
GIVEN_AWAY = CPU_ONLY._replace(unmanaged=(("vfio-pci", 8),))
MISSED = CPU_ONLY._replace(devices_expected=8)
NOT_LOADED = CPU_ONLY._replace(unmanaged=(("none", 8),))
FAILS = CPU_ONLY._replace(driver_missed=True)
COUNTED = CPU_ONLY._replace(counted=(("slurm", 4),))
RELEASED = COUNTED._replace(driver_released=True)


def view(status: AgentStatus) -> View:
    return View(0.0, status, (), ())


@pytest.mark.parametrize(
    "status",
    [CPU_ONLY, GIVEN_AWAY, GIVEN_AWAY._replace(counted=COUNTED.counted), RELEASED],
    ids=["no GPU", "all GPUs given to virtual machines", "given away and counted", "released"],
)
def test_a_missing_driver_is_not_a_fault_if_no_gpu_is_expected(status: AgentStatus) -> None:
    assert judge_health(view(status)) == "none_expected"
    page = render_page(view(status), no_history)
    assert '<p class="banner note">The exporter expects no GPU here: libnvidia-ml.so.1 cannot be loaded</p>' in page
    assert "No GPU data" not in page
    assert "the exporter expects no GPU here: libnvidia-ml.so.1" in render_table(view(status))
    assert json.loads(render_json(view(status)))["health"] == "none_expected"


@pytest.mark.parametrize(
    "status",
    [MISSED, NOT_LOADED, FAILS, COUNTED],
    ids=["GPUs seen before", "GPUs without a kernel driver", "fails as on a node with GPUs", "a scheduler counts GPUs"],
)
def test_a_missing_driver_is_a_fault_if_gpus_are_expected(status: AgentStatus) -> None:
    assert judge_health(view(status)) == "no_data"
    assert "<p class=banner>No GPU data: libnvidia-ml.so.1 cannot be loaded</p>" in render_page(
        view(status), no_history
    )
    assert "no GPU data: libnvidia-ml.so.1" in render_table(view(status))


@pytest.mark.parametrize(
    ("source", "health"),
    [
        (SourceStatus("slurm", True, True, 1.0), "ok"),
        (SourceStatus("slurm", True, True, 1.0, notice="users are hidden"), "ok"),
        (SourceStatus("slurm", True, False, 1.0, error="one job could not be read"), "partial"),
        (SourceStatus("slurm", False, False, 1.0), "partial"),
    ],
    ids=["answers", "has a notice", "misses holders", "does not answer"],
)
def test_a_source_that_may_miss_holders_makes_the_view_partial(source: SourceStatus, health: str) -> None:
    status = AgentStatus("TEST", "nvml", True, "", 1, 1, 1.0, None, (source,))
    identity = DeviceIdentity(0, "GPU-0", "NVIDIA H100", "580", "00000000:10:00.0", 0)
    gpu = GpuView(DeviceSnapshot(identity, 0.0, 0.0, up=True), 0.0, False, False, None)
    assert judge_health(View(0.0, status, (gpu,), ())) == health


def test_warnings_are_on_the_page_and_in_json() -> None:
    status = CPU_ONLY._replace(warnings=("/state: cannot be written <x>",))
    assert '<p class="banner warn">/state: cannot be written &lt;x&gt;</p>' in render_page(view(status), no_history)
    assert json.loads(render_json(view(status)))["warnings"] == ["/state: cannot be written <x>"]


def values(status: AgentStatus) -> dict[str, float]:
    """The series of the state file."""
    found = {s.family.name: s.rows[0][1] for s in list_series(view(status))}
    return {name: value for name, value in found.items() if name.startswith("gpu_exporter_state_")}


def test_the_state_file_has_series_only_if_it_is_kept_and_was_written() -> None:
    written, errors = "gpu_exporter_state_last_write_timestamp_seconds", "gpu_exporter_state_write_errors_total"
    assert values(CPU_ONLY) == {}
    assert values(CPU_ONLY._replace(state=StateStatus(None, 2, "No space left on device"))) == {errors: 2.0}
    assert values(CPU_ONLY._replace(state=StateStatus(5.0, 0))) == {written: 5.0, errors: 0.0}


def test_every_class_of_xid_is_exported_as_0_before_the_first_event() -> None:
    """Otherwise increase() misses the first event. XIDs of class information never count as hardware faults."""
    identity = DeviceIdentity(0, "GPU-0", "NVIDIA H100", "580", "00000000:10:00.0", 0)
    for counts, expected in (
        (XidCounts(), {"application": 0.0, "hardware": 0.0, "information": 0.0}),
        (XidCounts(((63, "information", 2, 5.0),)), {"application": 0.0, "hardware": 0.0, "information": 2.0}),
    ):
        gpu = GpuView(DeviceSnapshot(identity, 0.0, 0.0, up=False), 0.0, True, False, None, xids=counts)
        (events,) = [s for s in list_series(View(0.0, MISSED, (gpu,), ())) if s.family.name == "gpu_xid_events_total"]
        assert {labels[-1]: value for labels, value in events.rows} == expected
