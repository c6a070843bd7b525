"""Reads one namespace from the API server: its pods that hold GPUs, and the objects that send requests to pods."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

from gpu_exporter.common.outside import need_real
from gpu_exporter.common.plain import shorten
from gpu_exporter.reconciler.kubernetes.checks import Resources, gpus_asked, long_running, odd_limit
from gpu_exporter.reconciler.kubernetes.client.api import Api, Budget, Json, OddAnswer
from gpu_exporter.reconciler.kubernetes.client.keys import GANG_SIGN, GROUPS, KUEUE_GROUP
from gpu_exporter.reconciler.kubernetes.client.lean import ODD_KEY, SPEC_GROUP, TEXT_MAX, group_of, trim, weigh
from gpu_exporter.reconciler.kubernetes.client.routes import NO_ROUTE, Route, Routes, read_routes
from gpu_exporter.reconciler.kubernetes.client.stream import MALFORMED, TOO_LARGE
from gpu_exporter.reconciler.kubernetes.gangs import is_member
from gpu_exporter.reconciler.kubernetes.owners import Kinds, Link, controller_of
from gpu_exporter.reconciler.marks import MarkError

ENDED = ("Succeeded", "Failed")
FRONT_KEYS = ("name", "uid", "annotations", "ownerReferences")
ALIVE = ",".join(f"status.phase!={phase}" for phase in ENDED)  # a field selector, since thousands may have ended
NOT_UNDERSTOOD = (AttributeError, LookupError, TypeError, ValueError, RecursionError)
GRACE_S = 30.0  # the API server's default of terminationGracePeriodSeconds
LARGE_MAX = 20  # malformed or too large pods whose metadata is read one by one; with more, the namespace is unknown
VIEW_MAX = 32 * 1024 * 1024  # approximate bytes kept of one namespace: 20,000 pods with GPUs need half of them


class PodView(NamedTuple):
    """A pod that holds GPUs and has not ended.

    `gpus`: how many GPUs it requests; None for a pod with a ResourceClaim or an invalid limit.
    `waits`: why it cannot work now; "" if it can.
    `start`: when its kubelet accepted it, in the format of the API; "" before that.
    `grace_s`: its terminationGracePeriodSeconds; infinite if unknown.
    `odd`: one of REASONS and the malformed or too large part; None for a normal pod.
    `route`: the object that sends requests to it, or will send them as soon as the pod is ready.
    """

    metadata: Mapping[str, Any]
    gpus: int | None
    waits: str
    start: str
    odd: tuple[str, str] | None = None
    route: Route = NO_ROUTE
    grace_s: float = math.inf

    @property
    def labels(self) -> Mapping[str, str]:
        return self.metadata.get("labels") or {}

    @property
    def annotations(self) -> Mapping[str, str]:
        return self.metadata.get("annotations") or {}


class NamespaceView(NamedTuple):
    """A namespace at one moment.

    `pods`: the pods that were read, by name.
    `fronts`: by name, pods without GPUs that receive requests and may be members of a gang. Only the parts that name
    the gang are kept.
    `scaled`: by kind and name of a scaled object, its autoscaler.
    `alive`: the number of live pods, with or without GPUs, of each controller (by its whole reference) and Kueue group.
    `left_out`: by name, pods that were not read, with one of REASONS and the reason in words.
    `weight`: approximate memory in bytes.
    `unread`: why some routes are not known, with the remedy; "" if all are known.
    """

    metadata: Mapping[str, Any]
    pods: Mapping[str, PodView]
    fronts: Mapping[str, PodView]
    scaled: Mapping[tuple[str, str], str]
    alive: Mapping[Link | str, int]
    left_out: Mapping[str, tuple[str, str]] = {}
    weight: int = 0
    unread: str = ""


class _NamespaceReader:
    """Reads one namespace within a memory limit."""

    def __init__(
        self, api: Api, kinds: Kinds, name: str, resources: Resources, asked: Collection[str], most: Budget
    ) -> None:
        self._api = api
        self._kinds = kinds
        self._name = name
        self._resources = resources
        self._asked = asked
        self._most = most
        self._weight = 0
        self._left_out: dict[str, tuple[str, str]] = {}

    def read(self) -> NamespaceView:
        """Reads the namespace. Raises MarkError."""
        metadata = self._api.call(
            self._api.core.read_namespace, self._name, keep=lambda found: {"metadata": trim(found["metadata"])}
        )["metadata"]
        routes = read_routes(self._api, self._kinds, self._name, self._keep, self._most)
        pods, fronts, alive = self._pods(routes)
        return NamespaceView(metadata, pods, fronts, routes.scaled, alive, self._left_out, self._weight, routes.unread)

    def _keep(self, value: Any) -> None:
        """Counts the memory of a stored value. Raises MarkError above VIEW_MAX."""
        self._weight += weigh(value)
        if self._weight > VIEW_MAX:
            raise MarkError("size", f"its objects need more than {VIEW_MAX // 2**20} MiB of memory")

    def _note_odd(self, name: str, reason: str, why: str) -> None:
        self._keep(name)
        self._left_out[name.rpartition("/")[2]] = reason, why

    def _pods(self, routes: Routes) -> tuple[dict[str, PodView], dict[str, PodView], Counter[Link | str]]:
        pods: dict[str, PodView] = {}
        fronts: dict[str, PodView] = {}
        alive: Counter[Link | str] = Counter()
        listed = self._api.pages(
            self._api.core.list_namespaced_pod,
            self._name,
            kind="Pod",
            keep=lambda pod: self._trim_pod(pod, routes),
            odd=self._note_odd,
            most=self._most,
            field_selector=ALIVE,
        )
        large = self._large_pods(routes)  # starts after the list was read
        for keys, view, front in itertools.chain(listed, large):
            for key in keys:
                if key not in alive:
                    self._keep(key)
                alive[key] += 1
            if view is not None:
                self._keep(view)
                pods[str(view.metadata["name"])] = view
            if front is not None:
                self._keep(front)
                fronts[str(front.metadata["name"])] = front
        return pods, fronts, alive

    def _large_pods(self, routes: Routes) -> Iterator[_Trimmed]:
        """Yields the metadata of malformed or too large pods, because such pods are members of gangs too.

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
                kept = trim(metadata)
                view = PodView(kept, None, "", "", self._left_out[name], routes.find(kept, (), ""))
            except NOT_UNDERSTOOD:
                continue  # a pod without a name or UID, which no API server has
            yield keys_of(metadata), view, None

    def _trim_pod(self, pod: Json, routes: Routes) -> _Trimmed:
        """Returns the groups of a pod, its view if it holds GPUs or is wanted, and otherwise its view as a front."""
        if has_ended(pod):
            return [], None, None
        keys, metadata = keys_of(pod["metadata"]), pod["metadata"]
        if holds_gpus(pod, self._resources) or metadata["name"] in self._asked:
            view = view_pod(pod, self._resources)
            return keys, view._replace(route=routes.find(view.metadata, *_addresses(pod))), None
        try:
            return keys, None, _view_front(pod, routes.find(metadata, *_addresses(pod)))
        except NOT_UNDERSTOOD:
            return keys, None, None


