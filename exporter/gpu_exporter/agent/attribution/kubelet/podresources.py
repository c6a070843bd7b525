"""Parses answers of the kubelet's PodResources API, v1, into records. Pure.

Field numbers: kubernetes/kubelet, pkg/apis/podresources/v1/api.proto.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import NamedTuple, TypeAlias

from gpu_exporter.agent.attribution.kubelet.protobuf import ProtobufError, read_fields, read_text

LIST = "/v1.PodResourcesLister/List"
# a kubelet has 110 pods by default; an answer of many small entries takes twenty times its size in memory
ENTRIES_MAX = 20_000
POD_ENTRIES_MAX = 2_048  # entries of one pod, or of one device
ALLOCATABLE = "/v1.PodResourcesLister/GetAllocatableResources"
PodName: TypeAlias = tuple[str, str]
"""Namespace and name of a pod."""


class ContainerDevices(NamedTuple):
    """One resource of one container, as PodResources lists it.

    - `claimed`: the resource comes from a ResourceClaim (dynamic resource allocation). `resource` is then the driver's
      name, and `device_ids` has one device. Kubelets before 1.34 report no driver and no device, and `device_ids` has
      the CDI names.
    - `claim`: NAMESPACE/NAME of the claim.
    - `cdi`: the device's names for the container runtime.
    - `is_share`: other holders may have a part of the same device.
    - `proven`: as in Consumers.select.
    """

    namespace: str
    pod: str
    container: str
    resource: str
    device_ids: tuple[str, ...]
    claimed: bool = False
    claim: str = ""
    cdi: tuple[str, ...] = ()
    is_share: bool = False
    proven: bool = False


class _Parsed(NamedTuple):
    """The parsed content of one field of an answer. `pod`: None if the field does not describe a pod."""

    pod: PodName | None
    entries: tuple[ContainerDevices, ...]


class PodResourcesReader:
    """Reads one answer after another. Does not parse a field again if its bytes are the same as in the previous answer.

    A kubelet may list its pods in another order each time, but the bytes of each pod stay the same while the pod lives.
    """

    def __init__(
        self,
        parse: Callable[[bytes], tuple[PodName | None, Iterable[ContainerDevices]]],
        device_of: Callable[[str], str] = lambda device_id: device_id,
        wants: Callable[[ContainerDevices], bool] = lambda entry: True,
    ) -> None:
        """- `parse`: parses one field of the answer.
        - `device_of`: maps a device plugin's id to its device. If a container has several replicas of a device, only
          the first counts. Replicas are dropped before any limit applies, because a plugin may offer thousands.
        - `wants`: whether to keep an entry. Plugins of other devices may also offer thousands of ids.
        """
        self._parse = parse
        self._wants = wants
        self._device_of = device_of
        self.odd = 0
        """Number of pods or devices of the last answer that were omitted: unreadable, or with too many entries."""
        self.pods: frozenset[PodName] = frozenset()
        """Every pod of the last answer that could be parsed, including pods without devices."""
        self._known: dict[bytes, _Parsed] = {}

    def read(self, message: bytes) -> list[ContainerDevices]:
        """Returns all entries of the answer. Skips pods that cannot be parsed. Raises ProtobufError."""
        self.odd = 0
        entries: list[ContainerDevices] = []
        known: dict[bytes, _Parsed] = {}
        offered: set[tuple[str, str]] = set()
        for number, payload in read_fields(message):
            if number != 1:
                continue
            found = self._known.get(payload) or self._read_field(payload)
            if found is None:
                self.odd += 1
                continue
            known[payload] = found
            # An answer of ALLOCATABLE has one field for each replica.
            entries += found.entries if found.pod else self._collapse(found.entries, offered)
            if len(entries) > ENTRIES_MAX:
                raise ProtobufError(f"the answer has more than {ENTRIES_MAX} lists of devices")
        self._known = known
        self.pods = frozenset(found.pod for found in known.values() if found.pod)
        return entries

    def _read_field(self, payload: bytes) -> _Parsed | None:
        """Parses one field. None if it cannot be parsed or has too many entries."""
        try:
            pod, entries = self._parse(payload)
            found = tuple(islice(self._collapse(entries, set()), POD_ENTRIES_MAX + 1))
        except ProtobufError:
            return None
        return _Parsed(pod, found) if len(found) <= POD_ENTRIES_MAX else None

    def _collapse(self, entries: Iterable[ContainerDevices], seen: set[tuple[str, str]]) -> Iterator[ContainerDevices]:
        """Yields the wanted entries, with one id for each device. `seen`: (container, device) pairs of
        earlier entries.
        """
        for entry in entries:
            if not self._wants(entry):
                continue
            if entry.claimed:
                yield entry
                continue
            ids: list[str] = []
            for device_id in entry.device_ids:
                key = (f"{entry.container}/{entry.resource}", self._device_of(device_id))
                if key not in seen:
                    seen.add(key)
                    ids.append(device_id)
            if ids:
                yield entry._replace(device_ids=tuple(ids))


def read_pods(
    device_of: Callable[[str], str], wants: Callable[[ContainerDevices], bool] = lambda entry: True
) -> PodResourcesReader:
    """Returns a reader for answers of the method List: devices of containers, from device plugins and
    resource claims.
    """
    return PodResourcesReader(_parse_pod, device_of, wants)


def read_allocatable(device_of: Callable[[str], str]) -> PodResourcesReader:
    """Returns a reader for answers of GetAllocatableResources: healthy devices of device plugins, without a pod."""
    return PodResourcesReader(lambda device: (None, (_parse_devices("", "", "", device),)), device_of)


def _parse_pod(message: bytes) -> tuple[PodName, Iterator[ContainerDevices]]:
    name = namespace = ""
    containers: list[bytes] = []
    for field, payload in read_fields(message):
        if field == 1:
            name = read_text(payload)
        elif field == 2:
            namespace = read_text(payload)
        elif field == 3:
            containers.append(payload)
    found = (devices for container in containers for devices in _parse_container(namespace, name, container))
    return (namespace, name), found


def _parse_devices(namespace: str, pod: str, container: str, message: bytes) -> ContainerDevices:
    fields = list(read_fields(message))
    resource = "".join(read_text(payload) for number, payload in fields if number == 1)
    ids = tuple(read_text(payload) for number, payload in fields if number == 2)
    return ContainerDevices(namespace, pod, container, resource, ids)


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
        yield _parse_devices(namespace, pod, name, device)
    for resource_claim in dynamic:
        for claimed in _parse_dynamic(resource_claim):
            yield ContainerDevices(namespace, pod, name, *claimed)


def _parse_dynamic(message: bytes) -> Iterator[tuple[str, tuple[str, ...], bool, str, tuple[str, ...], bool]]:
    """Yields the values of ContainerDevices, from the field `resource` on, for each ClaimResource of a
    DynamicResource.
    """
    claim = claim_namespace = ""
    resources: list[bytes] = []
    for field, payload in read_fields(message):
        if field == 2:
            claim = read_text(payload)
        elif field == 3:
            claim_namespace = read_text(payload)
        elif field == 4:
            resources.append(payload)
    for resource in resources:
        names: list[str] = []
        driver = device = ""
        is_share = False
        for number, payload in read_fields(resource):
            if number == 1:
                names += [read_text(name) for inner, name in read_fields(payload) if inner == 1]
            elif number == 2:
                driver = read_text(payload)
            elif number == 4:
                device = read_text(payload)
            elif number == 5:
                is_share = True
        cdi = tuple(names)
        yield driver, (device,) if device else cdi, True, f"{claim_namespace}/{claim}", cdi, is_share
