"""The name and the UID of a pod that holds a GPU."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from gpu_exporter.agent.attribution.kubelet.source import KubeletSource
from gpu_exporter.agent.attribution.source import SourceError
from gpu_exporter.common.clock import ManualClock
from tests.component.kubelet.kubelet_bench import UUID, begin
from tests.testbed.podresources import Kubelet


def test_grants_name_pod_container_uid_and_device(kubelet: Kubelet, source: KubeletSource, tmp_path: Path) -> None:
    (tmp_path / "pods" / "ml_train-0_6f1b7c1e-0000").mkdir()
    kubelet.pods["ml", "train-0"] = {"main": {"nvidia.com/gpu": [UUID], "rdma/hca": ["mlx5_0"]}}
    (grant,) = source.poll().grants
    holder = grant.holder
    assert (grant.kind, grant.device) == ("uuid", UUID)
    assert (holder.namespace, holder.pod, holder.container, holder.pod_uid) == (
        "ml",
        "train-0",
        "main",
        "6f1b7c1e-0000",
    )
    assert holder.key.incarnation == "6f1b7c1e-0000/main"
    assert holder.identity == ""
    assert holder.resource == "nvidia.com/gpu"


def test_without_log_directories_the_name_is_the_identity_and_a_notice_reports_it(
    kubelet: Kubelet, source: KubeletSource
) -> None:
    kubelet.pods["ml", "train-0"] = {"main": {"nvidia.com/gpu": [UUID]}}
    (grant,) = source.poll().grants
    assert grant.holder.identity == "name"
    assert grant.holder.key.incarnation == "ml/train-0/main"


def test_the_uid_of_a_pod_that_was_replaced_never_comes_back(
    kubelet: Kubelet, source: KubeletSource, tmp_path: Path
) -> None:
    """A newer timestamp on the old directory must not bring the old pod back."""
    old, new = (tmp_path / "pods" / f"ml_train-0_{uid}" for uid in ("old", "new"))
    old.mkdir()
    kubelet.pods["ml", "train-0"] = {"main": {"nvidia.com/gpu": [UUID]}}
    assert source.poll().grants[0].holder.pod_uid == "old"
    new.mkdir()
    os.utime(new, (2_000_000_000, 2_000_000_000))
    assert source.poll().grants[0].holder.pod_uid == "new"
    os.utime(old, (2_100_000_000, 2_100_000_000))
    assert source.poll().grants[0].holder.pod_uid == "new"


def test_pods_keep_their_uid_over_a_restart_of_the_kubelet(
    kubelet: Kubelet, source: KubeletSource, tmp_path: Path
) -> None:
    (tmp_path / "pods" / "ml_train-0_uid-1").mkdir()
    pods = {("ml", "train-0"): {"main": {"nvidia.com/gpu": [UUID]}}}
    kubelet.pods = dict(pods)
    source.poll()
    kubelet.pods = {}
    with pytest.raises(SourceError):
        source.poll()
    kubelet.pods = dict(pods)
    assert source.poll().grants[0].holder.pod_uid == "uid-1"


def test_a_pod_with_the_same_name_is_a_new_pod_while_its_directory_is_missing(
    kubelet: Kubelet, source: KubeletSource, clock: ManualClock, tmp_path: Path
) -> None:
    """A StatefulSet's pod that waits for its volumes. The kubelet removes the old directory later."""
    pods = {("ml", "web-0"): {"main": {"nvidia.com/gpu": [UUID]}}}
    begin(tmp_path / "pods" / "ml_web-0_old" / "main", 0, clock.wall())
    kubelet.pods, kubelet.allocatable = dict(pods), [UUID]
    assert source.poll().grants[0].holder.pod_uid == "old"
    kubelet.pods = {}
    assert source.poll().grants == []
    kubelet.pods = dict(pods)
    (grant,) = source.poll().grants
    assert (grant.holder.pod_uid, grant.holder.identity, grant.working_wall) == ("", "name", math.inf)
    begin(tmp_path / "pods" / "ml_web-0_new" / "main", 0, clock.wall())
    assert source.poll().grants[0].holder.pod_uid == "new"
