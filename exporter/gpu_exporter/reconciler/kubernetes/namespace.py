"""One namespace as the API server shows it: its pods that hold GPUs, and what sends them requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from gpu_exporter.reconciler.kubernetes.api import Api, Json
from gpu_exporter.reconciler.kubernetes.checks import Resources, gpus_asked, long_running
from gpu_exporter.reconciler.kubernetes.gangs import KUEUE_GROUP
from gpu_exporter.reconciler.kubernetes.owners import Link, controller_of, trim

SERVICE_NAME = "kubernetes.io/service-name"  # label of an EndpointSlice
ENDED = ("Succeeded", "Failed")
Service: TypeAlias = tuple[str, frozenset[tuple[str, str]]]  # its title, and the labels that it selects


class PodView(NamedTuple):
    """A pod that holds GPUs and has not ended.

    `gpus`: what it asks for; None where a ResourceClaim says it. `waits`: why it cannot work now, "" when it can.
    `start`: when its kubelet took it, as the API writes times; "" before.
    """

    metadata: Mapping[str, Any]
    gpus: int | None
    waits: str
    start: str

    @property
    def labels(self) -> Mapping[str, str]:
        return self.metadata.get("labels") or {}

    @property
    def annotations(self) -> Mapping[str, str]:
        return self.metadata.get("annotations") or {}


class NamespaceView(NamedTuple):
    """A namespace at one moment.

    `pods`: by name. `served`: by pod UID, the Service whose endpoints name it. `services`: what Services select.
    `scaled`: by kind and name of what is scaled, its autoscaler. `alive`: how many pods each controller, by the whole
    reference to it, and each Kueue group has, with GPUs or not.
    """

    metadata: Mapping[str, Any]
    pods: Mapping[str, PodView]
    served: Mapping[str, str]
    services: Sequence[Service]
    scaled: Mapping[tuple[str, str], str]
    alive: Mapping[Link | str, int]

    def server_of(self, pod: PodView) -> str:
        """The Service that sends a pod requests, or will when it is ready: by its selector, since its endpoints can be
        empty for a moment, else by its endpoints. "" for none.
        """
        labels = pod.labels.items()
        selecting = (title for title, selector in self.services if selector <= labels)
        return next(selecting, "") or self.served.get(str(pod.metadata["uid"]), "")


def read_namespace(api: Api, name: str, resources: Resources, asked: Collection[str]) -> NamespaceView:
    """Five requests, and more where a namespace has more than 500 of something. Raises MarkError.

    `asked`: pods that are kept although they ask for no GPU.
    """
    metadata = trim(api.call(api.core.read_namespace, name)["metadata"])
    pods: dict[str, PodView] = {}
    alive: Counter[Link | str] = Counter()
    for pod in api.pages(api.core.list_namespaced_pod, name):
        if (pod.get("status") or {}).get("phase") in ENDED:
            continue
        group = (pod["metadata"].get("labels") or {}).get(KUEUE_GROUP)
        alive.update(key for key in (controller_of(pod["metadata"]), group) if key)
        view = view_pod(pod, resources)
        if view.gpus != 0 or pod["metadata"]["name"] in asked:
            pods[pod["metadata"]["name"]] = view
    headless: set[str] = set()
    services: list[Service] = []
    for service in api.pages(api.core.list_namespaced_service, name):
        spec, title = service.get("spec") or {}, f"Service/{service['metadata']['name']}"
        if spec.get("clusterIP") == "None":
            headless.add(service["metadata"]["name"])
        elif spec.get("selector") and spec.get("type") != "ExternalName":
            services.append((title, frozenset(spec["selector"].items())))
    served: dict[str, str] = {}
    for endpoints in api.pages(api.discovery.list_namespaced_endpoint_slice, name):
        served |= serving_pods(endpoints, headless)
    scaled: dict[tuple[str, str], str] = {}
    for scaler in api.pages(api.autoscaling.list_namespaced_horizontal_pod_autoscaler, name):
        target = scaler["spec"]["scaleTargetRef"]
        scaled[target["kind"], target["name"]] = f"HorizontalPodAutoscaler/{scaler['metadata']['name']}"
    return NamespaceView(metadata, pods, served, services, scaled, alive)


def view_pod(pod: Json, resources: Resources) -> PodView:
    """What is kept of a live pod."""
    spec, status = pod["spec"], pod.get("status") or {}
    asked = gpus_asked(spec, resources)
    claims = bool(spec.get("resourceClaims"))
    waits = ""
    if pod["metadata"].get("deletionTimestamp"):
        waits = "is being deleted"
    elif status.get("phase") != "Running":
        waits = f"is {status.get('phase') or 'new'}"
    else:
        names = {container["name"] for container in long_running(spec)}
        for each in status.get("containerStatuses") or ():
            waiting = (each.get("state") or {}).get("waiting")
            if waiting is not None and each.get("name") in names:
                waits = f"waits: {waiting.get('reason') or 'container ' + each['name']}"
    return PodView(trim(pod["metadata"]), None if claims else asked, waits, str(status.get("startTime") or ""))


def serving_pods(endpoints: Json, headless: set[str]) -> dict[str, str]:
    """By UID, the pods that the endpoints of a Service name, ready or not.

    Headless Services give names to the members of a training job, so they say nothing.
    """
    service = (endpoints["metadata"].get("labels") or {}).get(SERVICE_NAME, "")
    if not service or service in headless:
        return {}
    targets = (each.get("targetRef") or {} for each in endpoints.get("endpoints") or ())
    pods = (target["uid"] for target in targets if target.get("kind") == "Pod" and "uid" in target)
    return dict.fromkeys(pods, f"Service/{service}")
