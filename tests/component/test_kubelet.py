"""The exporter's PodResources client against the real gRPC implementation on a unix socket."""

from __future__ import annotations

import json
import math
import os
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from gpu_exporter.attribution.kubelet.alive import LOOK_S, PodLives
from gpu_exporter.attribution.kubelet.grpc_unix import CallError, call
from gpu_exporter.attribution.kubelet.podresources import LIST
from gpu_exporter.attribution.kubelet.source import KubeletOptions, KubeletSource
from gpu_exporter.attribution.source import Answer, SourceError
from gpu_exporter.clock import ManualClock
from gpu_exporter.devices.scenario import parse_scenario
from gpu_exporter.host.cgroups import Cgroups
from tests.testbed.nvml.feeder import NvmlTable, ScenarioFeeder
from tests.testbed.podresources import Kubelet, begin_container
from tests.testbed.processes import run_exporter

UUID = "GPU-11111111-2222-3333-4444-555555555555"
MIG = "MIG-aaaaaaaa-bbbb-cccc-dddd-eeeeeeeeeeee"


@pytest.fixture
def kubelet(tmp_path: Path) -> Iterator[Kubelet]:
    server = Kubelet(tmp_path / "kubelet.sock")
    server.start()
    yield server
    server.stop()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def source(kubelet: Kubelet, clock: ManualClock, tmp_path: Path) -> KubeletSource:
    (tmp_path / "pods").mkdir()
    return KubeletSource(
        clock, KubeletOptions(socket=kubelet.socket, logs=tmp_path / "pods", timeout_s=10.0, empty_confirm_s=5.0)
    )


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


def test_the_newest_directory_gives_the_uid_if_a_name_has_two(
    kubelet: Kubelet, source: KubeletSource, tmp_path: Path
) -> None:
    for uid, made in (("new", 2_000_000_000), ("old", 1_000_000_000)):
        directory = tmp_path / "pods" / f"ml_train-0_{uid}"
        directory.mkdir()
        os.utime(directory, (made, made))
    kubelet.pods["ml", "train-0"] = {"main": {"nvidia.com/gpu": [UUID]}}
    (grant,) = source.poll().grants
    assert grant.holder.pod_uid == "new"


@pytest.mark.parametrize(
    ("resource", "device", "kind", "expected"),
    [
        ("nvidia.com/gpu", UUID, "uuid", UUID),
        ("nvidia.com/gpu.shared", f"{UUID}::3", "uuid", UUID),
        ("nvidia.com/mig-1g.10gb", MIG, "uuid", MIG),
        ("nvidia.com/gpu", f"MIG-{UUID}/7/0", "uuid", f"MIG-{UUID}/7/0"),
        ("nvidia.com/gpu", "nvidia3", "minor", "3"),
        ("nvidia.com/gpu", "nvidia3/vgpu2", "minor", "3"),
        ("nvidia.com/gpu", "2", "index", "2"),
        ("example.com/half-a-gpu", UUID, "uuid", UUID),
    ],
)
def test_device_ids_are_parsed_in_every_form(
    kubelet: Kubelet, source: KubeletSource, resource: str, device: str, kind: str, expected: str
) -> None:
    kubelet.pods["ml", "a"] = {"main": {resource: [device]}}
    (grant,) = source.poll().grants
    assert (grant.kind, grant.device) == (kind, expected)


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
        lives=PodLives(lambda uids: uids & there, "own"),
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


def test_an_unknown_device_id_is_reported_as_a_problem(kubelet: Kubelet, source: KubeletSource) -> None:
    kubelet.pods["ml", "a"] = {"main": {"nvidia.com/gpu": ["nvidia0/gi1/ci2", UUID]}}
    answer = source.poll()
    assert [grant.device for grant in answer.grants] == [UUID]
    assert answer.grants[0].holder.units == 2
    text = "device id 'nvidia0/gi1/ci2' of ml/a/main is not understood, so no GPU is reported as free"
    assert answer.problem == text


@pytest.mark.parametrize(
    ("resource", "devices"),
    [
        ("nvidia.com/hostdev", ["5", "6"]),  # network cards of NVIDIA's operator
        ("nvidia.com/rdma_shared_device_a", ["0"]),
        ("nvidia.com/GA102GL_A10", ["3"]),  # of KubeVirt: the number of an IOMMU group
        ("rdma/hca", ["mlx5_0"]),
        ("example.com/gpu", ["1"]),
    ],
)
def test_devices_of_other_resources_are_ignored(
    kubelet: Kubelet, source: KubeletSource, resource: str, devices: list[str]
) -> None:
    kubelet.pods["ml", "a"] = {"main": {"nvidia.com/gpu": [UUID], resource: devices}}
    kubelet.pods["net", "b"] = {"main": {resource: devices}}
    answer = source.poll()
    assert [(grant.holder.label, grant.device, grant.holder.units) for grant in answer.grants] == [
        ("ml/a/main", UUID, 1)
    ]
    assert answer.problem == ""


