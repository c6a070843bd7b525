"""Suspends Jobs and their like, deactivates what Kueue runs, stops notebooks: one patch, which says that it was ours.

The patch carries the UID and the resourceVersion that were read, so that the API server itself refuses it when anything
has changed in between: an owner's wish, another controller's hand, a new object of the same name. It sets what is to be
done and the annotation `acted` together: whatever happens to this process, the object says what was done to it, and one
that says so is left alone for ever. Its owner may take it up again at any time, and remove the annotation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from gpu_exporter.defaults import Policy
from gpu_exporter.plain import utc
from gpu_exporter.reconciler.actions.actor import DONE, UNCONFIRMED, Found
from gpu_exporter.reconciler.actions.propose import DEACTIVATE, STOP, SUSPEND, Proposal, Target
from gpu_exporter.reconciler.kubernetes.api import Api, Json
from gpu_exporter.reconciler.kubernetes.events import EventWriter
from gpu_exporter.reconciler.kubernetes.optouts import Place, read_wish
from gpu_exporter.reconciler.kubernetes.owners import Owners, controller_of
from gpu_exporter.reconciler.marks import PREFIX, MarkError, Refused, timestamp

ACTED = PREFIX + "acted"
FIELD_MANAGER = "gpu-exporter-reconciler-actions"
STOPPED = "kubeflow-resource-stopped"  # Kubeflow's notebook controller scales a Notebook with it to nothing
QUEUE = "kueue.x-k8s.io/queue-name"  # on whatever Kueue manages
WORKLOAD_OF = "kueue.x-k8s.io/job-uid"  # on Kueue's Workload: the UID of what it was made for
KUEUE, KUEUE_VERSIONS = "kueue.x-k8s.io", ("v1beta2", "v1beta1")
PATCH = "application/merge-patch+json"
EVENTS = {SUSPEND: "GpuSuspended", DEACTIVATE: "GpuDeactivated", STOP: "GpuStopped"}


class _Live(NamedTuple):
    """What is patched, as it was read: its API, its plural, and the object; `state`: what is set, by path."""

    group: str
    version: str
    plural: str
    kind: str
    found: Json
    path: tuple[str, ...]
    value: Any


class PodActor:
    """Acts on the controllers of pods of one API server."""

    scheduler = "kubernetes"

    def __init__(self, api: Api, policy: Policy, instance: str = "") -> None:
        self._api = api
        self._policy = policy
        self._owners = Owners(api)
        self._events = EventWriter(api, instance)

    def find(self, proposal: Proposal, kinds: Sequence[str], wall: float) -> Found:
        namespace, target = proposal.first.name.namespace, proposal.target
        pod = self._get(self._api.core.read_namespaced_pod, proposal.first.name.name, namespace)
        uid = self._uid_of(target, namespace, pod["metadata"])
        plural = self._owners.plural(f"{target.group}/{target.version}", target.kind)
        live = self._read(target.group, target.version, namespace, plural, target.name)
        metadata = live["metadata"]
        if metadata["uid"] != uid:
            raise Refused("replaced", f"{target.title} is another one than its pods belong to")
        above = controller_of(metadata)
        if above is not None:
            why = "which would undo it"
            if above.get("kind") == "CronJob":  # Forbid starts no run after it, Allow piles up more of them
                why = "whose other runs depend on it"
            raise Refused("kind", f"{target.title} belongs to {above.get('kind')}/{above.get('name')}, {why}")
        found = self._choose(
            proposal, kinds, namespace, _Live(target.group, target.version, plural, target.kind, live, (), None)
        )
        object_to(found.live.found, target.title)
        self._object_to_wishes(proposal, pod["metadata"], metadata, wall)
        return found

    def act(self, proposal: Proposal, found: Found, wall: float) -> str:
        live: _Live = found.live
        metadata = live.found["metadata"]
        namespace, name = metadata["namespace"], metadata["name"]
        value = timestamp(wall) if found.kind == STOP else live.value
        annotations = {ACTED: f"{found.kind} {timestamp(wall)}"}
        change: Json = {"metadata": {"uid": metadata["uid"], "resourceVersion": metadata["resourceVersion"]}}
        _set_at(change, ("metadata", "annotations"), annotations)
        _set_at(change, live.path, value)
        what = (live.group, live.version, namespace, live.plural, name)
        self._api.call(
            self._api.custom.patch_namespaced_custom_object,
            *what,
            change,
            _content_type=PATCH,
            field_manager=FIELD_MANAGER,
        )
        self._record(proposal, found, live, wall)
        try:
            now = self._read(*what)
        except (MarkError, Refused):  # the patch was accepted, whatever is said now
            return UNCONFIRMED
        return DONE if _value_at(now, live.path) == value and now["metadata"]["uid"] == metadata["uid"] else UNCONFIRMED

    def _object_to_wishes(
        self, proposal: Proposal, pod: Mapping[str, Any], owner: Mapping[str, Any], wall: float
    ) -> None:
        """Raise Refused for a wish that stands on what was read just now, and that no earlier look has seen."""
        title = proposal.target.title
        wish = read_wish([Place("pod", pod["name"], pod), Place("owner", title, owner)], self._policy, wall)
        if why := wish.exemption.why if wish.exemption is not None else wish.ceiling:
            raise Refused("exempt", why)
        if wish.idle_after_s > wall - proposal.since_wall:
            raise Refused("exempt", f"{title} is to be left alone until it was idle for longer")

    def _choose(self, proposal: Proposal, kinds: Sequence[str], namespace: str, live: _Live) -> Found:
        """What is done to it, and how. Raises Refused."""
        name = live.found["metadata"]["name"]
        kind = STOP if STOP in proposal.possible else SUSPEND
        workload = None
        is_queued = QUEUE in (live.found["metadata"].get("labels") or {})
        if kind == SUSPEND and (is_queued or DEACTIVATE in kinds):  # Kueue may manage what has no label, too
            workload = self._workload(namespace, live.found["metadata"]["uid"], is_queued=is_queued)
            kind = DEACTIVATE if is_queued or workload is not None else SUSPEND
        if kind not in kinds:
            raise Refused("kind", f"actions.kinds does not allow to {kind} it")
        if kind == STOP:
            path: tuple[str, ...] = ("metadata", "annotations", STOPPED)
            undo = f"kubectl annotate -n {namespace} notebook {name} {STOPPED}-"
            return Found(kind, live._replace(path=path), undo)
        if workload is not None:
            object_to(live.found, f"{live.kind} {name}")
            own = workload.found["metadata"]["name"]
            undo = (
                f'kubectl patch -n {namespace} workloads.{KUEUE} {own} --type=merge -p \'{{"spec":{{"active":true}}}}\''
            )
            return Found(kind, workload, undo)
        path = ("spec", "suspend") if live.kind in ("Job", "JobSet") else ("spec", "runPolicy", "suspend")
        what = '{"spec":{"suspend":false}}' if len(path) == 2 else '{"spec":{"runPolicy":{"suspend":false}}}'
        undo = f"kubectl patch -n {namespace} {live.plural}.{live.group} {name} --type=merge -p '{what}'"
        return Found(kind, live._replace(path=path, value=True), undo)

    def _workload(self, namespace: str, uid: str, *, is_queued: bool) -> _Live | None:
        """Kueue's Workload of an object; None for one that is not `is_queued` and has none. Raises Refused."""
        for version in KUEUE_VERSIONS:
            try:
                listed = self._api.call(
                    self._api.custom.list_namespaced_custom_object,
                    KUEUE,
                    version,
                    namespace,
                    "workloads",
                    label_selector=f"{WORKLOAD_OF}={uid}",
                )
            except MarkError as exc:
                if exc.result != "replaced":
                    raise
                continue
            of_it = [
                each for each in listed.get("items") or () if (controller_of(each["metadata"]) or {}).get("uid") == uid
            ]
            if not of_it and not is_queued:
                return None
            if len(of_it) != 1:
                raise Refused(
                    "kueue", f"Kueue has {len(of_it)} Workloads of it, and which one holds its quota is not known"
                )
            return _Live(KUEUE, version, "workloads", "Workload", of_it[0], ("spec", "active"), False)
        if not is_queued:
            return None
        raise Refused("kueue", f"it has the label {QUEUE}, and the API server does not know Kueue's Workloads")

    def _uid_of(self, target: Target, namespace: str, pod: Mapping[str, Any]) -> str:
        """The UID of the target, as the pod's chain of controllers has it. Raises Refused."""
        for reference in self._owners.ancestry(namespace, pod):
            named = (reference.get("apiVersion"), reference.get("kind"), reference.get("name"))
            if named == (f"{target.group}/{target.version}", target.kind, target.name):
                return str(reference.get("uid"))
        raise Refused("changed", f"its pods no longer belong to {target.title}")

    def _read(self, group: str, version: str, namespace: str, plural: str, name: str) -> Json:
        return self._get(self._api.custom.get_namespaced_custom_object, group, version, namespace, plural, name)

    def _get(self, function: Any, *what: str) -> Json:
        try:
            return self._api.call(function, *what)
        except MarkError as exc:
            if exc.result == "replaced":
                raise Refused("replaced", f"{what[-1]} is gone") from exc
            raise

    def _record(self, proposal: Proposal, found: Found, live: _Live, wall: float) -> None:
        metadata = live.found["metadata"]
        regarding = {
            "apiVersion": f"{live.group}/{live.version}",
            "kind": live.kind,
            "namespace": metadata["namespace"],
            "name": metadata["name"],
            "uid": metadata["uid"],
        }
        since = utc(proposal.since_wall).strftime("%Y-%m-%d %H:%MZ")
        note = (
            f"All of its {proposal.gpus} GPUs were idle since {since}, and its owner was warned. "
            f"To take it up again: {found.undo}. It is not touched a second time while it has the annotation {ACTED}"
        )
        self._events.record(regarding, wall, EVENTS[found.kind], note, "TakeBack")