def _view_front(pod: Json, route: Route) -> PodView | None:
    """Returns the part of a served pod without GPUs that names its gang; None if it shows nothing about other pods."""
    if not route.title or route.is_weak:
        return None
    metadata = pod["metadata"]
    labels = {key: text for key, text in metadata.get("labels", {}).items() if key in GROUPS or GANG_SIGN.search(key)}
    kept = trim({**{key: metadata.get(key) for key in FRONT_KEYS}, "labels": labels})
    if group := group_of(pod["spec"]):
        kept[SPEC_GROUP] = group
    return PodView(kept, 0, "", "", route=route) if is_member(kept) else None


_Trimmed: TypeAlias = tuple[list[Link | str], PodView | None, PodView | None]


def _addresses(pod: Json) -> tuple[list[str], str]:
    """Returns the addresses and the subdomain of a pod. A malformed part counts as missing."""
    try:
        ips = [str(each["ip"]) for each in (pod.get("status") or {}).get("podIPs") or ()]
        return ips, str(pod["spec"].get("subdomain") or "")
    except NOT_UNDERSTOOD:
        return [], ""


def read_namespace(
    api: Api, kinds: Kinds, name: str, resources: Resources, asked: Collection[str], most: Budget
) -> NamespaceView:
    """Reads a namespace: its metadata, its pods and its routes, and then each large pod.

    `asked`: pods that are kept even if they request no GPU. `most`: the limits of all lists together.

    Raises MarkError.
    """
    return _NamespaceReader(api, kinds, name, resources, asked, most).read()


def has_ended(pod: Json) -> bool:
    """Returns whether the phase of a pod shows that it has ended."""
    status = pod.get("status")
    return isinstance(status, dict) and status.get("phase") in ENDED


def keys_of(metadata: Json) -> list[Link | str]:
    """Returns the controller and the Kueue group of a pod, as in NamespaceView.alive."""
    labels = metadata.get("labels")
    group = labels.get(KUEUE_GROUP) if isinstance(labels, dict) else None
    keys = [controller_of(metadata), shorten(group, TEXT_MAX) if isinstance(group, str) else None]
    return [key for key in keys if key]


def holds_gpus(pod: Json, resources: Resources) -> bool:
    """Returns whether a pod requests GPUs, or may request GPUs, because it has a resource claim or an invalid spec."""
    try:
        return bool(pod["spec"].get("resourceClaims")) or gpus_asked(pod["spec"], resources) != 0
    except NOT_UNDERSTOOD:
        return True


def view_pod(pod: Json, resources: Resources) -> PodView:
    """Reduces a live pod to the fields that are used. Raises any exception if it has no name or UID."""
    metadata = trim(pod["metadata"])
    odd: tuple[str, str] | None = metadata.pop(ODD_KEY, None)
    asked: int | None = None
    waits = start = ""
    grace_s = math.inf
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
        grace_s = need_real(spec.get("terminationGracePeriodSeconds", GRACE_S))
        start = shorten(str(status.get("startTime") or ""), TEXT_MAX)
    except NOT_UNDERSTOOD as exc:
        odd = odd or (MALFORMED, f"its spec or status cannot be parsed ({type(exc).__name__})")
    return PodView(metadata, asked, waits, start, odd, grace_s=grace_s)


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
