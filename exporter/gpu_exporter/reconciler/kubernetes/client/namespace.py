"""Reads one namespace from the API server: its pods that hold GPUs, its Services and its autoscalers."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from gpu_exporter.common.outside import need_name
from gpu_exporter.common.plain import shorten
from gpu_exporter.reconciler.kubernetes.checks import Resources, gpus_asked, long_running, odd_limit
from gpu_exporter.reconciler.kubernetes.client.api import Api, Budget, Json, OddAnswer
from gpu_exporter.reconciler.kubernetes.client.keys import KUEUE_GROUP
from gpu_exporter.reconciler.kubernetes.client.lean import ODD_KEY, SPEC_GROUP, TEXT_MAX, group_of, trim, weigh
from gpu_exporter.reconciler.kubernetes.client.stream import MALFORMED, TOO_LARGE
from gpu_exporter.reconciler.kubernetes.owners import Link, controller_of
from gpu_exporter.reconciler.marks import MarkError

SERVICE_NAME = "kubernetes.io/service-name"  # label of an EndpointSlice
ENDED = ("Succeeded", "Failed")
ALIVE = ",".join(f"status.phase!={phase}" for phase in ENDED)  # a field selector, since thousands may have ended
NOT_UNDERSTOOD = (AttributeError, LookupError, TypeError, ValueError, RecursionError)
LARGE_MAX = 20  # malformed or too large pods whose metadata is read one by one; with more, the namespace is unknown
VIEW_MAX = 32 * 1024 * 1024  # approximate bytes kept of one namespace: 20,000 pods with GPUs need half of them


class PodView(NamedTuple):
    """A pod that holds GPUs and has not ended.

    `gpus`: how many GPUs it requests; None for a pod with a ResourceClaim or an invalid limit.
    `waits`: why it cannot work now; "" if it can.
    `start`: when its kubelet accepted it, in the format of the API; "" before that.
    `odd`: one of REASONS and the malformed or too large part; None for a normal pod.
    """

    metadata: Mapping[str, Any]
    gpus: int | None
    waits: str
    start: str
    odd: tuple[str, str] | None = None

    @property
    def labels(self) -> Mapping[str, str]:
        return self.metadata.get("labels") or {}

    @property
    def annotations(self) -> Mapping[str, str]:
        return self.metadata.get("annotations") or {}


class Service(NamedTuple):
    """The used fields of a Service. `selector`: the labels of the pods that receive its requests, if any."""

    name: str
    is_headless: bool
    selector: frozenset[tuple[str, str]]


class NamespaceView(NamedTuple):
    """A namespace at one moment.

    `pods`: by name.
    `served`: by pod UID, the Service that sends it requests.
    `scaled`: by kind and name of a scaled object, its autoscaler.
    `alive`: the number of live pods of each controller (by the whole reference to it) and of each Kueue group, with or
    without GPUs.
    `left_out`: by name, pods that were not read, with one of REASONS and the reason in words.
    `weight`: approximate memory in bytes.
    """

    metadata: Mapping[str, Any]
    pods: Mapping[str, PodView]
    served: Mapping[str, str]
    scaled: Mapping[tuple[str, str], str]
    alive: Mapping[Link | str, int]
    left_out: Mapping[str, tuple[str, str]] = {}
    weight: int = 0

    def server_of(self, pod: PodView) -> str:
        """The Service that sends requests to a pod, or will send them once the pod is ready; "" for none."""
        return self.served.get(str(pod.metadata["uid"]), "")


class _NamespaceReader:
    """Reads one namespace within a memory limit."""

    def __init__(self, api: Api, name: str, resources: Resources, asked: Collection[str], most: Budget) -> None:
        self._api = api
        self._name = name
        self._resources = resources
        self._asked = asked
        self._most = most
        self._weight = 0
        self._left_out: dict[str, tuple[str, str]] = {}

    def read(self) -> NamespaceView:
        """Raises MarkError."""
        metadata = self._api.call(
            self._api.core.read_namespace, self._name, keep=lambda found: {"metadata": trim(found["metadata"])}
        )["metadata"]
        pods, alive = self._pods()
        served = self._served(pods)
        scaled = self._scaled()
        return NamespaceView(metadata, pods, served, scaled, alive, self._left_out, self._weight)

    def _keep(self, value: Any) -> None:
        """Counts the memory of a stored value. Raises MarkError above VIEW_MAX."""
        self._weight += weigh(value)
        if self._weight > VIEW_MAX:
            raise MarkError("size", f"its objects need more than {VIEW_MAX // 2**20} MiB of memory")

    def _note_odd(self, name: str, reason: str, why: str) -> None:
        self._keep(name)
        self._left_out[name.rpartition("/")[2]] = reason, why

    def _pods(self) -> tuple[dict[str, PodView], Counter[Link | str]]:
        pods: dict[str, PodView] = {}
        alive: Counter[Link | str] = Counter()
        listed = self._api.pages(
            self._api.core.list_namespaced_pod,
            self._name,
            kind="Pod",
            keep=self._trim_pod,
            odd=self._note_odd,
            most=self._most,
            field_selector=ALIVE,
        )
        for keys, view in itertools.chain(listed, self._large_pods()):  # `_large_pods` starts after the list was read
            for key in keys:
                if key not in alive:
                    self._keep(key)
                alive[key] += 1
            if view is not None:
                self._keep(view)
                pods[str(view.metadata["name"])] = view
        return pods, alive

    def _large_pods(self) -> Iterator[tuple[list[Link | str], PodView | None]]:
        """The metadata of malformed or too large pods. Such pods are members of gangs too.

        Raises MarkError if nothing is known about a pod, because it may belong to any gang.
        """
        large = [name for name in self._left_out if name]
        if len(large) > LARGE_MAX:
            why = f"namespace {self._name} has {len(large)} pods that are malformed or too large"
            raise MarkError("size", f"{why}; the reconciler reads the metadata of at most {LARGE_MAX} such pods")
        if self._left_out.get("", ("", ""))[0] == TOO_LARGE:
            raise MarkError("size", f"cannot read the name of a pod in namespace {self._name}: the pod is too large")
        for name in large:
            try:
                metadata = self._api.read_metadata(self._name, name)
            except OddAnswer as exc:  # any other error is a failure of the server
                why = f"pod {name} is malformed or too large, and its metadata cannot be read: {exc}"
                raise MarkError("size", why) from exc
            except MarkError as exc:
                if exc.result == "replaced":
                    continue
                raise
            try:
                view = PodView(trim(metadata), None, "", "", self._left_out[name])
            except NOT_UNDERSTOOD:
                continue  # a pod without a name or UID, which no API server has
            yield keys_of(metadata), view

    def _trim_pod(self, pod: Json) -> tuple[list[Link | str], PodView | None]:
        """The groups of a pod; and its view, if it holds GPUs or its name is wanted."""
        if has_ended(pod):
            return [], None
        metadata = pod["metadata"]
        is_kept = holds_gpus(pod, self._resources) or metadata["name"] in self._asked
        return keys_of(metadata), view_pod(pod, self._resources) if is_kept else None

    def _served(self, pods: Mapping[str, PodView]) -> dict[str, str]:
        """The Service that sends requests to each pod, by pod UID.

        The selector of the Service counts first, because its endpoints can be empty for a moment. Then its endpoints
        count.
        """
        by_label: defaultdict[tuple[str, str], list[PodView]] = defaultdict(list)
        for pod in pods.values():
            for item in pod.labels.items():
                by_label[item].append(pod)
        headless: set[str] = set()
        selected: dict[str, str] = {}
        services = self._api.pages(
            self._api.core.list_namespaced_service, self._name, kind="Service", keep=trim_service, most=self._most
        )
        for service in services:
            if service.is_headless:
                self._keep(service.name)
                headless.add(service.name)
            elif service.selector:
                for pod in min((by_label.get(item, ()) for item in service.selector), key=len):
                    if service.selector <= pod.labels.items():
                        selected.setdefault(str(pod.metadata["uid"]), f"Service/{service.name}")
        uids = frozenset(str(pod.metadata["uid"]) for pod in pods.values())
        endpoints: dict[str, str] = {}
        slices = self._api.pages(
            self._api.discovery.list_namespaced_endpoint_slice,
            self._name,
            kind="EndpointSlice",
            keep=lambda found: serving_pods(found, headless, uids),
            most=self._most,
        )
        for found in slices:
            endpoints |= found
        return endpoints | selected

    def _scaled(self) -> dict[tuple[str, str], str]:
        scaled: dict[tuple[str, str], str] = {}
        scalers = self._api.pages(
            self._api.autoscaling.list_namespaced_horizontal_pod_autoscaler,
            self._name,
            kind="HorizontalPodAutoscaler",
            keep=trim_scaler,
            most=self._most,
        )
        for target, title in scalers:
            self._keep((*target, title))
            scaled[target] = title
        return scaled


def read_namespace(api: Api, name: str, resources: Resources, asked: Collection[str], most: Budget) -> NamespaceView:
    """Reads a namespace: five requests, one more for every further 500 objects of a kind, and one for each large pod.

    `asked`: pods that are kept even if they request no GPU. `most`: the limits of all lists together.

    Raises MarkError.
    """
    return _NamespaceReader(api, name, resources, asked, most).read()


def has_ended(pod: Json) -> bool:
    """Whether the phase of a pod shows that it has ended."""
    status = pod.get("status")
    return isinstance(status, dict) and status.get("phase") in ENDED


def keys_of(metadata: Json) -> list[Link | str]:
    """The controller and the Kueue group of a pod, as in NamespaceView.alive."""
    labels = metadata.get("labels")
    group = labels.get(KUEUE_GROUP) if isinstance(labels, dict) else None
    keys = [controller_of(metadata), shorten(group, TEXT_MAX) if isinstance(group, str) else None]
    return [key for key in keys if key]


def holds_gpus(pod: Json, resources: Resources) -> bool:
    """Whether a pod requests GPUs, or possibly does, because it has a resource claim or an invalid spec."""
    try:
        return bool(pod["spec"].get("resourceClaims")) or gpus_asked(pod["spec"], resources) != 0
    except NOT_UNDERSTOOD:
        return True


def view_pod(pod: Json, resources: Resources) -> PodView:
    """Reduces a live pod to the fields that are used. Raises ValueError and others if it has no name or UID."""
    metadata = trim(pod["metadata"])
    odd: tuple[str, str] | None = metadata.pop(ODD_KEY, None)
    asked: int | None = None
    waits = start = ""
    try:
        spec, status = pod["spec"], pod.get("status") or {}
        asked = gpus_asked(spec, resources)
        if asked is None:
            odd = odd or (MALFORMED, odd_limit(spec, resources))
        if spec.get("resourceClaims"):
            asked = None
        if group := group_of(spec):
            metadata[SPEC_GROUP] = group
        waits = _waits(metadata, spec, status)
        start = shorten(str(status.get("startTime") or ""), TEXT_MAX)
    except NOT_UNDERSTOOD as exc:
        odd = odd or (MALFORMED, f"its spec or status cannot be parsed ({type(exc).__name__})")
    return PodView(metadata, asked, waits, start, odd)


def _waits(metadata: Json, spec: Json, status: Json) -> str:
    if metadata.get("deletionTimestamp"):
        return "is being deleted"
    if status.get("phase") != "Running":
        return f"is {shorten(str(status.get('phase') or 'new'), TEXT_MAX)}"
    waits, names = "", {container["name"] for container in long_running(spec)}
    for each in status.get("containerStatuses") or ():
        waiting = (each.get("state") or {}).get("waiting")
        if waiting is not None and each.get("name") in names:
            waits = shorten(f"waits: {waiting.get('reason') or 'container ' + each['name']}", TEXT_MAX)
    return waits


def trim_service(service: Json) -> Service:
    """Reduces a Service to the fields that are used. Raises ValueError and similar exceptions."""
    spec, name = service.get("spec") or {}, need_name(service["metadata"]["name"])
    selects = spec.get("selector") and spec.get("type") != "ExternalName"
    selector = frozenset((spec.get("selector") or {}).items()) if selects else frozenset()
    return Service(name, spec.get("clusterIP") == "None", selector)


def serving_pods(endpoints: Json, headless: Collection[str], uids: Collection[str]) -> dict[str, str]:
    """The pods of `uids` that are endpoints of a Service, by UID, ready or not.

    Ignores headless Services, which only give names to the members of a training job.
    """
    service = (endpoints["metadata"].get("labels") or {}).get(SERVICE_NAME, "")
    if not service or service in headless:
        return {}
    targets = (each.get("targetRef") or {} for each in endpoints.get("endpoints") or ())
    pods = (target["uid"] for target in targets if target.get("kind") == "Pod" and target.get("uid") in uids)
    return dict.fromkeys(pods, f"Service/{need_name(service)}")


def trim_scaler(scaler: Json) -> tuple[tuple[str, str], str]:
    """Kind and name of the object that an autoscaler scales, and the title of the autoscaler.

    Raises ValueError and similar exceptions.
    """
    target = scaler["spec"]["scaleTargetRef"]
    return (need_name(target["kind"]), need_name(target["name"])), (
        f"HorizontalPodAutoscaler/{need_name(scaler['metadata']['name'])}"
    )
