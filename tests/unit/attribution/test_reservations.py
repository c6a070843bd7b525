"""GPUs that a scheduler reserves for fractions: in any mixture of grants, their reservation pods hold nothing."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_exporter.agent.attribution.holders import Devices, HolderTracker, HolderUpdate, Poll
from gpu_exporter.agent.attribution.kubelet.consumers import check_namespace
from gpu_exporter.agent.attribution.processes import ProcessOwners, UnitOwners
from gpu_exporter.agent.attribution.slurm.pods import SlurmPods
from gpu_exporter.common.cgroup import ProcessOwner
from gpu_exporter.common.clock import SystemClock
from gpu_exporter.common.model.holders import Grant, Holder, HolderKey, Use
from gpu_exporter.common.model.readings import DeviceSnapshot
from gpu_exporter.common.model.units import DeviceIdentity, UnitId

GPUS = [f"GPU-{number}" for number in range(3)]
PODS = [f"2c9f8a79-5391-454b-88cb-8619088{number:05d}" for number in range(6)]


class Entry(NamedTuple):
    """A device that a source reports for a pod."""

    pod: int
    gpu: int
    reserves: bool
    source: str

    def grant(self) -> Grant:
        uid = PODS[self.pod]
        key = HolderKey("kubernetes", f"{uid}/main")
        holder = Holder(key, "ml", f"pod-{self.pod}", "main", pod_uid=uid, source=self.source)
        return Grant("uuid", GPUS[self.gpu], holder, reserves=self.reserves)


def update(entries: list[Entry], processes: dict[int, list[int]], ended: list[Entry] | None = None) -> HolderUpdate:
    """The holders after a poll. `processes`: the pods with a process on each GPU."""
    answered = {
        uuid: DeviceSnapshot(DeviceIdentity(at, uuid, "H100", "580", f"0000:0{at}", at), 10.0, 10.0, True)
        for at, uuid in enumerate(GPUS)
    }
    owners = {
        UnitId(GPUS[gpu]): UnitOwners(
            {ProcessOwner(pods=(PODS[pod],), container=f"{pod}" * 64): Use(1, 0) for pod in pods}, is_complete=True
        )
        for gpu, pods in processes.items()
    }
    tracker = HolderTracker(ProcessOwners(Path("/nowhere"), SystemClock()), SlurmPods("", asks_slurm=False))
    poll = Poll([entry.grant() for entry in entries], ended=[entry.grant() for entry in ended or ()])
    return tracker.update(poll, Devices(answered, "", True), owners, 100.0)


# Pods 0 and 1 are reservations, 2 and 3 are reported holders, and 4 and 5 are known only by their processes.
ENTRIES = st.lists(
    st.builds(Entry, st.integers(0, 3), st.integers(0, 2), st.booleans(), st.just("kubelet")).map(
        lambda entry: entry._replace(reserves=entry.pod < 2)
    ),
    max_size=6,
)
STATIC = st.lists(st.builds(Entry, st.just(3), st.integers(0, 2), st.just(False), st.just("static")), max_size=2)
PROCESSES = st.dictionaries(st.integers(0, 2), st.lists(st.integers(0, 5), max_size=4))


@given(ENTRIES, STATIC, PROCESSES)
def test_a_reservation_never_holds_and_its_gpu_is_never_free_or_judged_as_a_whole(
    entries: list[Entry], static: list[Entry], processes: dict[int, list[int]]
) -> None:
    found = update([*static, *entries], processes, ended=entries)
    held = found.resolution.allocations
    reserving = {PODS[entry.pod] for entry in entries if entry.reserves}
    assert reserving.isdisjoint(allocation.holder.pod_uid for allocation, _ in [*held, *found.past])
    for gpu in {entry.gpu for entry in entries if entry.reserves}:
        here = [allocation for allocation, _ in held if allocation.unit.uuid == GPUS[gpu]]
        assert found.in_use[UnitId(GPUS[gpu])].startswith("reserved by ml for fractions, and no process shows")
        assert all(allocation.is_shared for allocation in here)
        reported = any(entry.gpu == gpu and not entry.reserves for entry in [*static, *entries])
        reports = {PODS[entry.pod] for entry in [*static, *entries]}
        seen = {PODS[pod] for pod in processes.get(gpu, ())} - reports
        if not reported:
            assert {allocation.holder.pod_uid for allocation in here} == seen
            assert {(each.running, each.obstacle, each.holder.source) for each in here} <= {
                (False, "fraction", "process")
            }


def test_a_pod_on_a_gpu_without_a_reservation_is_still_undeclared() -> None:
    found = update([Entry(0, 0, True, "kubelet")], {0: [4], 1: [5]})
    assert {a.unit.uuid: (a.obstacle, a.share, a.why[:12]) for a, _ in found.resolution.allocations} == {
        GPUS[0]: ("fraction", "time_slice", "its schedule"),
        GPUS[1]: ("undeclared", "none", "a process of"),
    }


def test_only_the_pods_whose_device_is_unproven_have_fractions() -> None:
    """HAMi's pods. A pod that holds another GPU for certain is no user of this one."""
    unproven = Entry(2, 0, False, "kubelet").grant()._replace(kind="unproven", reason="its scheduler chose it")
    tracker = HolderTracker(ProcessOwners(Path("/nowhere"), SystemClock()), SlurmPods("", asks_slurm=False))
    snapshot = DeviceSnapshot(DeviceIdentity(0, GPUS[0], "H100", "580", "0000:00", 0), 10.0, 10.0, True)
    uses = {ProcessOwner(pods=(PODS[pod],), container=f"{pod}" * 64): Use(1, 0) for pod in (2, 4)}
    owners = {UnitId(GPUS[0]): UnitOwners(uses, is_complete=True)}
    found = tracker.update(Poll([unproven]), Devices({GPUS[0]: snapshot}, "", True), owners, 100.0)
    assert {a.holder.pod_uid: a.obstacle for a, _ in found.resolution.allocations} == {
        PODS[2]: "fraction",
        PODS[4]: "undeclared",
    }
    free = tracker.update(Poll([unproven]), Devices({GPUS[0]: snapshot}, "", True), {}, 101.0)
    assert free.in_use[UnitId(GPUS[0])] == (
        "ml/pod-2/main may have this GPU: its scheduler chose it; write the holders into a file for --attribution.static"
    )


@pytest.mark.parametrize("name", ["", "KAI", "kai-.*", "ml/pod", "a" * 64, "-a", "kai\n"])
def test_a_namespace_is_named_in_full(name: str) -> None:
    with pytest.raises(ValueError, match=r"--attribution\.reservation: .* expected the full name of a namespace"):
        check_namespace(name)