def test_resources_that_the_site_names_are_gpus(kubelet: Kubelet, tmp_path: Path, clock: ManualClock) -> None:
    kubelet.pods["ml", "a"] = {"main": {"example.com/gpu-large": ["1"]}}
    named = KubeletSource(
        clock, KubeletOptions(socket=kubelet.socket, logs=tmp_path, resources=[r"example\.com/gpu-.*"])
    )
    assert [(grant.kind, grant.device, grant.number) for grant in named.poll().grants] == [("index", "1", "")]
    with pytest.raises(ValueError, match=r"--attribution\.resource: not a regular expression"):
        KubeletSource(clock, KubeletOptions(socket=kubelet.socket, logs=tmp_path, resources=["("]))


HAMI = "its scheduler writes the chosen device on the pod, and the kubelet may report another one"


@pytest.mark.parametrize(
    ("device_id", "kind", "device", "reason"),
    [
        (UUID, "uuid", UUID, ""),
        (f"{UUID}::3", "uuid", UUID, ""),
        ("MIG-3d7a1c2b-5e6f-5a0b-9c8d-112233445566::1", "uuid", "MIG-3d7a1c2b-5e6f-5a0b-9c8d-112233445566", ""),
        (f"MIG-{UUID}/3/0", "uuid", f"MIG-{UUID}/3/0", ""),
        ("nvidia0", "minor", "0", ""),
        ("nvidia0/vgpu2", "minor", "0", ""),
        ("nvidia0/gi3", "instance", "0/3", ""),
        ("nvidia1/gi3/vgpu0", "instance", "1/3", ""),
        ("3", "index", "3", ""),
        ("nvidia.com/gpu=2", "index", "2", ""),
        (f"nvidia.com/gpu={UUID}", "uuid", UUID, ""),
        (f"{UUID}-4", "unproven", UUID, HAMI),
        (f"{UUID}-_-7", "unproven", UUID, HAMI),  # of gpushare-device-plugin
        (f"MIG-{UUID}/3/0-1", "unproven", f"MIG-{UUID}", HAMI),
        (f"{UUID}-4::2", "unproven", UUID, HAMI),
    ],
)
def test_device_ids_of_named_resources_are_parsed_in_every_form(
    kubelet: Kubelet, source: KubeletSource, device_id: str, kind: str, device: str, reason: str
) -> None:
    kubelet.pods["ml", "a"] = {"main": {"nvidia.com/gpu": [device_id]}}
    answer = source.poll()
    assert [(grant.kind, grant.device, grant.reason) for grant in answer.grants] == [(kind, device, reason)]
    assert answer.problem == ""


@pytest.mark.parametrize("device_id", ["nvidia.com/gpu=all", "nvidia.com/gpu=0:1", "nvidiactl", "GPU", "0x3", "٣"])
def test_an_id_that_does_not_name_one_device_is_a_problem(
    kubelet: Kubelet, source: KubeletSource, device_id: str
) -> None:
    kubelet.pods["ml", "a"] = {"main": {"nvidia.com/gpu": [device_id]}}
    answer = source.poll()
    assert (answer.grants, "is not understood" in answer.problem) == ([], True)


@pytest.mark.parametrize(
    ("device", "share", "kind", "granted"),
    [
        ("gpu-3", "", "minor", "3"),
        ("gpu-3", "c0ffee", "minor", "3"),
        ("gpu-1-mig-2g47gb-14-4", "", "placement", "1/2g47gb/14/4"),
        ("gpu-0-mig-1g10gb-me-20-0", "", "placement", "0/1g10gb-me/20/0"),
    ],
)
def test_devices_of_a_resource_claim_are_granted_to_its_pod(
    kubelet: Kubelet, source: KubeletSource, device: str, share: str, kind: str, granted: str
) -> None:
    kubelet.pods["ml", "a"] = {"main": {}}
    kubelet.claimed["ml", "a", "main"] = [("gpu.nvidia.com", device, share)]
    answer = source.poll()
    assert [(grant.kind, grant.device, grant.number, grant.share) for grant in answer.grants] == [
        (kind, granted, f"{device} of claim ml/claim", "time_slice" if share else "")
    ]
    assert (answer.problem, answer.grants[0].holder.units) == ("", 1)


def offered(answer: Answer) -> list[tuple[str, str]] | None:
    return None if answer.offers is None else [(offer.kind, offer.device) for offer in answer.offers]


