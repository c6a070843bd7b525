"""Pods by the kubelet's PodResources API, v1.

The API (podresources.py) names no pod UID and no time: both come from the folders of the pods' logs (pod_logs.py). A
pod that still pulls an image or runs its init containers holds its GPUs, but nothing that could use them runs.
A restarted kubelet answers OK with an empty list for up to a second, with or without allocatable devices (measured),
so an answer of a new kubelet that lacks pods seen before, and an empty one of a kubelet without devices, are believed
after a second such answer only (docs/decisions/0005).
GetAllocatableResources lists the devices that it may give to pods: a GPU that is missing there is not free, even while
no pod holds it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from gpu_exporter.attribution.grpc_unix import CallError, call
from gpu_exporter.attribution.pod_logs import PodLogs
from gpu_exporter.attribution.podresources import (
    ALLOCATABLE,
    LIST,
    ContainerDevices,
    read_allocatable,
    read_pods,
)
from gpu_exporter.attribution.protobuf import ProtobufError
from gpu_exporter.attribution.source import Answer, SourceError
from gpu_exporter.clock import Clock
from gpu_exporter.model import Grant, Holder, HolderKey
from gpu_exporter.outside import whole
from gpu_exporter.vendor import NVIDIA, Vendor

NOBODY = Holder(HolderKey("kubernetes", ""))


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
        resources: Sequence[str] = (),
        vendor: Vendor = NVIDIA,
    ) -> None:
        """`resources`: regular expressions of further resources whose devices are GPUs. Raises ValueError."""
        self._vendor = vendor
        self._resources = vendor.resources(resources)
        self._clock = clock
        self._socket = socket
        self._pods, self._allocatable = read_pods(), read_allocatable()
        self._logs = PodLogs(log_directory, clock)
        self._timeout_s = timeout_s
        self._empty_confirm_s = empty_confirm_s
        self._held: set[tuple[str, str]] = set()  # pods with GPUs in the last answer that was believed
        self._kubelet: tuple[int, int] | None = None  # which kubelet gave it
        self._lacking: tuple[float, tuple[int, int] | None] | None = None  # since when, and which kubelet's answers
        self._has_offered = False  # once a device plugin has offered a GPU, no offer means that it is down

    def poll(self) -> Answer:
        listed = self._list()
        entries = [gpus for entry in listed if (gpus := self._gpus_of(entry)) is not None]
        # Sorted, since the kubelet's order varies and the problem names the first.
        claimed = sorted(entry for entry in listed if entry.claimed and self._is_claimed_gpu(entry))
        named = [entry for entry in claimed if self._vendor.claim_device.fullmatch("".join(entry.device_ids[:1]))]
        unnamed = [entry for entry in claimed if entry not in named]
        entries += named
        pods = {(entry.namespace, entry.pod) for entry in entries}
        gone = self._held - pods
        self._check_missing(pods)
        uids = self._logs.begin_poll(pods, gone)
        counts: Counter[tuple[str, str]] = Counter()
        for entry in entries:
            counts[entry.namespace, entry.pod] += len(entry.device_ids)
        grants: list[Grant] = []
        problem = ""
        if unnamed:
            first = unnamed[0]
            problem = (
                f"{first.namespace}/{first.pod}/{first.container} has GPUs of a resource claim, and "
                f"{''.join(first.device_ids[:1])[:80]!r} names no device of this node, so no GPU is called free"
            )
        odd: set[str] = set()
        if self._pods.odd:
            odd.add(f"{self._pods.odd} pods in the kubelet's answer are not understood, so no GPU is called free")
        for entry in entries:
            name = (entry.namespace, entry.pod)
            uid = uids.get(name, "")
            holder = self._holder(entry, uid, counts)
            start = self._logs.read_start(name, uid, entry.container)
            for device_id in entry.device_ids:
                grant = self._grant_claimed(entry, holder) if entry.claimed else self._grant(device_id, holder)
                if grant is None:
                    odd.add(f"device id {device_id[:80]!r} of {holder.label} is not understood")
                    continue
                if grant.kind == "index":  # the runtime looks the index up at each start of the container
                    grant = grant._replace(number=f"device {device_id}, start {start.number}" if not start.why else "")
                grants.append(grant._replace(working_wall=start.wall, why=start.why, obstacle=start.obstacle))
        problem = problem or min(odd, default="")
        # The kubelet does not know which devices are left for resource claims.
        offers = None if claimed else self._read_offers()
        return Answer(grants, problem, offers=offers)

    def _read_offers(self) -> list[Grant] | None:
        """None before a device plugin has offered a GPU, and while it offers one with an id that is not understood."""
        devices = self._list_allocatable()
        if devices is None or self._allocatable.odd:
            return None
        ids = [device_id for entry in devices if (gpus := self._gpus_of(entry)) for device_id in gpus.device_ids]
        offers = [offer for device_id in ids if (offer := self._grant(device_id, NOBODY)) is not None]
        self._has_offered = self._has_offered or bool(offers)
        return offers if self._has_offered and len(offers) == len(ids) else None

    def _gpus_of(self, entry: ContainerDevices) -> ContainerDevices | None:
        """The entry with its GPUs alone, None when it has none.

        Numbers and other names are GPUs only of a GPU resource: network cards and other devices have numbers too. What
        looks like an id of the driver is a GPU whatever its resource is called.
        """
        if entry.claimed:
            return None
        if any(resource.fullmatch(entry.resource) for resource in self._resources):
            return entry
        ids = tuple(device_id for device_id in entry.device_ids if self._vendor.device_id.fullmatch(device_id))
        return entry._replace(device_ids=ids) if ids else None

    def _list(self) -> list[ContainerDevices]:
        try:
            return self._pods.read(call(str(self._socket), LIST, b"", self._timeout_s))
        except (CallError, ProtobufError) as exc:
            self._lacking = None  # two answers in a row are asked for
            hint = ""
            if isinstance(exc.__cause__, PermissionError):
                hint = "; run as uid 0 or pass --no-attribution.kubelet"
            raise SourceError(f"kubelet does not answer: {exc}{hint}") from exc

    def _check_missing(self, held: set[tuple[str, str]]) -> None:
        """Raise SourceError while pods may be missing only because the kubelet has just restarted."""
        kubelet = self._identify()  # after the answer: if the socket is still the old one, the old process answered
        missing = self._held - held
        if missing and (kubelet != self._kubelet or not (held or self._list_allocatable())):
            now = self._clock.monotonic()
            if self._lacking is None or self._lacking[1] != kubelet:
                self._lacking = (now, kubelet)
            if now - self._lacking[0] < self._empty_confirm_s:
                lost = f"kubelet no longer lists {len(missing)} pods"
                raise SourceError(f"{lost}; waiting for a second answer, it may have just restarted")
        self._held, self._kubelet, self._lacking = held, kubelet, None

    def _identify(self) -> tuple[int, int] | None:
        """The socket's inode and time: every start of a kubelet makes a new one."""
        try:
            status = self._socket.stat()
        except OSError:
            return None
        return status.st_ino, status.st_ctime_ns

    def _list_allocatable(self) -> list[ContainerDevices] | None:
        try:
            return self._allocatable.read(call(str(self._socket), ALLOCATABLE, b"", self._timeout_s))
        except (CallError, ProtobufError):
            return None

    def _holder(self, entry: ContainerDevices, uid: str, counts: Counter[tuple[str, str]]) -> Holder:
        incarnation = f"{uid}/{entry.container}" if uid else f"{entry.namespace}/{entry.pod}/{entry.container}"
        return Holder(
            key=HolderKey("kubernetes", incarnation),
            namespace=entry.namespace,
            pod=entry.pod,
            container=entry.container,
            pod_uid=uid,
            source=self.name,
            resource=entry.resource,
            identity="" if uid else "name",
            units=counts[entry.namespace, entry.pod],
        )

    def _is_claimed_gpu(self, entry: ContainerDevices) -> bool:
        """Whether the claim is on GPUs, by its driver, else by the names of its CDI devices."""
        if self._vendor.claim_elsewhere.fullmatch("".join(entry.device_ids[:1])):
            return False  # a GPU of a virtual machine
        names = [entry.resource] if entry.resource else [name.partition("=")[0] for name in entry.device_ids]
        return any(self._vendor.claim_driver.fullmatch(name) for name in names)

    def _grant_claimed(self, entry: ContainerDevices, holder: Holder) -> Grant | None:
        """The grant of a device of dynamic resource allocation."""
        match = self._vendor.claim_device.fullmatch(entry.device_ids[0])
        if match is None:
            return None
        kind: Literal["minor", "placement"] = "minor"
        device = match["minor"]
        if match["profile"]:
            kind, device = "placement", "/".join(match.group("minor", "profile", "id", "start"))
        share = "time_slice" if entry.is_share else ""
        return Grant(kind, device, holder, number=f"{entry.device_ids[0]} of claim {entry.claim}", share=share)

    def _grant(self, device_id: str, holder: Holder) -> Grant | None:
        """The grant of a device id, None when it is not understood."""
        vendor = self._vendor
        if vendor.unfaithful_id.fullmatch(device_id):
            reason = "its scheduler chooses the device and writes it on the pod, whatever the kubelet says"
            return Grant("unproven", device_id, holder, reason=reason)
        if vendor.device_id.fullmatch(device_id):
            return Grant("uuid", device_id, holder)
        if match := vendor.numbered_id.fullmatch(device_id):
            replica = f"::{match['share']}" if match["share"] else ""
            if match["instance"]:
                return Grant("instance", f"{match['minor']}/{match['instance']}{replica}", holder, number=device_id)
            return Grant("minor", match["minor"] + replica, holder, number=device_id)
        if match := vendor.cdi_id.fullmatch(device_id):
            if vendor.device_id.fullmatch(match["name"]):
                return Grant("uuid", match["name"], holder, number=device_id)
            device_id = match["name"]
        if len(device_id) <= 4 and whole(device_id) is not None:  # --device-id-strategy=index
            return Grant("index", device_id, holder, number=device_id)
        return None
