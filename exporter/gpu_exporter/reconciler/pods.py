"""Marks on pods: one label and four annotations, by merge patch, each with an Event that says why.

The pod is read before it is written. UID and resourceVersion travel in the patch, so that the API server itself
refuses when the pod was replaced (422, cause metadata.uid) or changed (409) in between. So they do in renewals, with
the resourceVersion of the list: what the owner has changed since is left alone, and the next cycle is the retry.
Withdrawals carry the UID alone: nothing that happens to the pod may delay them.

A label is ours by its key. One without annotations of ours, but with a stage of ours, is a mark that its owner has
stripped: evidence gives it its annotations back, and without evidence it goes at once, for it says nothing of its age.
"""

from __future__ import annotations

import json
import logging
import secrets
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from kubernetes import client
from kubernetes.client.exceptions import ApiException
from kubernetes.config import ConfigException
from kubernetes.config.incluster_config import load_incluster_config
from kubernetes.config.kube_config import load_kube_config
from urllib3.exceptions import HTTPError
from yaml import YAMLError

from gpu_exporter.plain import utc
from gpu_exporter.reconciler.evidence import HolderName
from gpu_exporter.reconciler.marks import PREFIX, Mark, MarkError, Refused, parse_timestamp, timestamp
from gpu_exporter.reconciler.pod_checks import (
    EVIDENCE,
    GPU_RESOURCES,
    GPUS,
    OBSERVED,
    SINCE,
    Resources,
    check_markable,
    is_foreign,
    object_to_containers,
    object_to_identity,
    object_to_kind,
)
from gpu_exporter.reconciler.policy import LABEL, Decision

log = logging.getLogger(__name__)
CONTROLLER = PREFIX + "reconciler"
TIMEOUT_S = 10.0
PAGE = 500
NOTE_MAX = 1024  # bytes; the API server refuses longer ones


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

    def __init__(self, api: client.ApiClient, instance: str = "", resources: Resources = GPU_RESOURCES) -> None:
        """`resources`: whose devices are GPUs, as in the exporter's flag of that name."""
        self._resources = resources
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
                if not is_foreign(pod):
                    marks.append(read_mark(pod))
            token = page["metadata"].get("continue")
            if not token:
                return marks

    def check(self, mark: Mark, decision: Decision, wall: float) -> None:
        check_markable(mark.live, decision, wall, self._resources)

    def check_alone(self, mark: Mark, decision: Decision | None, needed_s: float, wall: float) -> None:
        object_to_kind(mark.live)
        if decision is not None and decision.incarnation:
            object_to_identity(mark.live, decision)
        object_to_containers(mark.live, needed_s, wall, self._resources)

    def inspect(self, decision: Decision, wall: float) -> None:
        check_markable(self._read(decision.name), decision, wall, self._resources)

    def label(self, decision: Decision) -> str:
        return f"{LABEL}={decision.stage}"

    def write(self, decision: Decision, wall: float) -> None:
        pod = self._read(decision.name)
        check_markable(pod, decision, wall, self._resources)
        metadata = pod["metadata"]
        change = {"labels": {LABEL: decision.stage}, "annotations": annotate(decision)}
        self._patch(decision.name, metadata["uid"], {**change, "resourceVersion": metadata["resourceVersion"]})
        self._record(decision.name, metadata["uid"], wall, f"Gpu{decision.stage.capitalize()}", decision.reason)

    def renew(self, mark: Mark, decision: Decision) -> None:
        version = mark.live["metadata"]["resourceVersion"]
        self._patch(mark.name, mark.incarnation, {"annotations": annotate(decision), "resourceVersion": version})

    def withdraw(self, mark: Mark, reason: str, wall: float) -> None:
        change = {"labels": {LABEL: None}, "annotations": dict.fromkeys((SINCE, GPUS, EVIDENCE, OBSERVED))}
        self._patch(mark.name, mark.incarnation, change)
        if not mark.ended:
            self._record(mark.name, mark.incarnation, wall, "GpuMarkWithdrawn", reason)

    def _read(self, name: HolderName) -> dict[str, Any]:
        try:
            return self._call(self._core.read_namespaced_pod, name.name, name.namespace)
        except MarkError as exc:
            if exc.result == "replaced":
                raise Refused("replaced", f"{name} is gone") from exc
            raise

    def _patch(self, name: HolderName, uid: str, change: Mapping[str, Any]) -> None:
        """Change the metadata of this incarnation. Raises MarkError."""
        self._call(
            self._core.patch_namespaced_pod,
            name.name,
            name.namespace,
            {"metadata": {**change, "uid": uid}},
            _content_type="application/merge-patch+json",
        )

    def _record(self, name: HolderName, uid: str, wall: float, reason: str, note: str) -> None:
        """An Event on the pod. The mark is valid without it, so a failure is only logged."""
        # MicroTime needs its fraction, which the client leaves out when it is 0.
        moment = utc(wall)
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


def read_mark(pod: Mapping[str, Any]) -> Mark:
    """The mark on a pod that has our label."""
    metadata = pod["metadata"]
    return Mark(
        HolderName(PodMarker.scheduler, metadata["namespace"], metadata["name"]),
        metadata["labels"][LABEL],
        metadata["uid"],
        pod.get("status", {}).get("phase") in ("Succeeded", "Failed"),
        pod,
        parse_timestamp((metadata.get("annotations") or {}).get(OBSERVED)),
    )


def annotate(decision: Decision) -> dict[str, str]:
    """The evidence of a decision as annotations."""
    return {
        SINCE: timestamp(decision.idle_since_wall or decision.observed_wall),
        GPUS: str(decision.held),
        EVIDENCE: decision.reason,
        OBSERVED: timestamp(decision.observed_wall),
    }
