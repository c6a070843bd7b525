"""Pods without any process that have ended and are still in the kubelet's list."""

from __future__ import annotations

import math
from collections.abc import Set
from pathlib import Path

import pytest

from gpu_exporter.agent.attribution.kubelet.ended import LOOK_S, WHY, EndedPods
from gpu_exporter.agent.attribution.processes import ProcessOwners, UnitOwners
from gpu_exporter.common.cgroup import ProcessOwner
from gpu_exporter.common.clock import ManualClock
from gpu_exporter.common.model.holders import Grant, Holder, HolderKey, Use
from gpu_exporter.common.model.units import UnitId

UIDS = tuple(f"2c9f8a79-5391-454b-88cb-86190881cb9{number}" for number in range(3))
DONE, NEXT, THIRD = UIDS


def grant(uid: str, device: str = "GPU-a", working: float | None = 1e9, why: str = "") -> Grant:
    holder = Holder(
        HolderKey("kubernetes", f"{uid}/main"), "ml", f"pod-{uid[-1:]}", "main", pod_uid=uid, source="kubelet"
    )
    return Grant("uuid", device, holder, working_wall=working, why=why)


class Looks:
    """Polls every ten seconds, while these pods have processes."""

    def __init__(self, running: Set[str] | None) -> None:
        self.running, self.looks, self.now = running, 0, 100.0
        self.ended = EndedPods(self._list)

    def _list(self) -> Set[str] | None:
        self.looks += 1
        return self.running

    def poll(self, *grants: Grant, seconds: float = 2 * LOOK_S, on_gpu: tuple[str, ...] = ()) -> list[Grant]:
        owners = {
            UnitId("GPU-a"): UnitOwners({ProcessOwner(pods=(uid,)): Use(1, 0) for uid in on_gpu}, is_complete=True)
        }
        found = self.ended.apply(grants, owners, self.now)
        for _ in range(int(seconds / 10)):
            self.now += 10.0
            found = self.ended.apply(grants, owners, self.now)
        return list(found)


def test_of_two_pods_on_one_gpu_the_ended_pod_holds_nothing() -> None:
    looks = Looks({NEXT})
    pods = (grant(DONE), grant(NEXT))
    assert looks.poll(*pods, seconds=0) == list(pods)  # seen without a process once
    assert looks.poll(*pods) == [grant(NEXT)]
    assert looks.looks == 4 - 1  # at 0, and every minute


def test_a_pod_without_a_process_that_has_its_gpu_alone_keeps_it_and_is_not_judged() -> None:
    held = grant(DONE)
    (found,) = Looks({NEXT}).poll(held)
    assert found == held._replace(running=False, why=WHY, obstacle="no_process")
    replicas = [each._replace(share="time_slice") for each in (grant(DONE), grant(NEXT))]
    assert [each.running for each in Looks({NEXT}).poll(*replicas)] == [False, True]
    common = [each._replace(claim="ml/both") for each in (grant(DONE), grant(NEXT))]
    assert [each.running for each in Looks({NEXT}).poll(*common)] == [False, True]
    others = [grant(DONE)._replace(claim="ml/old"), grant(NEXT)._replace(claim="ml/new")]
    assert [each.holder.pod_uid for each in Looks({NEXT}).poll(*others)] == [NEXT]


def test_a_pod_that_has_ended_by_its_cgroup_takes_no_gpu_from_a_pod_that_waits_for_a_restart() -> None:
    done, waits = grant(DONE)._replace(ended=True), grant(NEXT)
    assert Looks({THIRD}).poll(done, waits) == [done, waits._replace(running=False, why=WHY, obstacle="no_process")]


def test_both_pods_are_unknown_if_neither_has_a_process() -> None:
    assert [each.why for each in Looks({THIRD}).poll(grant(DONE), grant(NEXT))] == [WHY, WHY]


def test_no_pod_counts_as_ended_if_both_run_or_processes_are_hidden() -> None:
    pods = (grant(DONE), grant(NEXT))
    assert Looks({DONE, NEXT}).poll(*pods) == list(pods)
    assert Looks(None).poll(*pods) == list(pods)


@pytest.mark.parametrize(
    "holder",
    [
        grant(DONE, working=math.inf, why="its container has not started"),
        grant(DONE, working=None),
        grant("f" * 32),  # a static pod
        grant("gpu-server-1"),  # a static pod whose manifest sets its UID
        grant(""),
    ],
)
def test_a_pod_that_has_not_started_has_not_ended(holder: Grant) -> None:
    looks = Looks({NEXT})
    assert looks.poll(holder) == [holder]
    assert looks.looks == 0


def test_a_process_on_a_gpu_proves_that_the_pod_runs() -> None:
    looks = Looks({NEXT})
    assert looks.poll(grant(DONE), on_gpu=(DONE,)) == [grant(DONE)]
    assert looks.looks == 0
    assert looks.poll(grant(DONE))[0].why == WHY
    assert looks.poll(grant(DONE), seconds=0, on_gpu=(DONE,)) == [grant(DONE)]


def test_a_pod_that_returns_counts_at_the_next_look() -> None:
    looks = Looks({NEXT})
    assert looks.poll(grant(DONE))[0].why == WHY
    looks.running = {NEXT, DONE}
    assert looks.poll(grant(DONE), seconds=LOOK_S) == [grant(DONE)]
    looks.running = {NEXT}
    # one look without a process may be a container that starts
    assert looks.poll(grant(DONE), seconds=LOOK_S) == [grant(DONE)]
    assert looks.poll(grant(DONE), seconds=LOOK_S)[0].why == WHY


def test_the_running_pods_of_a_host_are_the_pods_of_its_processes(tmp_path: Path) -> None:
    owners = ProcessOwners(tmp_path, ManualClock())
    assert owners.list_pods() is None
    assert ProcessOwners(tmp_path / "nowhere", ManualClock()).list_pods() is None
    for pid, cgroup in (
        (1, "0::/init.scope"),
        (20, f"0::/kubepods/burstable/pod{DONE}/{'a' * 64}"),
        (21, f"0::/kubepods.slice/kubepods-pod{NEXT.replace('-', '_')}.slice/cri-containerd-{'b' * 64}.scope"),
        (22, f"0::/kubepods/burstable/pod{DONE}/{'c' * 64}"),
    ):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "cgroup").write_text(f"{cgroup}\n", encoding="utf-8")
    (tmp_path / "23").mkdir()  # a hidden or ended process
    (tmp_path / "self").mkdir()
    assert owners.list_pods() == {DONE, NEXT}
