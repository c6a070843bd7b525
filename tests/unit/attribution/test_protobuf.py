"""The hand-written reader, compared with the real protobuf implementation and tested with random bytes."""

from __future__ import annotations

import contextlib
import tracemalloc
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.testbed.podresources import messages

from gpu_exporter.agent.attribution.kubelet import podresources
from gpu_exporter.agent.attribution.kubelet.podresources import (
    ENTRIES_MAX,
    PART_MAX,
    PAYLOAD_MAX,
    POD_ENTRIES_MAX,
    ContainerDevices,
    PodName,
    PodResourcesReader,
)
from gpu_exporter.agent.attribution.kubelet.podresources import read_allocatable as read_allocatable_of
from gpu_exporter.agent.attribution.kubelet.podresources import read_pods as read_pods_of
from gpu_exporter.agent.attribution.kubelet.protobuf import ProtobufError, read_fields, read_text

NAMES = st.text(max_size=20)


def device_of(device_id: str) -> str:
    return device_id.partition("::")[0]


def read_pods() -> PodResourcesReader:
    return read_pods_of(device_of)


DEVICES = st.lists(st.tuples(NAMES, st.lists(NAMES, max_size=4)), max_size=3)
CLAIMS = st.lists(st.tuples(NAMES, st.lists(NAMES.filter(bool), max_size=4)), max_size=3)
CONTAINERS = st.lists(st.tuples(NAMES, DEVICES, CLAIMS), max_size=3)
PODS = st.lists(st.tuples(NAMES, NAMES, CONTAINERS), max_size=4)


@given(PODS, st.integers(-(2**63), 2**63 - 1))
@example([("", "", [("", [("", [""])], [("", [])])])], 0)  # protobuf leaves out empty fields
@example([("ml", "a", [("main", [("gpu", ["x" * 20_000])], [])])], -1)
def test_every_message_of_the_real_implementation_is_read_back(pods: list, number: int) -> None:
    response = messages().ListPodResourcesResponse()
    expected: list[ContainerDevices] = []
    for namespace, name, containers in pods:
        pod = response.pod_resources.add(name=name, namespace=namespace)
        pod.cpu_ids.append(number)  # a packed field that the reader does not need
        known: dict[tuple[str, str], set[str]] = {}
        for container_name, devices, claims in containers:
            container = pod.containers.add(name=container_name)
            container.cpu_ids.extend([1, number])
            for resource, ids in devices:
                device = container.devices.add(resource_name=resource, device_ids=ids)
                device.topology.nodes.add(ID=3)
                seen = known.setdefault((container_name, resource), set())
                fresh = [
                    each for at, each in enumerate(ids) if device_of(each) not in seen | {*map(device_of, ids[:at])}
                ]
                seen.update(map(device_of, ids))
                if fresh:
                    expected.append(ContainerDevices(namespace, name, container_name, resource, tuple(fresh)))
            for driver, names in claims:
                dynamic = container.dynamic_resources.add(claim_name="c", claim_namespace=namespace)
                claim = dynamic.claim_resources.add(driver_name=driver)
                for cdi in names:
                    claim.cdi_devices.add(name=cdi)
                whose = (namespace, name, container_name, driver)
                before_1_34 = ContainerDevices(*whose, tuple(names), True, f"{namespace}/c", tuple(names))
                expected.append(before_1_34)
                named = dynamic.claim_resources.add(driver_name=driver, pool_name="node", device_name=f"gpu-{number}")
                named.share_id = ""  # present, but empty
                expected.append(before_1_34._replace(device_ids=(f"gpu-{number}",), cdi=(), is_share=True))
    message = response.SerializeToString()
    assert read_pods().read(message) == expected
    for chunk, payload_max in ((1, PAYLOAD_MAX), (7, 0), (1000, 30)):
        with mock.patch.object(podresources, "PAYLOAD_MAX", payload_max):
            assert read_pods().read(chunks(message, chunk)) == expected


def chunks(message: bytes, size: int = 16_384) -> Iterator[bytes]:
    """The message as it arrives: in frames of HTTP/2."""
    return (message[at : at + size] for at in range(0, len(message), size))


def listing(*counts: int) -> bytes:
    """An answer with this number of devices for each pod."""
    response = messages().ListPodResourcesResponse()
    for at, count in enumerate(counts):
        container = response.pod_resources.add(name=f"p{at}", namespace="n").containers.add(name="c")
        for number in range(count):
            container.devices.add(resource_name="r", device_ids=[str(number)])
    return bytes(response.SerializeToString())


def test_an_answer_with_too_many_small_entries_is_refused() -> None:
    assert len(read_pods().read(listing(*[2_000] * 10))) == ENTRIES_MAX
    with pytest.raises(ProtobufError, match="more than 20000 lists of devices"):
        read_pods().read(listing(*[2_000] * 10, 1))


