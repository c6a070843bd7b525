"""Reports the pods and their GPUs from the kubelet's PodResources API, v1.

The API (podresources.py) reports no pod UID and no time; the folders of the pods' logs have both (pod_logs.py). A pod
that still pulls an image or runs its init containers holds its GPUs, but cannot use them yet. GetAllocatableResources
lists the devices that the kubelet may allocate. A GPU that it does not list is not free, even without a holder.

For up to a second, a restarted kubelet answers OK with an empty list (measured). So two kinds of answer count only if
they are repeated (docs/decisions/0005): after a restart of the kubelet, an answer without some of the earlier pods;
and, from a kubelet without devices, an empty answer.

Not every listed device is held. The source checks each entry: has the pod ended (alive.py)? Does it use up the device,
or only watch it (consumers.py)? Which device is it (device_ids.py, resolve.py)?
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from gpu_exporter.agent.attribution.kubelet.alive import PodLives
from gpu_exporter.agent.attribution.kubelet.consumers import Consumers
from gpu_exporter.agent.attribution.kubelet.device_ids import DeviceIds
from gpu_exporter.agent.attribution.kubelet.ended import UUID, has_begun
from gpu_exporter.agent.attribution.kubelet.grpc_unix import CallError, TooLargeError, call
from gpu_exporter.agent.attribution.kubelet.pod_logs import PodLogs
from gpu_exporter.agent.attribution.kubelet.podresources import (
    ALLOCATABLE,
    LIST,
    ContainerDevices,
    PodName,
    read_allocatable,
    read_pods,
)
from gpu_exporter.agent.attribution.kubelet.protobuf import ProtobufError
from gpu_exporter.agent.attribution.source import Answer, SourceError
from gpu_exporter.common.clock import Clock
from gpu_exporter.common.model.holders import RESERVATION_NAMESPACES, Grant, Holder, HolderKey
from gpu_exporter.common.vendor import Vendor

NOBODY = Holder(HolderKey("kubernetes", ""))
SETTLED_S = 900.0  # this long after the start of the node, every pod that runs has its cgroup
# The kubelet lists each replica of a device that it offers. Parsing one takes 8 us for 75 bytes. After a larger answer
# than this, the offers are read again only after a while, so that 100,000 replicas cost less than 1 % of a CPU.
OFFERS_AT_ONCE = 100_000  # bytes
OFFER_S = 15e-6  # seconds for each byte above that number
REPLACED = "another pod of this name may have started"
ID_MAX = 80  # characters of an id in a text


class KubeletOptions(NamedTuple):
    """The paths and limits of the source.

    - `logs`: directory of the pods' logs.
    - `empty_confirm_s`: an answer without pods counts after it has been repeated for this time.
    - `resources`: regular expressions of further resources that are GPUs.
    - `reservations`: namespaces whose pods only reserve GPUs, in addition to RESERVATION_NAMESPACES.
    - `boot_wall`: the node's last start (Unix seconds).
    """

    socket: Path
    logs: Path
    timeout_s: float = 5.0
    empty_confirm_s: float = 5.0
    resources: Sequence[str] = ()
    reservations: Sequence[str] = ()
    boot_wall: float = 0.0


class KubeletSource:
    name = "kubelet"

    def __init__(
        self,
        clock: Clock,
        options: KubeletOptions,
        vendor: Vendor,
        consumers: Consumers | None = None,
        lives: PodLives | None = None,
    ) -> None:
        """`consumers`: None: every entry holds. `lives`: None if ended pods cannot be detected. Raises ValueError."""
        self._ids = DeviceIds(vendor, options.resources)
        self._consumers = consumers or Consumers()
        self._lives = lives
        self._reservations = frozenset((*RESERVATION_NAMESPACES, *options.reservations))
        self._boot_wall = options.boot_wall
        self._clock = clock
        self._socket = options.socket
        self._pods = read_pods(self._ids.device_of, self._ids.has_gpus)
        self._allocatable = read_allocatable(self._ids.device_of, self._ids.has_gpus)
        self._logs = PodLogs(options.logs, clock)
        self._timeout_s = options.timeout_s
        self._empty_confirm_s = options.empty_confirm_s
        self._uids: Mapping[PodName, str] = {}
        self._held: set[PodName] = set()  # pods with GPUs in the last accepted answer
        self._kubelet: tuple[int, int] | None = None  # the kubelet of that answer, as `_identify` returns it
        # when pods first were missing (monotonic seconds), and the kubelet of that answer
        self._lacking: tuple[float, tuple[int, int] | None] | None = None
        # True after a device plugin has offered a GPU: a missing offer then means that the plugin is down
        self._has_offered = False
        self._offers: list[Grant] | None = None  # at the last question
        self._ask_offers_at = 0.0  # monotonic seconds
        self._refused = ""  # the reason why the last answer with offers was refused, "" if it was not

    def poll(self) -> Answer:
        listed = self._list()
        claimed = [entry for entry in listed if entry.claimed]
        entries = [*(gpus for entry in listed if (gpus := self._ids.select(entry)) is not None), *claimed]
        pods = {(entry.namespace, entry.pod) for entry in entries}
        gone = self._held - pods
        self._check_missing(pods)
        uids = self._uids = self._logs.begin_poll(self._pods.pods, gone)
        grants, odd = self._grant(self._consumers.select(entries), uids)
        if self._pods.odd:
            odd.add(f"{self._pods.odd} pods in the kubelet's answer cannot be parsed, so no GPU is reported as free")
        # The kubelet's order varies, so the message names the first odd entry by name. The kubelet does not know which
        # devices are left for resource claims.
        return Answer(
            self._note_ended(grants, set(uids.values())),
            min(odd, default=""),
            offers=None if claimed else self._read_offers(),
            notice=self._refused,
        )

    def _grant(self, entries: Sequence[ContainerDevices], uids: Mapping[PodName, str]) -> tuple[list[Grant], set[str]]:
        """Returns grants for the entries that hold their devices, and messages about ids that cannot be parsed."""
        grants: list[Grant] = []
        odd: set[str] = set()
        devices: dict[PodName, set[tuple[str, str]]] = {}
        for entry in entries:
            name = (entry.namespace, entry.pod)
            uid = uids.get(name, "")
            holder = self._holder(entry, uid)
            start = self._logs.read_start(name, uid, entry.container)
            if not entry.device_ids:
                odd.add(_describe_odd(entry, ""))
            for device_id in entry.device_ids[:1] if entry.claimed else entry.device_ids:
                grant = self._ids.grant_claimed(entry, holder) if entry.claimed else self._ids.grant(device_id, holder)
                if grant is None:
                    devices.setdefault(name, set()).add(("", device_id))
                    odd.add(_describe_odd(entry, device_id))
                    continue
                devices.setdefault(name, set()).add((grant.kind, grant.device))
                if grant.kind == "index":  # the runtime looks up the index at each start of the container
                    grant = grant._replace(number=f"device {device_id}, start {start.number}" if not start.why else "")
                grant = grant._replace(working_wall=start.wall, why=start.why, obstacle=start.obstacle)
                grants.append(grant._replace(reserves=entry.namespace in self._reservations))
        counts = {name: len(several) for name, several in devices.items()}
        return [_count_units(grant, counts) for grant in grants], odd

    def _note_ended(self, grants: list[Grant], listed: set[str]) -> list[Grant]:
        """Returns the grants, and marks the grants of ended pods as ended. `listed`: UIDs of all pods in the list."""
        # A pod's logs survive a start of the node, and its cgroup appears later.
        is_settled = self._clock.wall() - self._boot_wall > SETTLED_S
        begun = {
            grant.holder.pod_uid
            for grant in grants
            if has_begun(grant) and (is_settled or (grant.working_wall or 0.0) >= self._boot_wall)
        }
        ended = self._lives.ended(listed, begun, self._clock.monotonic()) if self._lives is not None else ()
        if self._lives is None or not ended:
            return grants
        why = REPLACED if self._lives.may_be_replaced(self._logs.uids) else ""
        return [grant._replace(ended=True, why=why) if grant.holder.pod_uid in ended else grant for grant in grants]

    def _read_offers(self) -> list[Grant] | None:
        """Returns the GPUs that the kubelet may allocate, as grants without a holder.

        None until a device plugin has offered a GPU, or if an id cannot be parsed: free GPUs are then unknown.
        """
        now = self._clock.monotonic()
        if self._offers is None or now >= self._ask_offers_at:
            self._offers = self._ask_offers()
            self._ask_offers_at = now + OFFER_S * max(0, self._allocatable.size - OFFERS_AT_ONCE)
        return self._offers

    def _ask_offers(self) -> list[Grant] | None:
        devices = self._list_allocatable()
        if devices is None or self._allocatable.odd:
            return None
        ids = [device_id for entry in devices if (gpus := self._ids.select(entry)) for device_id in gpus.device_ids]
        offers = [offer for device_id in ids if (offer := self._ids.grant(device_id, NOBODY)) is not None]
        self._has_offered = self._has_offered or bool(offers)
        return offers if self._has_offered and len(offers) == len(ids) else None

    def _list(self) -> list[ContainerDevices]:
        try:
            return self._pods.read(call(str(self._socket), LIST, b"", self._timeout_s))
        except (CallError, ProtobufError) as exc:
            self._lacking = None  # the two answers must follow each other directly
            hint = ""
            if isinstance(exc.__cause__, PermissionError):
                hint = "; run as uid 0 or pass --no-attribution.kubelet"
            raise SourceError(f"kubelet does not answer: {exc}{hint}") from exc

    def _check_missing(self, held: set[PodName]) -> None:
        """Raises SourceError while the answer may lack pods because the kubelet has just restarted."""
        kubelet = self._identify()  # after the answer: if the socket is still the old one, the old process answered
        missing = self._held - held
        if missing and (kubelet != self._kubelet or not (held or self._list_allocatable())):
            now = self._clock.monotonic()
            lost = f"kubelet no longer lists {len(missing)} pods"
            if self._lacking is None or self._lacking[1] != kubelet:
                self._lacking = (now, kubelet)
            if now - self._lacking[0] < self._empty_confirm_s:
                raise SourceError(f"{lost}; waiting for a second answer, because the kubelet may have just restarted")
            if kubelet != self._kubelet and self._knows_static_pods_only(missing):
                raise SourceError(
                    f"{lost} since its restart, but their cgroups exist: check that the kubelet reaches the API server"
                )
        self._held, self._kubelet, self._lacking = held, kubelet, None

    def _knows_static_pods_only(self, missing: set[PodName]) -> bool:
        """Returns whether a restarted kubelet has not reached the API server yet. Its answer then lacks existing pods.

        A pod from the API server has a UUID as UID. If the kubelet lists such a pod, it has reached the API server.
        """
        has_api = any(UUID.fullmatch(self._uids.get(name, "")) for name in self._pods.pods)
        if self._lives is None or has_api:
            return False
        return self._lives.are_there({self._uids[name] for name in missing if self._uids.get(name)})

    def _identify(self) -> tuple[int, int] | None:
        """Returns the inode and time of the kubelet's socket. Both change when the kubelet restarts."""
        try:
            status = self._socket.stat()
        except OSError:
            return None
        return status.st_ino, status.st_ctime_ns

    def _list_allocatable(self) -> list[ContainerDevices] | None:
        self._refused = ""
        try:
            return self._allocatable.read(call(str(self._socket), ALLOCATABLE, b"", self._timeout_s))
        except (TooLargeError, ProtobufError) as exc:
            self._refused = (
                f"cannot use the kubelet's list of allocatable devices ({exc}), so gpu_allocatable is absent: check "
                "the number of replicas in the device plugins' settings"
            )
            return None
        except CallError:  # an old kubelet, or one that starts
            return None

    def _holder(self, entry: ContainerDevices, uid: str) -> Holder:
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
        )


def _count_units(grant: Grant, counts: Mapping[PodName, int]) -> Grant:
    holder = grant.holder
    return grant._replace(holder=holder._replace(units=counts[holder.namespace, holder.pod]))


def _describe_odd(entry: ContainerDevices, device_id: str) -> str:
    holder, named = f"{entry.namespace}/{entry.pod}/{entry.container}", repr(device_id[:ID_MAX])
    if entry.claimed:
        return (
            f"{holder} has GPUs of a resource claim, but {named} is not a device of this node, so no GPU is reported "
            "as free"
        )
    return f"device id {named} of {holder} cannot be parsed, so no GPU is reported as free"