def object_to(live: Json, title: str) -> None:
    """Raise Refused when an object has ended, ends, rests, or was acted on before."""
    metadata, status = live["metadata"], live.get("status") or {}
    annotations = metadata.get("annotations") or {}
    if metadata.get("deletionTimestamp"):
        raise Refused("terminating", f"{title} is being deleted")
    if ACTED in annotations:
        raise Refused("acted", f"{title} was acted on before ({annotations[ACTED]})")
    spec = live.get("spec") or {}
    rests = spec.get("suspend") or (spec.get("runPolicy") or {}).get("suspend") or spec.get("active") is False
    if rests or STOPPED in annotations:
        raise Refused("rests", f"{title} rests already")
    ended = ("Complete", "Failed", "Completed", "Succeeded", "Finished")
    if any(each.get("type") in ended and each.get("status") == "True" for each in status.get("conditions") or ()):
        raise Refused("ended", f"{title} has ended")


def _set_at(change: Json, path: Sequence[str], value: Any) -> None:
    """Set a place within nested objects, and keep what is beside it."""
    for key in path[:-1]:
        change = change.setdefault(key, {})
    change[path[-1]] = value


def _value_at(found: Json, path: Sequence[str]) -> Any:
    place: Any = found
    for key in path:
        place = (place or {}).get(key)
    return place
