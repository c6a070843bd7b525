"""Marks on pods: one label and four annotations, by merge patch, each with an Event that says why.

The pod is read before it is written. UID and resourceVersion travel in the patch, so that the API server itself
refuses when the pod was replaced (422, cause metadata.uid) or changed (409) in between. Withdrawals carry the UID
alone: nothing that happens to the pod may delay them.
"""

from __future__ import annotations

import json
import logging
import secrets
import socket
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from kubernetes import client
from kubernetes.client.exceptions import ApiException
from kubernetes.config import ConfigException
from kubernetes.config.incluster_config import load_incluster_config
from kubernetes.config.kube_config import load_kube_config
from urllib3.exceptions import HTTPError
from yaml import YAMLError

from gpu_exporter.reconciler.evidence import HolderName
from gpu_exporter.reconciler.marks import PREFIX, Mark, MarkError, Refused, timestamp
from gpu_exporter.reconciler.policy import LABEL, Decision

log = logging.getLogger(__name__)
SINCE, GPUS, EVIDENCE, OBSERVED = (PREFIX + name for name in ("since", "gpus", "evidence", "observed-until"))
OURS = frozenset((SINCE, GPUS, EVIDENCE, OBSERVED))
CONTROLLER = PREFIX + "reconciler"
MIRROR = "kubernetes.io/config.mirror"  # the kubelet's image of a static pod: nobody can act on it
CRITICAL = ("system-cluster-critical", "system-node-critical")
TIMEOUT_S = 10.0
PAGE = 500
NOTE_MAX = 1024  # bytes; the API server refuses longer ones
GPU_RESOURCE = "nvidia.com/"


def connect(kubeconfig: str = "") -> client.ApiClient:
    """The API server of this pod's service account, or of a kubeconfig. Raises MarkError that says what is missing."""
    settings = client.Configuration()
    settings.retries = False  # urllib3 would sleep as long as a Retry-After says; the next cycle is the retry
    try:
        if kubeconfig:
            load_kube_config(kubeconfig, client_configuration=settings)
        else:
            load_incluster_config(settings)
        return client.ApiClient(settings)
    except (ConfigException, OSError, ValueError, TypeError, YAMLError) as exc:
        raise MarkError("error", f"no way to the API server: {exc}") from exc


def is_in_cluster() -> bool:
    """Whether this process has a service account to speak with."""
    try:
        load_incluster_config(client.Configuration())
    except ConfigException:
        return False
    return True


class PodMarker:
    """Pods of one API server."""

    scheduler = "kubernetes"

    def __init__(self, api: client.ApiClient, instance: str = "") -> None:
        self._core = client.CoreV1Api(api)
        self._events = client.EventsV1Api(api)
        self._instance = instance or socket.gethostname()

    def list_marks(self) -> Sequence[Mark]:
        marks: list[Mark] = []
        token: str | None = None
        while True:
            page = self._call(
                self._core.list_pod_for_all_namespaces, label_selector=LABEL, limit=PAGE, _continue=token or None
            )
            for pod in page.get("items") or ():
                metadata = pod["metadata"]
                if not OURS.isdisjoint(metadata.get("annotations") or ()):  # a label without any is somebody else's
                    name = HolderName(self.scheduler, metadata["namespace"], metadata["name"])
                    ended = pod.get("status", {}).get("phase") in ("Succeeded", "Failed")
                    marks.append(Mark(name, metadata["labels"][LABEL], metadata["uid"], ended, pod))
            token = page["metadata"].get("continue")
            if not token:
                return marks

    def check(self, mark: Mark, decision: Decision, wall: float) -> None:
        object_to(mark.live, decision, wall)

    def write(self, decision: Decision, wall: float) -> None:
        pod = self._read(decision.name)
        object_to(pod, decision, wall)
        metadata = pod["metadata"]
        annotations = {
            SINCE: timestamp(decision.idle_since_wall or wall),
            GPUS: str(decision.held),
            EVIDENCE: decision.reason,
            OBSERVED: timestamp(wall),
        }
        self._patch(decision.name, metadata["uid"], decision.stage, annotations, metadata["resourceVersion"])
        self._tell(decision.name, metadata["uid"], wall, f"Gpu{decision.stage.capitalize()}", decision.reason)

    def withdraw(self, mark: Mark, reason: str, wall: float) -> None:
        self._patch(mark.name, mark.incarnation, None, dict.fromkeys((SINCE, GPUS, EVIDENCE, OBSERVED)))
        if not mark.ended:
            self._tell(mark.name, mark.incarnation, wall, "GpuMarkWithdrawn", reason)

    def _read(self, name: HolderName) -> dict[str, Any]:
        try:
            return self._call(self._core.read_namespaced_pod, name.name, name.namespace)
        except MarkError as exc:
            if exc.result == "replaced":
                raise Refused("replaced", f"{name} is gone") from exc
            raise

    def _patch(
        self,
        name: HolderName,
        uid: str,
        stage: str | None,
        annotations: Mapping[str, str | None],
        version: str | None = None,
    ) -> None:
        metadata: dict[str, Any] = {"uid": uid, "labels": {LABEL: stage}, "annotations": dict(annotations)}
        if version is not None:
            metadata["resourceVersion"] = version
        self._call(
            self._core.patch_namespaced_pod,
            name.name,
            name.namespace,
            {"metadata": metadata},
            _content_type="application/merge-patch+json",
        )

    def _tell(self, name: HolderName, uid: str, wall: float, reason: str, note: str) -> None:
        """An Event on the pod. The mark stands without it, so a failure is only logged."""
        # MicroTime needs its fraction, which the client leaves out when it is 0.
        moment = datetime.fromtimestamp(wall, timezone.utc)
        moment = moment.replace(microsecond=max(1, moment.microsecond))
        event = {
            "metadata": {"name": f"{name.name[:230].rstrip('.-')}.{secrets.token_hex(6)}", "namespace": name.namespace},
            "eventTime": moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            "reportingController": CONTROLLER,
            "reportingInstance": self._instance[:128],
            "action": "Mark",
            "reason": reason,
            "type": "Normal",
            "note": note.encode()[:NOTE_MAX].decode("utf-8", "ignore"),
            "regarding": {
                "apiVersion": "v1",
                "kind": "Pod",
                "namespace": name.namespace,
                "name": name.name,
                "uid": uid,
            },
        }
        try:
            self._call(self._events.create_namespaced_event, name.namespace, event)
        except MarkError as exc:
            log.warning("no Event for %s: %s", name, exc)

    def _call(self, function: Any, *arguments: Any, **options: Any) -> dict[str, Any]:
        """One request, answered in plain JSON: the client's typed objects cost ten times the memory.

        Raises MarkError.
        """
        try:
            response = function(*arguments, _preload_content=False, _request_timeout=TIMEOUT_S, **options)
            status, body = response.status, response.data
        except ApiException as exc:
            status, body = exc.status or 0, exc.body
        except (HTTPError, OSError) as exc:
            raise MarkError("error", f"API server: {exc}") from exc
        text = body.decode("utf-8", "replace") if isinstance(body, bytes) else str(body)
        if 200 <= status < 300:
            answer: dict[str, Any] = json.loads(text)
            return answer
        raise failure(status, text)


