"""Parses answers of the kubelet's PodResources API, v1, into records. Pure.

A device plugin may offer one GPU in 16,384 replicas, and kubelets list each replica as a separate message. So an answer
is parsed while it arrives. Only the first replica of a device is kept, and a large pod is parsed in parts. So the
memory depends on the numbers of devices and pods, not on replicas.

Field numbers: kubernetes/kubelet, pkg/apis/podresources/v1/api.proto.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import NamedTuple, TypeAlias

from gpu_exporter.agent.attribution.kubelet.protobuf import ProtobufError, Stream, read_fields, read_text

LIST = "/v1.PodResourcesLister/List"
ENTRIES_MAX = 20_000  # pods, and lists of devices, of one answer; a kubelet has 110 pods by default
POD_ENTRIES_MAX = 2_048  # entries of one pod
PAYLOAD_MAX = 256 * 1024  # bytes of a pod, or of a resource of a container, that are parsed as a whole
PART_MAX = 64 * 1024  # bytes of a name, or of a resource claim, in a larger pod
IDS_AT_ONCE = 1_000  # ids of a resource that is parsed in parts
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
    - `proven`: the entry provably uses up its device.
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


_Field: TypeAlias = tuple[PodName | None, Iterable[ContainerDevices]]
"""The pod that a field of an answer describes, None if it describes no pod, and its entries."""


class _Parsed(NamedTuple):
    """The parsed content of one field of an answer. `pod`: None if the field does not describe a pod."""

    pod: PodName | None
    entries: tuple[ContainerDevices, ...]


class PodResourcesReader:
    """Reads one answer after another. Does not parse a pod again if its bytes are the same as in the previous answer.

    A kubelet may list its pods in another order each time, but the bytes of each pod stay the same while the pod lives.
    """

    def __init__(
        self,
        parse: Callable[[bytes], _Field],
        device_of: Callable[[str], str] = lambda device_id: device_id,
        wants: Callable[[ContainerDevices], bool] = lambda entry: True,
        parse_large: Callable[[Stream, int], _Field] | None = None,
    ) -> None:
        """- `parse`: parses one field of the answer.
        - `device_of`: maps a device plugin's id to its device. If a container has several replicas of a device, only
          the first counts. Replicas are dropped before any limit applies, because a plugin may offer thousands.
        - `wants`: whether to keep an entry, judged by its resource and devices. Plugins of other devices may also offer
          thousands of ids.
        - `parse_large`: parses one field of more than PAYLOAD_MAX bytes, up to this position of the stream, while the
          entries are taken. None to omit such a field.
        """
        self._parse = parse
        self._parse_large = parse_large
        self._wants = wants
        self._device_of = device_of
        self.odd = 0
        """Number of pods or devices of the last answer that were omitted: unreadable, or with too many entries."""
        self.pods: frozenset[PodName] = frozenset()
        """Every pod of the last answer that could be parsed, including pods without devices."""
        self.size = 0
        """Bytes of the last answer."""
        self._known: dict[bytes, _Parsed] = {}  # by the digest of the pod's bytes

    def read(self, message: bytes | Iterable[bytes]) -> list[ContainerDevices]:
        """Returns all entries of the answer. Skips pods that cannot be parsed. `message`: the answer, or its chunks.
        Raises ProtobufError, and each error that the iteration over the chunks raises.
        """
        self.odd = 0
        entries: list[ContainerDevices] = []
        known: dict[bytes, _Parsed] = {}
        pods: set[PodName] = set()
        offered: set[tuple[str, str]] = set()
        stream = Stream([message] if isinstance(message, bytes) else message)
        for number, size in stream.read_fields():
            if number != 1:
                stream.skip(size)
                continue
            if size <= PAYLOAD_MAX:
                found = self._read_small(stream.take(size), known, offered)
            else:
                found = self._read_large(stream, size, offered)
            if found is None:
                self.odd += 1
                continue
            if found.pod:
                pods.add(found.pod)
            entries += found.entries
            for what, kept in (("lists of devices", entries), ("pods", pods)):
                if len(kept) > ENTRIES_MAX:
                    raise ProtobufError(f"the answer has more than {ENTRIES_MAX} {what}")
        self.size = stream.position
        self._known = known
        self.pods = frozenset(pods)
        return entries

    def _read_small(self, payload: bytes, known: dict[bytes, _Parsed], offered: set[tuple[str, str]]) -> _Parsed | None:
        """Parses one field, unless the previous answer had it. None if it cannot be parsed or has too many entries.

        `known`: the pods of this answer so far, to add to. `offered`: as in `_limit`.
        """
        digest = hashlib.blake2b(payload, digest_size=16).digest()
        found = self._known.get(digest)
        if found is None:
            try:
                found = self._limit(*self._parse(payload), offered)
            except ProtobufError:
                return None
        if found is not None and found.pod:
            known[digest] = found
        return found

    def _read_large(self, stream: Stream, size: int, offered: set[tuple[str, str]]) -> _Parsed | None:
        """Parses one large field, the next `size` bytes, in parts. None if it is malformed or has too many entries."""
        end = stream.position + size
        found = None
        if self._parse_large is not None:
            try:
                found = self._limit(*self._parse_large(stream, end), offered)
            except ProtobufError:
                found = None
        if stream.position > end:
            raise ProtobufError(f"a field ends at byte {stream.position} instead of {end}")
        stream.skip(end - stream.position)
        return found

    def _limit(
        self, pod: PodName | None, entries: Iterable[ContainerDevices], offered: set[tuple[str, str]]
    ) -> _Parsed | None:
        """Returns the wanted entries of one field, None if there are too many.

        `offered`: the devices of earlier fields without a pod. An answer of ALLOCATABLE has a field for each replica.
        """
        found = tuple(islice(self._collapse(entries, set() if pod else offered), POD_ENTRIES_MAX + 1))
        return _Parsed(pod, found) if len(found) <= POD_ENTRIES_MAX else None

    def _collapse(self, entries: Iterable[ContainerDevices], seen: set[tuple[str, str]]) -> Iterator[ContainerDevices]:
        """Yields the wanted entries, with one id for each device. `seen`: (container, device) pairs seen before."""
        for entry in entries:
            if entry.claimed:
                if self._wants(entry):
                    yield entry
                continue
            new: dict[tuple[str, str], str] = {}
            for device_id in entry.device_ids:
                key = (f"{entry.container}/{entry.resource}", self._device_of(device_id))
                if key not in seen:
                    new.setdefault(key, device_id)
            # Most replicas end here, before the patterns of `wants`.
            if new and self._wants(first := entry._replace(device_ids=tuple(new.values()))):
                seen.update(new)
                yield first


def read_pods(
    device_of: Callable[[str], str], wants: Callable[[ContainerDevices], bool] = lambda entry: True
) -> PodResourcesReader:
    """Returns a reader for answers of the method List: devices from device plugins and resource claims."""
    return PodResourcesReader(_parse_pod, device_of, wants, _stream_pod)


def read_allocatable(
    device_of: Callable[[str], str], wants: Callable[[ContainerDevices], bool] = lambda entry: True
) -> PodResourcesReader:
    """Returns a reader for answers of GetAllocatableResources: healthy devices of device plugins, without a pod."""
    return PodResourcesReader(
        lambda device: (None, (_parse_devices("", "", "", device),)),
        device_of,
        wants,
        lambda stream, end: (None, _stream_devices(stream, end, "", "", "")),
    )


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
    """Yields one tuple for each ClaimResource: the fields of ContainerDevices, starting with `resource`."""
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


# The readers of large fields yield entries while they read. A name must come before the entries that it names: the
# kubelet's encoder writes fields in the order of their numbers.


def _stream_pod(stream: Stream, end: int) -> _Field:
    name = namespace = ""
    fields = stream.read_fields(end)
    for field, size in fields:
        if field == 1:
            name = _take_text(stream, size)
        elif field == 2:
            namespace = _take_text(stream, size)
        elif field == 3:
            return (namespace, name), _stream_containers(stream, fields, size, namespace, name)
        else:
            stream.skip(size)
    return (namespace, name), ()


def _stream_containers(
    stream: Stream, fields: Iterator[tuple[int, int]], size: int, namespace: str, pod: str
) -> Iterator[ContainerDevices]:
    """Yields the entries of the container in the next `size` bytes, then of those in the pod's other `fields`."""
    yield from _stream_container(stream, stream.position + size, namespace, pod)
    for field, length in fields:
        if field == 3:
            yield from _stream_container(stream, stream.position + length, namespace, pod)
        elif field in (1, 2):
            raise ProtobufError("cannot parse a pod whose name field comes after its containers")
        else:
            stream.skip(length)


