"""Pods by the kubelet's PodResources API, v1.

Field numbers: kubernetes/kubelet, pkg/apis/podresources/v1/api.proto. The API names no pod UID: that comes from the
names of the directories under /var/log/pods (namespace_pod_uid), which the kubelet makes for every pod.
A restarted kubelet answers OK with an empty list for up to a second (measured), so an empty list is believed at once
only while GetAllocatableResources shows devices, else after a second empty answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from gpu_exporter.attribution.grpc_unix import CallError, call
from gpu_exporter.attribution.protobuf import ProtobufError, read_fields, read_text
from gpu_exporter.attribution.source import SourceError
from gpu_exporter.clock import Clock
from gpu_exporter.model import Claim, Holder, HolderKey

LIST = "/v1.PodResourcesLister/List"
ALLOCATABLE = "/v1.PodResourcesLister/GetAllocatableResources"
# GPU-<uuid>, MIG-<uuid>, MIG-GPU-<uuid>/gi/ci (drivers before R470), each with "::N" when it is a replica
UUID_ID = re.compile(r"(GPU|MIG)-[0-9A-Za-z-]+(/\d+/\d+)?(::\d+)?")
GKE_ID = re.compile(r"nvidia(\d+)")


class ContainerDevices(NamedTuple):
    """One resource of one container as PodResources lists it."""

    namespace: str
    pod: str
    container: str
    resource: str
    device_ids: tuple[str, ...]


def parse_pod_resources(message: bytes) -> tuple[int, list[ContainerDevices]]:
    """A ListPodResourcesResponse: how many pods it names, and their device-plugin devices.

    Raises ProtobufError.
    """
    pods = 0
    entries: list[ContainerDevices] = []
    for number, pod in read_fields(message):
        if number != 1:
            continue
        pods += 1
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
            entries += _parse_container(namespace, name, container)
    return pods, entries


def _parse_container(namespace: str, pod: str, message: bytes) -> Iterator[ContainerDevices]:
    name = ""
    devices: list[bytes] = []
    for field, payload in read_fields(message):
        if field == 1:
            name = read_text(payload)
        elif field == 2:
            devices.append(payload)
    for device in devices:
        fields = list(read_fields(device))
        resource = "".join(read_text(payload) for number, payload in fields if number == 1)
        ids = tuple(read_text(payload) for number, payload in fields if number == 2)
        yield ContainerDevices(namespace, pod, name, resource, ids)


class KubeletSource:
    """Polls one kubelet."""

    name = "kubelet"

    def __init__(
        self,
        clock: Clock,
        socket: Path,
        log_directory: Path,
        timeout_s: float = 5.0,
        empty_confirm_s: float = 5.0,
    ) -> None:
        self._clock = clock
        self._socket = socket
        self._log_directory = log_directory
        self._timeout_s = timeout_s
        self._empty_confirm_s = empty_confirm_s
        self._had_pods = False
        self._empty_since: float | None = None

    def poll(self) -> Sequence[Claim]:
        pods, entries = self._list()
        self._check_empty(pods)
        uids = self._read_pod_uids()
        return [claim for entry in entries for claim in self._claims(entry, uids)]

    def _list(self) -> tuple[int, list[ContainerDevices]]:
        try:
            return parse_pod_resources(call(str(self._socket), LIST, b"", self._timeout_s))
        except (CallError, ProtobufError) as exc:
            hint = ""
            if isinstance(exc.__cause__, PermissionError):
                hint = "; run as uid 0 or pass --no-attribution.kubelet"
            raise SourceError(f"kubelet does not answer: {exc}{hint}") from exc

    def _check_empty(self, pods: int) -> None:
        """Raise SourceError while an empty list may be that of a kubelet which has just restarted."""
        if pods:
            self._had_pods, self._empty_since = True, None
            return
        if not self._had_pods:
            return
        now = self._clock.monotonic()
        if self._empty_since is None:
            self._empty_since = now
        if now - self._empty_since < self._empty_confirm_s and not self._shows_devices():
            raise SourceError("kubelet lists no pods; waiting for a second answer, it may have just restarted")
        self._had_pods, self._empty_since = False, None

    def _shows_devices(self) -> bool:
        try:
            answer = call(str(self._socket), ALLOCATABLE, b"", self._timeout_s)
            return any(number == 1 for number, _ in read_fields(answer))
        except (CallError, ProtobufError):
            return False

    def _read_pod_uids(self) -> dict[tuple[str, str], str]:
        """UID by (namespace, pod); of several under one name the newest directory is the living pod."""
        newest: dict[tuple[str, str], tuple[float, str]] = {}
        try:
            for entry in self._log_directory.iterdir():
                namespace, _, rest = entry.name.partition("_")
                pod, _, uid = rest.partition("_")
                if not uid:
                    continue
                made = entry.stat().st_mtime
                if made >= newest.get((namespace, pod), (0.0, ""))[0]:
                    newest[namespace, pod] = (made, uid)
        except OSError:
            return {}  # not mounted: identity by name, marked as such
        return {key: uid for key, (_, uid) in newest.items()}

    def _claims(self, entry: ContainerDevices, uids: dict[tuple[str, str], str]) -> Iterator[Claim]:
        uid = uids.get((entry.namespace, entry.pod), "")
        incarnation = f"{uid}/{entry.container}" if uid else f"{entry.namespace}/{entry.pod}/{entry.container}"
        holder = Holder(
            key=HolderKey("kubernetes", incarnation),
            namespace=entry.namespace,
            pod=entry.pod,
            container=entry.container,
            pod_uid=uid,
            source=self.name,
            resource=entry.resource,
            identity="" if uid else "name",
        )
        for device_id in entry.device_ids:
            if UUID_ID.fullmatch(device_id):
                yield Claim("uuid", device_id, holder)
            elif not entry.resource.startswith("nvidia.com/"):
                continue  # some other plugin's device
            elif match := GKE_ID.fullmatch(device_id):
                yield Claim("minor", match[1], holder)
            elif device_id.isdigit():  # the plugin's --device-id-strategy=index
                yield Claim("index", device_id, holder)