def test_allocatable_gpus_are_known_once_a_plugin_has_offered_them(kubelet: Kubelet, source: KubeletSource) -> None:
    assert offered(source.poll()) is None, "no plugin, or none yet"
    kubelet.allocatable = [f"{UUID}::0", f"{UUID}::1", "2"]
    assert offered(source.poll()) == [("uuid", UUID), ("index", "2")]
    kubelet.allocatable = []
    assert offered(source.poll()) == [], "the plugin is down"
    kubelet.allocatable = [UUID, "odd"]
    assert offered(source.poll()) is None, "the odd one may be any GPU"
    kubelet.allocatable = [UUID]
    kubelet.pods["ml", "a"] = {"main": {}}
    kubelet.claimed["ml", "a", "main"] = [("gpu.nvidia.com", "gpu-3", "")]
    assert offered(source.poll()) is None, "what claims may still get is not the kubelet's knowledge"


def test_a_claim_that_several_pods_use_is_held_by_each_of_them(kubelet: Kubelet, source: KubeletSource) -> None:
    for name in ("a", "b"):
        kubelet.pods["ml", name] = {"main": {}}
        kubelet.claimed["ml", name, "main"] = [("gpu.nvidia.com", "gpu-3", "")]
    assert sorted(grant.holder.pod for grant in source.poll().grants) == ["a", "b"]


def test_a_gpu_of_a_virtual_machine_is_not_a_grant(kubelet: Kubelet, source: KubeletSource) -> None:
    kubelet.pods["vm", "a"] = {"main": {}}
    kubelet.claimed["vm", "a", "main"] = [("gpu.nvidia.com", "gpu-vfio-2", "")]
    assert source.poll() == Answer([])


@pytest.mark.parametrize("device", ["gpu-x", "gpu-1-mig-2g47gb", "mig-1", "gpu-3/../4", "gpu-99999"])
def test_a_claimed_device_with_another_name_leaves_no_gpu_free(
    kubelet: Kubelet, source: KubeletSource, device: str
) -> None:
    kubelet.pods["ml", "a"] = {"main": {}}
    kubelet.claimed["ml", "a", "main"] = [("gpu.nvidia.com", device, "")]
    answer = source.poll()
    assert answer.grants == []
    assert answer.problem == (
        f"ml/a/main has GPUs of a resource claim, but {device!r} is not a device of this node, so no GPU is reported as free"
    )


@pytest.mark.parametrize(
    ("driver", "names"),
    [
        ("gpu.nvidia.com", ["k8s.gpu.nvidia.com/grant=7-gpu-0"]),
        ("", ["k8s.gpu.nvidia.com/device=gpu-0"]),
        ("", ["nvidia.com/gpu=0"]),
    ],
)
def test_gpus_of_a_resource_claim_without_a_device_leave_no_gpu_free(
    kubelet: Kubelet, source: KubeletSource, driver: str, names: list[str]
) -> None:
    kubelet.pods["ml", "a"] = {"main": {}}
    kubelet.claims["ml", "a", "main"] = [(driver, names)]
    answer = source.poll()
    assert answer.grants == []
    assert answer.problem == (
        f"ml/a/main has GPUs of a resource claim, but {names[0]!r} is not a device of this node, "
        "so no GPU is reported as free"
    )


@pytest.mark.parametrize("driver", ["compute-domain.nvidia.com", "dra.cpu", ""])
def test_claims_on_other_devices_are_ignored(kubelet: Kubelet, source: KubeletSource, driver: str) -> None:
    kubelet.pods["ml", "a"] = {"main": {}}
    kubelet.claims["ml", "a", "main"] = [(driver, ["example.com/nic=0"])]
    assert source.poll().problem == ""


def begin(pod_directory: Path, number: int, at: float) -> None:
    """Record a start of a container at the given time."""
    pod, container = pod_directory.parent, pod_directory.name
    os.utime(begin_container(pod.parent, pod.name, number, container), (at, at))


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


def test_a_problem_of_several_pods_has_the_same_text_in_any_order(kubelet: Kubelet, source: KubeletSource) -> None:
    names = ["a", "b", "c"]
    kubelet.claims = {("ml", name, "main"): [("gpu.nvidia.com", [])] for name in names}
    problems = set()
    for turn in (names, names[::-1]):
        kubelet.pods = {("ml", name): {"main": {}} for name in turn}
        problems.add(source.poll().problem)
    assert len(problems) == 1


