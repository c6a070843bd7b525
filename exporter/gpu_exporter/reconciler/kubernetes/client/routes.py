"""Reads the objects of one namespace that send requests to pods: Services, InferencePools and autoscalers.

The selector of a Service or an InferencePool matches its pods, because endpoints can be empty for a moment.
EndpointSlices count only for a Service without a selector.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from gpu_exporter.common.outside import need_name
from gpu_exporter.common.plain import shorten
from gpu_exporter.reconciler.kubernetes.client.api import Api, Budget, Json
from gpu_exporter.reconciler.kubernetes.client.keys import is_batch
from gpu_exporter.reconciler.kubernetes.client.lean import TEXT_MAX
from gpu_exporter.reconciler.kubernetes.owners import Kinds, controller_of
from gpu_exporter.reconciler.marks import MarkError

SERVICE_NAME = "kubernetes.io/service-name"  # label of an EndpointSlice
# Gateway API Inference Extension: InferencePools exist in both groups, v1 in the first, v1alpha2 in the second.
POOL_GROUPS = ("inference.networking.k8s.io", "inference.networking.x-k8s.io")
POOLS = "inferencepools"
RAY_CLUSTER, RAY_HEAD = ("ray.io", "RayCluster"), ("ray.io/node-type", "head")
SAME_MAX = (
    2  # routes with one selector, or to one endpoint, that are kept: of two headless ones, one is not the subdomain
)
Selector: TypeAlias = frozenset[tuple[str, str]]


class Route(NamedTuple):
    """An object that sends requests to a pod. `title`: its name for people; "" for no route.

    `is_weak`: members of training jobs have such routes too. A weak route shows that its pod is a server only if no
    controller of the pod runs a batch. It never applies to the pod's gang.
    """

    title: str
    is_weak: bool = False


NO_ROUTE = Route("")


class Pool(NamedTuple):
    """The used fields of a Service or an InferencePool. `selector`: the labels of its pods, if any."""

    name: str
    route: Route
    selector: Selector


class Routes:
    """The routes of one namespace.

    `scaled`: by kind and name of a scaled object, the title of its autoscaler.
    `unread`: why some routes are not known, with the remedy; "" if all are known.
    """

    def __init__(self) -> None:
        self.scaled: dict[tuple[str, str], str] = {}
        self.unread = ""
        self._by_item: defaultdict[tuple[str, str], list[Pool]] = defaultdict(list)
        self._same: Counter[tuple[Selector | str, bool]] = Counter()
        self._by_endpoint: defaultdict[str, list[Pool]] = defaultdict(list)  # by the UID or the address of a pod

    def select(self, pool: Pool) -> None:
        """Adds a Service or InferencePool that has a selector."""
        if self._is_new(pool.selector, pool):
            rarest = min(pool.selector, key=lambda item: len(self._by_item.get(item, ())))
            self._by_item[rarest].append(pool)

    def point(self, endpoints: Collection[str], pool: Pool) -> None:
        """Adds a Service without a selector. `endpoints`: UIDs or addresses of its pods."""
        for each in endpoints:
            if self._is_new(each, pool):
                self._by_endpoint[each].append(pool)

    def _is_new(self, target: Selector | str, pool: Pool) -> bool:
        """Returns whether to keep a route to this target. Each target keeps at most SAME_MAX with a title."""
        self._same[target, pool.route.is_weak] += bool(pool.route.title)
        return bool(pool.route.title) and self._same[target, pool.route.is_weak] <= SAME_MAX

    def find(self, pod: Mapping[str, Any], addresses: Sequence[str], subdomain: str) -> Route:
        """Returns the route to a pod with this metadata. Returns a weak route only if there is no other.

        `addresses`: the pod's addresses. `subdomain`: from the pod's spec. The headless Service of this name is no
        route: it gives the pod its DNS name (kubernetes.io/docs/concepts/services-networking/dns-pod-service), as in a
        StatefulSet.
        """
        labels = (pod.get("labels") or {}).items()
        pools = [pool for item in labels for pool in self._by_item.get(item, ()) if pool.selector <= labels]
        pools += [pool for each in (str(pod["uid"]), *addresses) for pool in self._by_endpoint.get(each, ())]
        routes = [each.route for each in pools if not each.route.is_weak or each.name != subdomain]
        return min(routes, key=lambda route: (route.is_weak, route.title), default=NO_ROUTE)


def read_routes(api: Api, kinds: Kinds, namespace: str, keep: Callable[[Any], None], most: Budget) -> Routes:
    """Reads the routes of a namespace: three requests, one more for each group of InferencePools that the API server
    serves, and one more for every further 500 objects of a kind.

    `keep`: counts the memory of a stored value. Raises MarkError.
    """
    found = Routes()

    def rows(kind: str, function: Any, trim: Callable[[Json], Any], *arguments: str) -> Iterator[Any]:
        def note_odd(name: str, reason: str, why: str) -> None:
            found.unread = found.unread or f"{kind} {name or 'without a name'} cannot be read ({why})"

        return api.pages(function, *arguments, kind=kind, keep=trim, odd=note_odd, most=most)

    services: dict[str, Pool] = {}
    for service in rows("Service", api.core.list_namespaced_service, trim_service, namespace):
        keep(service)
        if service.selector:
            found.select(service)
        services[service.name] = service
    for group in POOL_GROUPS:
        try:
            if version := kinds.preferred(group):
                listed = api.custom.list_namespaced_custom_object
                place = (group, version.rpartition("/")[2], namespace, POOLS)
                for pool in rows("InferencePool", listed, trim_pool, *place):
                    keep(pool)
                    if pool.selector:
                        found.select(pool)
        except MarkError as exc:
            if exc.status not in (403, 404):  # 404: the definition or its version was removed a moment ago
                raise
            remedy = f"; the reconciler needs `list` on {POOLS}.{group}" if exc.status == 403 else ""
            found.unread = found.unread or f"InferencePools cannot be listed ({exc}){remedy}"
    slices = api.discovery.list_namespaced_endpoint_slice
    for name, endpoints in rows("EndpointSlice", slices, trim_endpoints, namespace):
        service = services.get(name) or Pool(name, Route(f"Service/{name}"), frozenset())
        if name and not service.selector:
            keep(endpoints)
            found.point(endpoints, service)
    scalers = api.autoscaling.list_namespaced_horizontal_pod_autoscaler
    for target, title in rows("HorizontalPodAutoscaler", scalers, trim_scaler, namespace):
        if title:
            keep((*target, title))
            found.scaled[target] = title
    return found


def trim_service(service: Json) -> Pool:
    """Reduces a Service to the fields that are used. Raises any exception for a malformed Service.

    A headless Service is weak, because members of training jobs use one to find each other. A Service that a batch job,
    a RayCluster or a pod (Spark's driver) made for itself is no route (`_is_own`).
    """
    spec, metadata = service.get("spec") or {}, service["metadata"]
    name = need_name(metadata["name"])
    selects = spec.get("selector") and spec.get("type") != "ExternalName"
    selector = frozenset((spec.get("selector") or {}).items()) if selects else frozenset()
    is_headless = spec.get("clusterIP") == "None"
    if _is_own(metadata, is_name=is_headless or RAY_HEAD in selector):
        return Pool(name, NO_ROUTE, selector)
    return Pool(name, Route(f"{'headless ' if is_headless else ''}Service/{name}", is_headless), selector)


def _is_own(metadata: Json, *, is_name: bool) -> bool:
    """Returns whether the controller of batch pods made this object for its own use.

    `is_name`: the object only gives a DNS name to members. KubeRay makes such a Service for every RayCluster, for any
    kind of work. It makes a Service for Ray Serve only on request.
    """
    maker = controller_of(metadata)
    if maker is None:
        return False
    kind = maker.group, maker.kind
    return is_batch(*kind) or (is_name and kind in (RAY_CLUSTER, ("", "Pod")))


def trim_pool(pool: Json) -> Pool:
    """Reduces an InferencePool to the fields that are used. Raises any exception for a malformed InferencePool.

    Its selector is `matchLabels` in v1, and the labels themselves in v1alpha2.
    """
    name, selector = need_name(pool["metadata"]["name"]), pool["spec"]["selector"]
    labels = selector.get("matchLabels", selector)
    if not all(isinstance(each, str) for item in labels.items() for each in item):
        raise ValueError("a key or a value in its selector is not a string")
    return Pool(name, Route(f"InferencePool/{name}"), frozenset(labels.items()))


def trim_endpoints(endpoints: Json) -> tuple[str, list[str]]:
    """Returns the Service of an EndpointSlice, and the UIDs of its endpoints. An endpoint without a UID is returned by
    its addresses. Raises any exception for a malformed object.
    """
    service = (endpoints["metadata"].get("labels") or {}).get(SERVICE_NAME)
    found: list[str] = []
    for each in endpoints.get("endpoints") or ():
        target = each.get("targetRef") or {}
        names = [target["uid"]] if target.get("uid") else each.get("addresses") or ()
        found += (shorten(str(name), TEXT_MAX) for name in names)
    return need_name(service) if service else "", found


def trim_scaler(scaler: Json) -> tuple[tuple[str, str], str]:
    """Returns kind and name of the object that an autoscaler scales, and the autoscaler's title. The title is "" if an
    elastic training job made the autoscaler for itself. Raises any exception for a malformed object.
    """
    target, metadata = scaler["spec"]["scaleTargetRef"], scaler["metadata"]
    title = "" if _is_own(metadata, is_name=False) else f"HorizontalPodAutoscaler/{need_name(metadata['name'])}"
    return (need_name(target["kind"]), need_name(target["name"])), title
