"""Holders that only their processes show: containers of no scheduler, and pods without a request."""

from __future__ import annotations

import logging

import pytest

from gpu_exporter.agent.attribution.processes import UnitOwners
from gpu_exporter.agent.attribution.resolve import Resolution
from gpu_exporter.agent.attribution.users import Users
from gpu_exporter.common.cgroup import ProcessOwner
from gpu_exporter.common.model.holders import Allocation, Grant, Holder, HolderKey, Use
from gpu_exporter.common.model.units import UnitId

GPU, OTHER_GPU = UnitId("GPU-a"), UnitId("GPU-b")
UID = "2c9f8a79-5391-454b-88cb-86190881cb96"
ID = "0123456789abcdef" * 4
POD, DOCKER = ProcessOwner(pods=(UID,), container=ID), ProcessOwner(container=ID)
HELD = Holder(HolderKey("kubernetes", f"{UID}/main"), "ml", "train-0", "main", pod_uid=UID, source="kubelet")
NOTHING = Resolution([], [], [])


def holding(unit: UnitId, holder: Holder) -> Resolution:
    return Resolution([(Allocation(unit, holder), Grant("uuid", unit.uuid, holder))], [], [])


def names(uid: str) -> tuple[str, str] | None:
    return ("ops", "prober-0") if uid == UID else None


def find(
    *owners: ProcessOwner, resolution: Resolution = NOTHING, pods: bool = True, users: Users | None = None
) -> list[Allocation]:
    seen = {GPU: UnitOwners(dict.fromkeys(owners, Use(1, 0)), is_complete=True)}
    found = (users or Users(names)).find(resolution, seen, 100.0, pods=pods)
    for allocation, grant in found:
        assert (grant.holder, grant.confirmed, grant.running) == (allocation.holder, 100.0, False)
    return [allocation for allocation, _ in found]


def test_a_container_of_no_scheduler_is_a_holder_with_its_id() -> None:
    (found,) = find(DOCKER)
    assert (found.unit, found.share, found.share_ratio, found.running) == (GPU, "none", 1.0, False)
    assert found.holder.key == HolderKey("container", ID)
    assert (found.holder.label, found.holder.source) == ("container 0123456789ab", "process")
    assert "no scheduler manages the container" in found.why


def test_a_pod_without_a_request_has_the_name_that_the_kubelet_uses(caplog: pytest.LogCaptureFixture) -> None:
    users = Users(names)
    for _ in range(3):
        (found,) = find(POD, users=users)
    assert (found.holder.label, found.holder.pod_uid) == ("ops/prober-0/0123456789ab", UID)
    assert (found.running, found.holder.source) == (False, "process")
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "pod ops/prober-0 uses a GPU that no source allocated to it" in caplog.text
    stranger = POD._replace(pods=("f" * 32,))
    assert find(stranger)[0].holder.label == f"{'f' * 32}/0123456789ab"
    assert find(users=users) == []
    find(POD, users=users)
    assert caplog.text.count("ops/prober-0") == 2  # the pod was gone in between


def test_several_users_share_the_gpu() -> None:
    found = find(DOCKER, POD)
    assert [(each.share, each.share_ratio) for each in found] == [("time_slice", 0.5)] * 2


def test_a_pod_is_shown_as_a_user_only_when_every_source_has_answered() -> None:
    assert find(POD, pods=False) == []
    assert len(find(DOCKER, pods=False)) == 1


@pytest.mark.parametrize(
    "owner", [ProcessOwner(), ProcessOwner(slurm=True, job="7"), ProcessOwner(slurm=True, container=ID)]
)
def test_the_system_and_jobs_are_not_users(owner: ProcessOwner) -> None:
    assert find(owner) == []


def test_a_pod_that_a_source_knows_is_never_a_user() -> None:
    assert find(POD, resolution=holding(OTHER_GPU, HELD)) == []
    assert find(POD, resolution=Resolution([], [(Grant("uuid", "GPU-z", HELD), "not here")], [])) == []
    assert find(POD, resolution=Resolution([], [], [Grant("uuid", "GPU-z", HELD)])) == []


def test_a_gpu_with_a_holder_has_no_users() -> None:
    other = HELD._replace(key=HolderKey("kubernetes", "x/main"), pod_uid="x")
    assert find(DOCKER, POD, resolution=holding(GPU, other)) == []