def test_the_client_keeps_nothing_of_pods_that_have_gone(
    kubelet: Kubelet, source: KubeletSource, clock: ManualClock, tmp_path: Path
) -> None:
    for number in range(50):
        pod = tmp_path / "pods" / f"ml_pod-{number}_uid-{number}"
        begin(pod / "main", 0, clock.wall())
        kubelet.pods = {("ml", f"pod-{number}"): {"main": {"nvidia.com/gpu": [UUID]}}}
        kubelet.allocatable = [UUID]
        assert source.poll().grants[0].holder.pod_uid == f"uid-{number}"
        shutil.rmtree(pod)
    assert len(source._logs._uids) <= 1
    assert len(source._logs._starts) <= 1


def test_the_client_reconnects_to_a_restarted_kubelet_at_once(kubelet: Kubelet, source: KubeletSource) -> None:
    kubelet.pods["ml", "a"] = {"main": {"nvidia.com/gpu": [UUID]}}
    source.poll()
    kubelet.stop()
    with pytest.raises(SourceError, match="kubelet does not answer"):
        source.poll()
    kubelet.start()
    assert len(source.poll().grants) == 1


def test_a_refusal_contains_the_servers_message(kubelet: Kubelet, source: KubeletSource) -> None:
    kubelet.status = grpc.StatusCode.RESOURCE_EXHAUSTED
    with pytest.raises(SourceError, match="gRPC status 8: rejected by rate limit"):
        source.poll()


def test_a_large_answer_arrives_despite_flow_control(kubelet: Kubelet, source: KubeletSource) -> None:
    for i in range(2_000):
        kubelet.pods["ml", f"pod-{i}-{'x' * 200}"] = {"main": {"nvidia.com/gpu": [UUID]}}
    assert len(source.poll().grants) == 2_000


def test_the_client_gives_up_on_a_server_that_never_answers(tmp_path: Path) -> None:
    path = tmp_path / "mute.sock"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        with pytest.raises(CallError, match="timed out|no answer in time"):
            call(str(path), LIST, b"", 0.3)


@pytest.mark.parametrize(
    "answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\0" * 64], ids=["closed", "http1", "noise"]
)
def test_a_server_with_another_protocol_is_an_error(tmp_path: Path, answer: bytes) -> None:
    path = tmp_path / "odd.sock"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()

        def reply() -> None:
            peer, _ = server.accept()
            with peer:
                peer.recv(4096)
                peer.sendall(answer)

        thread = threading.Thread(target=reply)
        thread.start()
        with pytest.raises(CallError):
            call(str(path), LIST, b"", 2.0)
        thread.join()


MIG_BOARD = {
    "model": "H100",
    "mig": [{"profile": "2g.20gb", "gi": 3}, {"profile": "2g.20gb", "gi": 5}, {"profile": "1g.10gb", "gi": 9}],
}


@pytest.mark.parametrize("refused", [False, True], ids=["places", "no-places"])
def test_claimed_mig_instances_are_found_by_their_placement(
    kubelet: Kubelet,
    tmp_path: Path,
    nvml_environment: dict[str, str],
    nvml_table: NvmlTable,
    refused: bool,
) -> None:
    """The driver reports the place. If the driver refuses, two instances of the same profile cannot be distinguished."""
    faults = [{"at": 0, "call": "nvmlDeviceGetGpuInstanceById", "error": "NVML_ERROR_NO_PERMISSION"}] if refused else []
    scenario = parse_scenario({"gpus": [{**MIG_BOARD, "faults": faults}]})
    ScenarioFeeder(scenario, nvml_table)
    claimed = {"a": "gpu-0-mig-2g20gb-14-2", "b": "gpu-0-mig-1g10gb-19-4", "c": "gpu-0-mig-1g10gb-19-6"}
    for name, device in claimed.items():
        kubelet.pods["ml", name] = {"main": {}}
        kubelet.claimed["ml", name, "main"] = [("gpu.nvidia.com", device, "")]
    done = run_exporter(
        "--once", "--format=json", "--state.directory=", *kubelet.flags(tmp_path), environment=nvml_environment
    )
    status = json.loads(done.stdout)
    second, last = (scenario.gpus[0].instances[position].uuid for position in (1, 2))
    held = {allocation["pod"]: allocation["mig_uuid"] for allocation in status["allocations"]}
    assert held == ({} if refused else {"a": second, "b": last})
    if not refused:
        assert status["allocations"][0]["basis"] == f"{claimed['a']} of claim ml/claim: MIG instance of /dev/nvidia0"
    (kubelet_says,) = [source for source in status["attribution"] if source["source"] == "kubelet"]
    wanted = (
        "several MIG instances"
        if refused
        else "no MIG instance of the GPU with device file number 0 can be 1g10gb-19-6"
    )
    assert wanted in kubelet_says["error"]


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
    source = KubeletSource(clock, KubeletOptions(socket=kubelet.socket, logs=logs, timeout_s=10.0), lives=lives_of)

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
