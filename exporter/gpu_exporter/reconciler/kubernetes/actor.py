"""Suspends Jobs and similar objects, deactivates Kueue's Workloads, and stops notebooks, each with one patch.

The patch carries the UID and the resourceVersion that were read. So the API server refuses it if the object has changed
since then: by an owner's wish, by another controller, or by a new object with the same name. The patch sets both the
field of the action and the annotation `acted`. It is first sent as a dry run, because the definition of a kind may drop
the field. Then the API server would accept the patch, keep the annotation and change nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpu_exporter.common.clock import Clock
from gpu_exporter.common.config.defaults import Policy
from gpu_exporter.reconciler.actor import DONE, GONE, NOT_DONE, Entry
from gpu_exporter.reconciler.decision.surroundings import Reference
from gpu_exporter.reconciler.decision.target import Target
from gpu_exporter.reconciler.kubernetes.checks import Resources
from gpu_exporter.reconciler.kubernetes.client.api import Api, Json
from gpu_exporter.reconciler.kubernetes.events import EventWriter
from gpu_exporter.reconciler.kubernetes.owners import Owners
from gpu_exporter.reconciler.kubernetes.shapes import DEACTIVATE, SHAPES, STOP, SUSPEND
from gpu_exporter.reconciler.kubernetes.targets import ACTED, SCHEDULER, Lever, TargetReader
from gpu_exporter.reconciler.marks import MarkError, Refused, timestamp

FIELD_MANAGER = "gpu-exporter-reconciler-actions"
PATCH = "application/merge-patch+json"
EVENTS = {SUSPEND: "GpuSuspended", DEACTIVATE: "GpuDeactivated", STOP: "GpuStopped"}


class PodActor:
    """Acts on the controllers of pods through one API server."""

    scheduler = SCHEDULER

    def __init__(self, api: Api, policy: Policy, clock: Clock, resources: Resources, instance: str = "") -> None:
        self._api = api
        self._owners = Owners(api, clock)
        self._reader = TargetReader(api, policy, clock, self._owners, resources)
        self._events = EventWriter(api, instance)

    def read(self, reference: Reference, namespace: str, verbs: Sequence[str], idle_s: float, wall: float) -> Target:
        """See Actor.read."""
        return self._reader.read(reference, namespace, verbs, idle_s, wall)

    def rehearse(self, target: Target) -> None:
        """See Actor.rehearse."""
        lever: Lever = target.live
        would = self._patch(lever, f"{target.verb} soon", dry_run="All")
        if not _is_set(would, lever.path, lever.value):
            field = ".".join(lever.path)
            raise Refused("refused", f"the API server drops {field} of {lever.kind}: its definition has no such field")

    def open_entry(self, target: Target, ident: str, wall: float) -> Entry:
        """See Actor.open_entry."""
        lever: Lever = target.live
        note = f"{target.verb} {timestamp(wall)} {ident}"
        where = target.reference, lever.reference
        return Entry(ident, wall, self.scheduler, target.namespace, target.verb, *where, note, undo=target.undo)

    def act(self, target: Target, entry: Entry) -> None:
        """Suspends, deactivates or stops the target: see Actor.act."""
        self._patch(target.live, entry.note)

    def look(self, entry: Entry) -> str:
        """See Actor.look."""
        found = self._read(entry.lever, entry.namespace)
        if found is None or found["metadata"]["uid"] != entry.lever.uid:
            return GONE
        return DONE if _is_set(found, *_setting(entry)) else NOT_DONE

    def tell(self, entry: Entry, text: str) -> None:
        """See Actor.tell."""
        target = entry.target
        regarding = {
            "apiVersion": f"{target.group}/{target.version}",
            "kind": target.kind,
            "namespace": entry.namespace,
            "name": target.name,
            "uid": target.uid,
        }
        note = f"{text}. To resume it: {entry.undo}. No further action follows while it has the annotation {ACTED}"
        self._events.record_once(regarding, entry.wall, EVENTS[entry.verb], note, "TakeBack", entry.ident)
        if entry.lever != target:  # Kueue may create the Workload again
            self._note(entry)

    def _note(self, entry: Entry) -> None:
        """Writes the annotation `acted` on the target if the action changed its Workload."""
        target = entry.target
        found = self._read(target, entry.namespace)
        if found is None or ACTED in (found["metadata"].get("annotations") or {}):
            return
        change = {"metadata": {"uid": target.uid, "annotations": {ACTED: entry.note}}}
        try:
            self._send(self._place(target, entry.namespace), change)
        except MarkError as exc:
            if exc.result != "replaced":
                raise

    def _patch(self, lever: Lever, note: str, **options: Any) -> Json:
        metadata = lever.found["metadata"]
        change: Json = {"metadata": {"uid": metadata["uid"], "resourceVersion": metadata["resourceVersion"]}}
        _set_at(change, ("metadata", "annotations"), {ACTED: note})
        is_annotation = lever.path[0] == "metadata"  # of a notebook; its value is a time, as Kubeflow's own UI sets it
        _set_at(change, lever.path, note.split()[1] if is_annotation else lever.value)
        return self._send(lever.place, change, **options)

    def _send(self, place: tuple[str, str, str, str, str], change: Json, **options: Any) -> Json:
        patch = self._api.custom.patch_namespaced_custom_object
        return self._api.call(patch, *place, change, _content_type=PATCH, field_manager=FIELD_MANAGER, **options)

    def _read(self, reference: Reference, namespace: str) -> Json | None:
        try:
            place = self._place(reference, namespace)
            return self._api.call(self._api.custom.get_namespaced_custom_object, *place)
        except MarkError as exc:
            if exc.result == "replaced":
                return None
            raise

    def _place(self, reference: Reference, namespace: str) -> tuple[str, str, str, str, str]:
        group, version, kind, name, _ = reference
        plural = self._owners.kinds.plural(f"{group}/{version}", kind)
        if not plural:
            raise MarkError("error", f"{reference.title}: the API server no longer serves this kind")
        return group, version, namespace, plural, name


def _setting(entry: Entry) -> tuple[tuple[str, ...], Any]:
    """The path and the new value of the field that an action sets."""
    if entry.verb == DEACTIVATE:
        return ("spec", "active"), False
    path = SHAPES[entry.target.group, entry.target.kind].rest
    return path, True


def _is_set(found: Json, path: Sequence[str], value: Any) -> bool:
    place: Any = found
    for key in path:
        place = place.get(key) if isinstance(place, dict) else None
    return place is not None if path[0] == "metadata" else place is value


def _set_at(change: Json, path: Sequence[str], value: Any) -> None:
    """Sets one value within nested objects. All other values remain."""
    for key in path[:-1]:
        change = change.setdefault(key, {})
    change[path[-1]] = value
