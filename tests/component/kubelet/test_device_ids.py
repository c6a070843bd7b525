"""Ids of devices in every form, and resources that are GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_exporter.agent.attribution.kubelet.source import KubeletOptions, KubeletSource
from gpu_exporter.agent.attribution.source import Answer
from gpu_exporter.common.clock import ManualClock
from gpu_exporter.common.vendor import NVIDIA
from tests.component.kubelet.kubelet_bench import MIG, UUID
from tests.testbed.podresources import Kubelet


@pytest.mark.parametrize(
    ("resource", "device"),
    [("nvidia.com/gpu.shared", UUID), ("nvidia.com/mig-1g.10gb", MIG), ("example.com/half-a-gpu", UUID)],
)
def test_a_uuid_is_a_gpu_whatever_its_resource_is_called(
    kubelet: Kubelet, source: KubeletSource, resource: str, device: str
) -> None:
    kubelet.pods["ml", "a"] = {"main": {resource: [device]}}
    (grant,) = source.poll().grants
    assert (grant.kind, grant.device) == ("uuid", device)


def test_an_unknown_device_id_is_reported_as_a_problem(kubelet: Kubelet, source: KubeletSource) -> None:
    kubelet.pods["ml", "a"] = {"main": {"nvidia.com/gpu": ["nvidia0/gi1/ci2", UUID]}}
    answer = source.poll()
    assert [grant.device for grant in answer.grants] == [UUID]
    assert answer.grants[0].holder.units == 2
    text = "device id 'nvidia0/gi1/ci2' of ml/a/main cannot be parsed, so no GPU is reported as free"
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
        clock, KubeletOptions(socket=kubelet.socket, logs=tmp_path, resources=[r"example\.com/gpu-.*"]), vendor=NVIDIA
    )
    assert [(grant.kind, grant.device, grant.number) for grant in named.poll().grants] == [("index", "1", "")]
    with pytest.raises(ValueError, match=r"--attribution\.resource: not a regular expression"):
        KubeletSource(clock, KubeletOptions(socket=kubelet.socket, logs=tmp_path, resources=["("]), vendor=NVIDIA)


HAMI = "its scheduler writes the chosen device into the pod's annotations, and the kubelet may report another device"


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
    assert (answer.grants, "cannot be parsed" in answer.problem) == ([], True)


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


def test_a_gpu_of_a_virtual_machine_is_not_a_grant(kubelet: Kubelet, source: KubeletSource) -> None:
    kubelet.pods["vm", "a"] = {"main": {}}
    kubelet.claimed["vm", "a", "main"] = [("gpu.nvidia.com", "gpu-vfio-2", "")]
    assert source.poll() == Answer([])


def test_a_problem_of_several_pods_has_the_same_text_in_any_order(kubelet: Kubelet, source: KubeletSource) -> None:
    names = ["a", "b", "c"]
    kubelet.claims = {("ml", name, "main"): [("gpu.nvidia.com", [])] for name in names}
    problems = set()
    for turn in (names, names[::-1]):
        kubelet.pods = {("ml", name): {"main": {}} for name in turn}
        problems.add(source.poll().problem)
    assert len(problems) == 1


@pytest.mark.parametrize(
    ("namespace", "more", "reserves"),
    [
        ("kai-resource-reservation", (), True),
        ("runai-reservation", (), True),
        ("gpu-sharing", ("gpu-sharing",), True),
        ("gpu-sharing", (), False),
        ("kai-resource-reservation-ml", (), False),  # a tenant's: only the whole name counts
        ("ml-kai-resource-reservation", ("gpu-sharing",), False),
    ],
)
def test_a_reservation_is_known_by_the_whole_name_of_its_namespace(
    kubelet: Kubelet, clock: ManualClock, tmp_path: Path, namespace: str, more: tuple[str, ...], reserves: bool
) -> None:
    kubelet.pods[namespace, "gpu-reservation-1a"] = {"resource-reservation": {"nvidia.com/gpu": [UUID]}}
    kubelet.pods[namespace, "claimed"] = {"resource-reservation": {}}
    kubelet.claimed[namespace, "claimed", "resource-reservation"] = [("gpu.nvidia.com", "gpu-3", "")]
    options = KubeletOptions(socket=kubelet.socket, logs=tmp_path, reservations=more)
    answer = KubeletSource(clock, options, vendor=NVIDIA).poll()
    assert [grant.reserves for grant in answer.grants] == [reserves, reserves]
    assert answer.problem == ""
