"""The kubelet's PodResources API, v1, as records. Pure.

Field numbers: kubernetes/kubelet, pkg/apis/podresources/v1/api.proto.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from gpu_exporter.attribution.protobuf import ProtobufError, read_fields, read_text

LIST = "/v1.PodResourcesLister/List"
ENTRIES_MAX = 20_000  # a kubelet has 110 pods by default; an answer of many small entries takes twenty times its size
ALLOCATABLE = "/v1.PodResourcesLister/GetAllocatableResources"


class ContainerDevices(NamedTuple):
    """One resource of one container as PodResources lists it. `claimed`: by a claim of dynamic resource allocation."""

    namespace: str
    pod: str
    container: str
    resource: str
    device_ids: tuple[str, ...]
    claimed: bool = False


def parse_pod_resources(message: bytes) -> list[ContainerDevices]:
    """The devices of a ListPodResourcesResponse: of device plugins, and of dynamic resource allocation.

    Raises ProtobufError.
    """
    entries: list[ContainerDevices] = []
    for number, pod in read_fields(message):
        if number != 1:
            continue
        name = namespace = ""
        containers: list[bytes] = []
        for field, payload in read_fields(pod):
            if field == 1:
                name = read_text(payload)
            elif field == 2:
                namespace = read_text(payload)
            elif field == 3:
                containers.append(payload)
        for container in containers:
            for entry in _parse_container(namespace, name, container):
                entries.append(entry)
                if len(entries) > ENTRIES_MAX:
                    raise ProtobufError(f"more than {ENTRIES_MAX} resources of containers")
    return entries


def _parse_container(namespace: str, pod: str, message: bytes) -> Iterator[ContainerDevices]:
    name = ""
    devices: list[bytes] = []
    dynamic: list[bytes] = []
    for field, payload in read_fields(message):
        if field == 1:
            name = read_text(payload)
        elif field == 2:
            devices.append(payload)
        elif field == 5:
            dynamic.append(payload)
    for device in devices:
        fields = list(read_fields(device))
        resource = "".join(read_text(payload) for number, payload in fields if number == 1)
        ids = tuple(read_text(payload) for number, payload in fields if number == 2)
        yield ContainerDevices(namespace, pod, name, resource, ids)
    for resource_claim in dynamic:
        for driver, ids in _parse_dynamic(resource_claim):
            yield ContainerDevices(namespace, pod, name, driver, ids, claimed=True)


def _parse_dynamic(message: bytes) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(driver, names of CDI devices) of each ClaimResource of a DynamicResource; the driver is "" on older kubelets."""
    for field, resource in read_fields(message):
        if field != 4:
            continue
        names: list[str] = []
        driver = ""
        for number, payload in read_fields(resource):
            if number == 1:
                names += [read_text(name) for inner, name in read_fields(payload) if inner == 1]
            elif number == 2:
                driver = read_text(payload)
        yield driver, tuple(names)
