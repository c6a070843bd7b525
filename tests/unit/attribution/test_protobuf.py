"""The hand-written reader against the real protobuf implementation, and against noise."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.testbed.podresources import messages

from gpu_exporter.attribution.podresources import ENTRIES_MAX, ContainerDevices, parse_pod_resources
from gpu_exporter.attribution.protobuf import ProtobufError, read_fields

NAMES = st.text(min_size=1, max_size=20)
DEVICES = st.lists(st.tuples(NAMES, st.lists(NAMES, max_size=4)), max_size=3)
CONTAINERS = st.lists(st.tuples(NAMES, DEVICES, DEVICES), max_size=3)
PODS = st.lists(st.tuples(NAMES, NAMES, CONTAINERS), max_size=4)


@given(PODS, st.integers(0, 2**63 - 1))
def test_every_message_of_the_real_implementation_is_read_back(pods: list, number: int) -> None:
    response = messages().ListPodResourcesResponse()
    expected: list[ContainerDevices] = []
    for namespace, name, containers in pods:
        pod = response.pod_resources.add(name=name, namespace=namespace)
        pod.cpu_ids.append(number)  # a packed field that we do not want
        for container_name, devices, claims in containers:
            container = pod.containers.add(name=container_name)
            container.cpu_ids.extend([1, number])
            for resource, ids in devices:
                device = container.devices.add(resource_name=resource, device_ids=ids)
                device.topology.nodes.add(ID=3)
                expected.append(ContainerDevices(namespace, name, container_name, resource, tuple(ids)))
            for driver, names in claims:
                claim = container.dynamic_resources.add(claim_name="c").claim_resources.add(driver_name=driver)
                for cdi in names:
                    claim.cdi_devices.add(name=cdi)
                expected.append(ContainerDevices(namespace, name, container_name, driver, tuple(names), claimed=True))
    assert parse_pod_resources(response.SerializeToString()) == expected


def test_an_answer_of_endless_small_entries_is_refused() -> None:
    response = messages().ListPodResourcesResponse()
    container = response.pod_resources.add(name="p", namespace="n").containers.add(name="c")
    for _ in range(ENTRIES_MAX):
        container.devices.add(resource_name="r", device_ids=["0"])
    assert len(parse_pod_resources(response.SerializeToString())) == ENTRIES_MAX
    container.devices.add(resource_name="r", device_ids=["0"])
    with pytest.raises(ProtobufError, match="more than 20000 resources of containers"):
        parse_pod_resources(response.SerializeToString())


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_an_error(data: bytes) -> None:
    try:
        list(read_fields(data))
        parse_pod_resources(data)
    except ProtobufError:
        return