def failure(status: int, text: str) -> MarkError:
    """What an answer of the API server other than 2xx means."""
    try:
        answer = json.loads(text)
        message = str(answer.get("message", text))
        fields = [cause.get("field") for cause in (answer.get("details") or {}).get("causes") or ()]
    except (ValueError, AttributeError):
        message, fields = text, []  # throttling answers in plain text
    results = {404: "replaced", 409: "conflict", 429: "throttled"}
    result = "replaced" if status == 422 and "metadata.uid" in fields else results.get(status, "error")
    return MarkError(result, f"API server: status {status}: {message[:300]}")


def object_to(pod: Mapping[str, Any], decision: Decision, wall: float) -> None:
    """Raise Refused when a live pod must not carry the mark of this decision at `wall`."""
    metadata, spec, status = pod["metadata"], pod["spec"], pod.get("status", {})
    annotations = metadata.get("annotations") or {}
    labels = metadata.get("labels") or {}
    if MIRROR in annotations:
        raise Refused("static", "a static pod belongs to its node")
    if not decision.incarnation:
        raise Refused("identity", "the evidence names no pod UID: mount /var/log/pods into the agent")
    if metadata["uid"] != decision.incarnation:
        raise Refused("replaced", f"the live pod is {metadata['uid']}, the evidence is of {decision.incarnation}")
    if metadata.get("deletionTimestamp"):
        raise Refused("terminating", "the pod is being deleted")
    if metadata["namespace"] == "kube-system" or spec.get("priorityClassName") in CRITICAL:
        raise Refused("critical", "a part of the cluster itself")
    if any(owner.get("kind") == "DaemonSet" for owner in metadata.get("ownerReferences") or ()):
        raise Refused("daemonset", "a DaemonSet's pod belongs to its node")
    if LABEL in labels and OURS.isdisjoint(annotations):
        raise Refused("foreign", f"{LABEL} was set by somebody else")
    holding = [container for container in _long_running(spec) if _gpus(container)]
    asked = sum(map(_gpus, holding))
    if asked and asked != decision.held:
        raise Refused("gpus", f"the pod asks for {asked} GPUs, the evidence is of {decision.held}")
    names = {container["name"] for container in holding or spec["containers"]}
    running = {
        each["name"]: (each.get("state") or {}).get("running")
        for key in ("containerStatuses", "initContainerStatuses")
        for each in status.get(key) or ()
    }
    for name in sorted(names):
        state = running.get(name)
        if status.get("phase") != "Running" or not state:
            raise Refused("not_running", f"container {name} does not run")
        if not wall - _seconds(state["startedAt"]) >= decision.needed_s:  # before, it could not have worked
            raise Refused("restarted", f"container {name} started at {state['startedAt']}, within the idle time")


def _long_running(spec: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    sidecars = [each for each in spec.get("initContainers") or () if each.get("restartPolicy") == "Always"]
    return [*spec["containers"], *sidecars]


def _gpus(container: Mapping[str, Any]) -> int:
    limits = (container.get("resources") or {}).get("limits") or {}
    return sum(int(count) for resource, count in limits.items() if resource.startswith(GPU_RESOURCE))


def _seconds(moment: str) -> float:
    return datetime.fromisoformat(moment.replace("Z", "+00:00")).timestamp()