@given(st.integers(0, 49), st.sampled_from([b"\n\x05x", b"\x0b", b"\x1a\x02\x12\x05", b"\xff" * 12]))
def test_a_pod_that_is_not_understood_affects_no_other_pod(position: int, odd: bytes) -> None:
    pods = [field for _, field in read_fields(listing(*[1] * 49))]
    pods.insert(position, odd)
    reader = read_pods()
    found = reader.read(b"".join(b"\n" + bytes([len(pod)]) + pod for pod in pods))
    assert [entry.pod for entry in found] == [f"p{at}" for at in range(49)]
    assert reader.odd == 1
    assert len(reader.read(listing(1, 2_049, 1))) == 2 and reader.odd == 1
    assert len(reader.read(listing(1))) == 1 and reader.odd == 0


PODS = st.lists(st.tuples(st.sampled_from("ab"), st.lists(st.sampled_from("01"), max_size=2)), max_size=4)


@given(st.lists(PODS, max_size=4))
def test_a_reader_gives_the_same_result_as_a_new_reader_for_each_answer(answers: list[list[Any]]) -> None:
    reader = read_pods()
    for pods in answers:
        response = messages().ListPodResourcesResponse()
        for name, ids in pods:
            container = response.pod_resources.add(name=name, namespace="n").containers.add(name="c")
            container.devices.add(resource_name="r", device_ids=ids)
        found = reader.read(response.SerializeToString())
        assert found == read_pods().read(response.SerializeToString())
        assert [(entry.pod, [*entry.device_ids]) for entry in found] == [
            (name, [*dict.fromkeys(ids)]) for name, ids in pods if ids
        ]
        assert reader.pods == {("n", name) for name, _ in pods}


def test_replicas_of_a_device_count_as_one_before_any_limit() -> None:
    response = messages().ListPodResourcesResponse()
    for pod in ("a", "b"):
        container = response.pod_resources.add(name=pod, namespace="n").containers.add(name="c")
        for number in range(POD_ENTRIES_MAX + 1):
            container.devices.add(resource_name="r", device_ids=[f"x::{number}", f"y::{number}"])
    reader = read_pods()
    assert [(entry.pod, entry.device_ids) for entry in reader.read(response.SerializeToString())] == [
        ("a", ("x::0", "y::0")),
        ("b", ("x::0", "y::0")),
    ]
    assert reader.odd == 0
    offered = messages().AllocatableResourcesResponse()
    for number in range(ENTRIES_MAX + 1):
        offered.devices.add(resource_name="r", device_ids=[f"x::{number}"])
    assert [each.device_ids for each in read_allocatable_of(device_of).read(offered.SerializeToString())] == [("x::0",)]


RESOURCES, REPLICAS = 8, 2048
IDS = [
    [f"GPU-5a89bcaa-3509-4375-83e1-b9e7a571000{resource}::{number}" for number in range(REPLICAS)]
    for resource in range(RESOURCES)
]


def replicas(of: str) -> bytes:
    """An answer with many replicas of 8 GPUs. `of`: offered; held by one pod; or so in one message for each resource."""
    offered = messages().AllocatableResourcesResponse()
    listed = messages().ListPodResourcesResponse()
    container = listed.pod_resources.add(name="p", namespace="n").containers.add(name="c")
    for resource, ids in enumerate(IDS):
        for part in [ids] if of == "grouped" else [[each] for each in ids]:
            (offered if of == "offered" else container).devices.add(resource_name=f"r{resource}", device_ids=part)
    for number in range(3):
        listed.pod_resources.add(name=f"small-{number}", namespace="n").containers.add(name="c").devices.add(
            resource_name="r", device_ids=["x"]
        )
    return bytes((offered if of == "offered" else listed).SerializeToString())


@pytest.mark.parametrize("of", ["offered", "held", "grouped"])
def test_the_memory_for_an_answer_does_not_depend_on_the_number_of_replicas(of: str) -> None:
    message = replicas(of)
    peaks = []
    for _ in range(3):  # threads that other tests left behind may allocate meanwhile; their memory counts too
        with mock.patch.object(podresources, "PAYLOAD_MAX", 2_000):
            reader = read_allocatable_of(device_of) if of == "offered" else read_pods()
            tracemalloc.start()
            try:
                found = reader.read(chunks(message))
                peaks.append(tracemalloc.get_traced_memory()[1])
            finally:
                tracemalloc.stop()
    assert [each.device_ids for each in found if each.pod in ("", "p")] == [(ids[0],) for ids in IDS]
    assert reader.odd == 0
    assert len(reader.pods) == (0 if of == "offered" else 4)
    assert min(peaks) < 300_000 < len(message) / 2