def _stream_container(stream: Stream, end: int, namespace: str, pod: str) -> Iterator[ContainerDevices]:
    name = ""
    is_named = True
    for field, size in stream.read_fields(end):
        if field == 1 and is_named:
            name = _take_text(stream, size)
        elif field == 1:
            raise ProtobufError("cannot parse a container whose name field comes after its devices")
        elif field == 2:
            is_named = False
            yield from _stream_devices(stream, stream.position + size, namespace, pod, name)
        elif field == 5:
            is_named = False
            for claimed in _parse_dynamic(_take(stream, size)):
                yield ContainerDevices(namespace, pod, name, *claimed)
        else:
            stream.skip(size)


def _stream_devices(stream: Stream, end: int, namespace: str, pod: str, container: str) -> Iterator[ContainerDevices]:
    """Yields one entry, or several if there are many ids: older kubelets list all ids of a resource in one message."""
    if end - stream.position <= PAYLOAD_MAX:
        yield _parse_devices(namespace, pod, container, stream.take(end - stream.position))
        return
    resource = ""
    ids: list[str] = []
    for field, size in stream.read_fields(end):
        if field == 1:
            resource = _take_text(stream, size)
        elif field == 2:
            ids.append(_take_text(stream, size))
            if len(ids) == IDS_AT_ONCE:
                yield ContainerDevices(namespace, pod, container, resource, tuple(ids))
                ids = []
        else:
            stream.skip(size)
    yield ContainerDevices(namespace, pod, container, resource, tuple(ids))


def _take_text(stream: Stream, size: int) -> str:
    return read_text(_take(stream, size))


def _take(stream: Stream, size: int) -> bytes:
    if size > PART_MAX:
        raise ProtobufError(f"a part of {size} bytes is larger than {PART_MAX}")
    return stream.take(size)
