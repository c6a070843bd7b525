"""Empty and partial answers, and restarts of the kubelet."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

import pytest

from gpu_exporter.agent.attribution.kubelet.alive import PodLives
from gpu_exporter.agent.attribution.kubelet.source import KubeletOptions, KubeletSource
from gpu_exporter.agent.attribution.source import SourceError
from gpu_exporter.common.clock import ManualClock
from gpu_exporter.common.vendor import NVIDIA
from tests.component.kubelet.kubelet_bench import UUID
from tests.testbed.podresources import Kubelet


def test_an_empty_answer_after_a_full_one_needs_a_second_empty_answer(
    kubelet: Kubelet, source: KubeletSource, clock: ManualClock
) -> None:
    kubelet.pods["ml", "a"] = {"main": {"nvidia.com/gpu": [UUID]}}
    assert len(source.poll().grants) == 1
    kubelet.pods.clear()
    with pytest.raises(SourceError, match="the kubelet may have just restarted"):
        source.poll()
    clock.advance(4.9)
    with pytest.raises(SourceError):
        source.poll()
    clock.advance(0.2)
    assert source.poll().grants == []


def test_an_empty_answer_is_accepted_at_once_while_devices_are_allocatable(
    kubelet: Kubelet, source: KubeletSource
) -> None:
    kubelet.pods["ml", "a"] = {"main": {"nvidia.com/gpu": [UUID]}}
    source.poll()
    kubelet.pods.clear()
    kubelet.allocatable = [UUID]
    assert source.poll().grants == []


def test_an_empty_answer_of_a_restarted_kubelet_is_not_accepted_at_once(
    kubelet: Kubelet, source: KubeletSource, clock: ManualClock
) -> None:
    """A real kubelet did this: the device plugin had registered before the kubelet listed the first pod."""
    kubelet.pods["ml", "a"] = {"main": {"nvidia.com/gpu": [UUID]}}
    source.poll()
    kubelet.stop()
    kubelet.pods.clear()
    kubelet.allocatable = [UUID]
    kubelet.start()
    with pytest.raises(SourceError, match="no longer lists 1 pods"):
        source.poll()
    clock.advance(5.0)
    assert source.poll().grants == []


def test_pods_remain_if_a_kubelet_without_an_api_server_does_not_list_them(
    kubelet: Kubelet, clock: ManualClock, tmp_path: Path
) -> None:
    """A kubelet that starts while the API server is unavailable lists only static pods until the API server answers."""
    uid = "6f1b7c1e-0000-4000-8000-000000000000"
    (tmp_path / "pods" / f"ml_a_{uid}").mkdir(parents=True)
    there = {uid}
    source = KubeletSource(
        clock,
        KubeletOptions(socket=kubelet.socket, logs=tmp_path / "pods", timeout_s=10.0),
        lives=PodLives(lambda uids: dict.fromkeys(uids & there, PurePosixPath("kubepods")), "own"),
        vendor=NVIDIA,
    )
    kubelet.pods["ml", "a"] = {"main": {"nvidia.com/gpu": [UUID]}}
    (tmp_path / "pods" / f"kube-system_etcd_{'f' * 32}").mkdir()
    kubelet.pods["kube-system", "etcd"] = {"main": {}}
    source.poll()
    kubelet.stop()
    del kubelet.pods["ml", "a"]
    kubelet.start()
    for seconds in (0.0, 5.0, 600.0):
        clock.advance(seconds)
        with pytest.raises(SourceError, match="no longer lists 1 pods"):
            source.poll()
    kubelet.pods["ml", "a"] = {"main": {"nvidia.com/gpu": [UUID]}}
    (grant,) = source.poll().grants
    assert grant.holder.pod_uid == uid, "it is the same one"
    own = "6f1b7c1e-0000-4000-8000-00000000000f"
    (tmp_path / "pods" / f"monitoring_agent_{own}").mkdir()
    kubelet.pods["monitoring", "agent"] = {"main": {}}
    source.poll()
    del kubelet.pods["ml", "a"]
    kubelet.stop()
    kubelet.start()
    with pytest.raises(SourceError, match="no longer lists"):
        source.poll()
    clock.advance(5.0)
    assert source.poll().grants == [], "it reaches the API server, and a process of the pod hangs"
    del kubelet.pods["monitoring", "agent"]
    kubelet.pods["ml", "a"] = {"main": {"nvidia.com/gpu": [UUID]}}
    source.poll()
    kubelet.stop()
    del kubelet.pods["ml", "a"]
    kubelet.start()
    with pytest.raises(SourceError, match="no longer lists"):
        source.poll()
    there.clear()
    clock.advance(5.0)
    assert source.poll().grants == [], "its cgroup is gone too"


def test_two_empty_answers_are_needed_after_every_restart_of_the_kubelet(
    kubelet: Kubelet, source: KubeletSource, clock: ManualClock
) -> None:
    kubelet.pods["ml", "a"] = {"main": {"nvidia.com/gpu": [UUID]}}
    source.poll()
    held = dict(kubelet.pods)
    kubelet.pods.clear()
    for _ in range(2):
        kubelet.stop()
        clock.advance(5.0)
        with pytest.raises(SourceError, match="does not answer"):
            source.poll()
        kubelet.start()
        clock.advance(5.0)
        with pytest.raises(SourceError, match="no longer lists"):
            source.poll()
    kubelet.stop()
    kubelet.start()
    clock.advance(5.0)
    with pytest.raises(SourceError, match="no longer lists"):
        source.poll()
    kubelet.pods = held
    assert len(source.poll().grants) == 1


def test_a_partial_answer_of_a_restarted_kubelet_is_not_accepted_at_once(
    kubelet: Kubelet, source: KubeletSource, clock: ManualClock
) -> None:
    """The kubelet lists static pods before the pods of the API server."""
    kubelet.pods = {("ml", name): {"main": {"nvidia.com/gpu": [f"{UUID}::{name}"]}} for name in ("1", "2")}
    source.poll()
    kubelet.stop()
    gone = kubelet.pods.pop(("ml", "2"))
    kubelet.start()
    with pytest.raises(SourceError, match="no longer lists 1 pods"):
        source.poll()
    kubelet.pods["ml", "2"] = gone
    assert len(source.poll().grants) == 2
    del kubelet.pods["ml", "2"]
    assert len(source.poll().grants) == 1  # the client has detected the new kubelet by now


def test_an_answer_without_gpus_needs_a_second_answer_even_if_it_lists_pods(
    kubelet: Kubelet, source: KubeletSource, clock: ManualClock
) -> None:
    kubelet.pods["ml", "a"] = {"main": {"nvidia.com/gpu": [UUID]}}
    source.poll()
    kubelet.pods = {("kube-system", "proxy"): {"main": {}}}
    with pytest.raises(SourceError, match="the kubelet may have just restarted"):
        source.poll()
    clock.advance(5.0)
    assert source.poll().grants == []