@pytest.mark.parametrize(
    "odd",
    [
        lambda pod: pod.containers.add(name="x" * (PART_MAX + 1)),
        lambda pod: pod.containers[0].dynamic_resources.add(claim_name="x" * (PART_MAX + 1)),
        lambda pod: [pod.containers[0].devices.add(resource_name="r", device_ids=[str(n)]) for n in range(2_049)],
    ],
    ids=["name", "claim", "entries"],
)
def test_a_large_pod_that_is_refused_affects_no_other_pod(odd: Any) -> None:
    response = messages().ListPodResourcesResponse()
    for name in "abc":
        container = response.pod_resources.add(name=name, namespace="n").containers.add(name="c")
        container.devices.add(resource_name="r", device_ids=[name])
    odd(response.pod_resources[1])
    reader = read_pods()
    with mock.patch.object(podresources, "PAYLOAD_MAX", 100):
        assert [entry.pod for entry in reader.read(chunks(response.SerializeToString()))] == ["a", "c"]
    assert reader.odd == 1


@pytest.mark.parametrize("names", [b"\x0a\x01p", b"\x12\x01n"])
def test_a_large_pod_whose_name_comes_late_is_refused(names: bytes) -> None:
    pod = b"\x1a\x00" + names
    reader = read_pods()
    with mock.patch.object(podresources, "PAYLOAD_MAX", 1):
        assert reader.read(b"\n" + bytes([len(pod)]) + pod) == [] and reader.odd == 1
        late = b"\x1a\x05\x12\x00\x0a\x01c"
        assert reader.read(b"\n" + bytes([len(late)]) + late) == [] and reader.odd == 1


def test_too_many_pods_are_refused() -> None:
    with pytest.raises(ProtobufError, match="more than 20000 pods"):
        read_pods().read(b"".join(b"\n\x07\x0a\x05%05d" % number for number in range(ENTRIES_MAX + 1)))


def test_a_pod_of_the_last_answer_is_not_parsed_again() -> None:
    read: list[bytes] = []

    def parse(pod: bytes) -> tuple[PodName, list[ContainerDevices]]:
        read.append(pod)
        return ("n", pod.decode()), [ContainerDevices("n", pod.decode(), "c", "r", ("0",))]

    reader = PodResourcesReader(parse)
    for answer, expected in (("ab", "ab"), ("ba", ""), ("b", ""), ("ab", "a"), ("abc", "c")):
        read.clear()
        message = b"".join(b"\n\x01" + pod.encode() for pod in answer)
        assert "".join(entry.pod for entry in reader.read(message)) == answer
        assert b"".join(read).decode() == expected


@given(st.binary(max_size=200))
def test_any_bytes_give_a_message_or_an_error(data: bytes) -> None:
    for payload_max in (PAYLOAD_MAX, 0):
        with mock.patch.object(podresources, "PAYLOAD_MAX", payload_max), contextlib.suppress(ProtobufError):
            list(read_fields(data))
            read_pods().read(data)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"\x0a\x02x", "field 1 is cut off at byte 2"),
        (b"\x0d\x00\x00\x00", "message is cut off"),
        (b"\x09" + b"\x00" * 7, "message is cut off"),
        (b"\x08" + b"\xff" * 11, "varint at byte 11 does not end"),
        (b"\x08\xff", "varint at byte 2 does not end"),
        (b"\x0b", "wire type 3 at byte 1 is not supported"),
    ],
)
def test_an_invalid_message_is_refused_with_its_position(data: bytes, error: str) -> None:
    with pytest.raises(ProtobufError) as caught:
        list(read_fields(data))
    assert str(caught.value) == error


@pytest.mark.parametrize(
    "other",
    [
        b"\x18" + b"\xff" * 9 + b"\x01",  # a varint, -1
        b"\x80\x01\x05",  # a varint, in field 16
        b"\x19" + b"\x0a" * 8,
        b"\x1d" + b"\x0a" * 4,
        b"\x12\x01?",
    ],
    ids=["varint", "varint-of-a-high-number", "fixed64", "fixed32", "length"],
)
def test_fields_of_other_types_and_numbers_are_skipped(other: bytes) -> None:
    response = messages().ListPodResourcesResponse()
    device = response.pod_resources.add(name="a", namespace="ml").containers.add(name="main").devices.add()
    device.resource_name = "gpu"
    device.device_ids.append("GPU-0")
    (pod,) = [payload for _, payload in read_fields(response.SerializeToString())]
    message = b"\n" + bytes([len(other + pod)]) + other + pod
    expected = [ContainerDevices("ml", "a", "main", "gpu", ("GPU-0",))]
    assert read_pods().read(message + other + message + other) == expected * 2


def test_a_text_that_is_not_utf_8_is_still_read() -> None:
    assert read_text(b"GPU-\xff") == "GPU-\ufffd"
