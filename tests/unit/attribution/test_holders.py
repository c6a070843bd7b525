"""From one poll of the sources to the holders of every unit: what the steps must be told."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_exporter.agent.attribution.holders import Devices, HolderTracker, HolderUpdate, Poll
from gpu_exporter.agent.attribution.processes import Owners, ProcessOwners, UnitOwners
from gpu_exporter.agent.attribution.slurm.pods import SlurmPods
from gpu_exporter.common.cgroup import ProcessOwner
from gpu_exporter.common.clock import SystemClock
from gpu_exporter.common.model.holders import Grant, Holder, HolderKey, Use
from gpu_exporter.common.model.readings import DeviceSnapshot
from gpu_exporter.common.model.units import DeviceIdentity, UnitId

JOB = Holder(HolderKey("slurm", "lab/7/0/1"), job_id="7", source="slurm")
POD, CONTAINER = (
    ProcessOwner(pods=("2c9f8a79-5391-454b-88cb-86190881cb96",), container="c" * 64),
    ProcessOwner(container="d" * 64),
)


def snapshot(uuid: str, monotonic: float) -> DeviceSnapshot:
    """A GPU that is the first of the driver's list."""
    return DeviceSnapshot(DeviceIdentity(0, uuid, "H100", "580", "0000:00", 0), monotonic, monotonic, True)


def update(
    folder: Path, poll: Poll, *answered: DeviceSnapshot, owners: Owners | None = None, lists_processes: bool = True
) -> HolderUpdate:
    tracker = HolderTracker(ProcessOwners(folder, SystemClock()), SlurmPods("", asks_slurm=False))
    devices = Devices({each.identity.uuid: each for each in answered}, "", lists_processes)
    return tracker.update(poll, devices, owners or {}, 100.0)


@pytest.mark.parametrize("old_first", [True, False])
def test_a_position_means_the_gpu_that_answered_last_at_this_position(tmp_path: Path, old_first: bool) -> None:
    old, new = snapshot("GPU-old", 10.0), snapshot("GPU-new", 20.0)
    found = update(tmp_path, Poll([Grant("index", "0", JOB)]), *((old, new) if old_first else (new, old)))
    assert [allocation.unit.uuid for allocation, _ in found.resolution.allocations] == ["GPU-new"]


@pytest.mark.parametrize("lists_processes", [True, False])
def test_an_empty_list_shows_that_a_holder_uses_nothing_only_if_the_driver_lists_processes(
    tmp_path: Path, lists_processes: bool
) -> None:
    unit = UnitId("GPU-a")
    empty = {unit: UnitOwners({}, is_complete=True)}
    poll = Poll([Grant("uuid", "GPU-a", JOB)])
    found = update(tmp_path, poll, snapshot("GPU-a", 10.0), owners=empty, lists_processes=lists_processes)
    assert found.uses == ({(unit, JOB.key): Use(0, 0)} if lists_processes else {})


@pytest.mark.parametrize(("is_complete", "schedulers"), [(True, ["kubernetes", "container"]), (False, ["container"])])
def test_a_pod_is_undeclared_only_after_every_source_has_answered(
    tmp_path: Path, is_complete: bool, schedulers: list[str]
) -> None:
    seen = {UnitId("GPU-a"): UnitOwners({POD: Use(1, 0), CONTAINER: Use(1, 0)}, is_complete=True)}
    found = update(tmp_path, Poll([], is_complete=is_complete), snapshot("GPU-a", 10.0), owners=seen)
    assert [allocation.holder.key.scheduler for allocation, _ in found.resolution.allocations] == schedulers
