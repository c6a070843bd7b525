"""Starts and ends of containers."""

from __future__ import annotations

import math
import os
from pathlib import Path

from gpu_exporter.agent.attribution.kubelet.alive import LOOK_S, PodLives
from gpu_exporter.agent.attribution.kubelet.source import KubeletOptions, KubeletSource
from gpu_exporter.common.clock import ManualClock
from gpu_exporter.common.vendor import NVIDIA
from gpu_exporter.diagnosis.host.cgroups import Cgroups
from tests.component.kubelet.kubelet_bench import UUID, begin
from tests.testbed.podresources import Kubelet, begin_container


def test_a_container_that_has_not_started_cannot_work_yet(
    kubelet: Kubelet, source: KubeletSource, clock: ManualClock, tmp_path: Path
) -> None:
    kubelet.pods["ml", "a"] = {"main": {"nvidia.com/gpu": [UUID]}}
    (unknown,) = source.poll().grants
    assert (unknown.working_wall, unknown.why) == (
        math.inf,
        f"the start of its container is unknown: mount {tmp_path / 'pods'}",
    )
    pod = tmp_path / "pods" / "ml_a_uid-1"
    begin(pod / "fetch-data", 0, clock.wall())  # its init container
    (staging,) = source.poll().grants
    assert (staging.working_wall, staging.why) == (math.inf, "its container has not started")
    assert staging.obstacle == "not_started"
    begin(pod / "main", 0, clock.wall() - 5.0)
    (working,) = source.poll().grants
    assert (working.working_wall, working.why) == (clock.wall() - 5.0, "")


def test_a_restart_of_a_container_is_a_new_start_and_a_rotated_log_is_not(
    kubelet: Kubelet, source: KubeletSource, clock: ManualClock, tmp_path: Path
) -> None:
    kubelet.pods["ml", "a"] = {"main": {"nvidia.com/gpu": [UUID]}}
    directory = tmp_path / "pods" / "ml_a_uid-1" / "main"
    began = clock.wall()
    begin(directory, 0, began)
    assert source.poll().grants[0].working_wall == began
    clock.advance(1000.0)
    (directory / "0.log.20261121-120000").touch()
    os.utime(directory, (clock.wall(), clock.wall()))
    assert source.poll().grants[0].working_wall == began
    begin(directory, 1, clock.wall())
    assert source.poll().grants[0].working_wall == clock.wall()
    (directory / "0.log").unlink()  # the kubelet keeps the last two
    clock.advance(10.0)
    assert source.poll().grants[0].working_wall == clock.wall() - 10.0


def test_a_gpu_index_is_proven_again_after_every_start_of_a_container(
    kubelet: Kubelet, source: KubeletSource, clock: ManualClock, tmp_path: Path
) -> None:
    """The runtime looks up the index at every start, so the GPU of one start does not prove the GPU of the next."""
    kubelet.pods["ml", "a"] = {"main": {"nvidia.com/gpu": ["1"]}}
    directory = tmp_path / "pods" / "ml_a_uid-1" / "main"
    directory.mkdir(parents=True)
    assert source.poll().grants[0].number == ""  # the container has not started, so there is no index to remember
    begin(directory, 0, clock.wall())
    assert source.poll().grants[0].number == "device 1, start 0"
    begin(directory, 1, clock.wall())
    assert source.poll().grants[0].number == "device 1, start 1"


def test_a_pod_whose_cgroup_is_gone_has_ended(kubelet: Kubelet, clock: ManualClock, tmp_path: Path) -> None:
    """Kubelets before 1.34 still list the pod."""
    uids = [f"5a89bcaa-3509-4375-83e1-b9e7a571212{number}" for number in range(4)]
    own, done, lives, restarts = uids
    logs, cgroups = tmp_path / "pods", tmp_path / "cgroup"
    for name, uid in (("done", done), ("lives", lives), ("restarts", restarts)):
        kubelet.pods["ml", name] = {"main": {"nvidia.com/gpu": [f"GPU-{uid}"]}}
        begin_container(logs, f"ml_{name}_{uid}")
    kubelet.pods["kube-system", "other"] = {"main": {}}  # without a GPU, and still without a log folder
    pods = cgroups / "kubepods.slice" / "kubepods-burstable.slice"
    for uid in uids:  # the last pod waits for a restart: it has a cgroup, but no container
        (pods / f"kubepods-burstable-pod{uid.replace('-', '_')}.slice").mkdir(parents=True)
    (cgroups / "cgroup.controllers").touch()
    lives_of = PodLives(Cgroups(cgroups).list_pods, own)
    source = KubeletSource(
        clock, KubeletOptions(socket=kubelet.socket, logs=logs, timeout_s=10.0), lives=lives_of, vendor=NVIDIA
    )

    def ended() -> list[str]:
        return [grant.holder.pod for grant in source.poll().grants if grant.ended]

    assert ended() == []
    (pods / f"kubepods-burstable-pod{done.replace('-', '_')}.slice").rmdir()
    looks = []
    for _ in range(3):
        clock.advance(LOOK_S)
        looks.append(ended())
    assert looks == [[], ["done"], ["done"]]
    begin_container(logs, f"ml_new_{own}")  # a pod that has just begun has a cgroup before it has a log
    kubelet.pods["ml", "new"] = {"main": {"nvidia.com/gpu": ["GPU-a"]}}
    assert ended() == ["done"]
