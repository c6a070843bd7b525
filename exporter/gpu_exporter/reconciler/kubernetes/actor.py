"""Suspends Jobs and similar objects, deactivates Kueue's Workloads, and stops notebooks, each with one patch.

The patch carries the UID and the resourceVersion that were read. So the API server refuses the patch if the object has
changed since then: by an owner's wish, by another controller, or by a new object with the same name. A controller may
write a heartbeat at any moment. So after a refusal, the object is read again, and if nothing relevant has changed, the
patch is sent with the new resourceVersion.

The patch sets the field of the action and the annotation `acted`. It is first sent as a dry run: if the definition of a
kind drops the field, the API server would accept the patch and set only the annotation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpu_exporter.common.clock import Clock
from gpu_exporter.common.config.defaults import Policy
from gpu_exporter.common.plain import REASON_MAX, one_line
from gpu_exporter.reconciler.actor import DONE, GONE, NOT_DONE, Entry
from gpu_exporter.reconciler.decision.surroundings import Reference
from gpu_exporter.reconciler.decision.target import Target
from gpu_exporter.reconciler.kubernetes.checks import Resources
from gpu_exporter.reconciler.kubernetes.client.api import Api, Json
from gpu_exporter.reconciler.kubernetes.events import EventWriter
from gpu_exporter.reconciler.kubernetes.owners import Link, Owners
from gpu_exporter.reconciler.kubernetes.shapes import DEACTIVATE, SHAPES, STOP, SUSPEND
from gpu_exporter.reconciler.kubernetes.targets import ACTED, SCHEDULER, Lever, TargetReader, depends_on
from gpu_exporter.reconciler.marks import MarkError, Refused, timestamp

FIELD_MANAGER = "gpu-exporter-reconciler-actions"
PATCH = "application/merge-patch+json"
AGAIN_S = 2.0  # seconds for reading an object again
PATCHES_MAX = 20  # of one action: an object that is written a hundred times a second refuses about every second patch
EVENTS = {SUSPEND: "GpuSuspended", DEACTIVATE: "GpuDeactivated", STOP: "GpuStopped"}


class PodActor:
    """Acts on the controllers of pods through one API server."""

    scheduler = SCHEDULER

    def __init__(self, api: Api, policy: Policy, clock: Clock, resources: Resources, instance: str = "") -> None:
        self._api = api
        self._clock = clock
        self._owners = Owners(api, clock)
        self._reader = TargetReader(api, policy, clock, self._owners, resources)
        self._events = EventWriter(api, instance)

    def read(self, reference: Reference, namespace: str, verbs: Sequence[str], idle_s: float, wall: float) -> Target:
        return self._reader.read(reference, namespace, verbs, idle_s, wall)

    def rehearse(self, target: Target) -> None:
        lever: Lever = target.live
        would = self._patch(lever, f"{target.verb} soon", dry_run="All")
        if not _is_set(would, lever.path, lever.value):
            field = ".".join(lever.path)
            raise Refused("refused", f"the API server drops {field} of {lever.kind}: this kind has no such field")

    def open_entry(self, target: Target, ident: str, wall: float) -> Entry:
        lever: Lever = target.live
        note = f"{target.verb} {timestamp(wall)} {ident}"
        where = target.reference, lever.reference
        return Entry(ident, wall, self.scheduler, target.namespace, target.verb, *where, note, undo=target.undo)

    def act(self, target: Target, entry: Entry) -> None:
        """Suspends, deactivates or stops the target: see Actor.act."""
        self._patch(target.live, entry.note)

    def look(self, entry: Entry) -> str:
        found = self._read(entry.lever, entry.namespace)
        if found is None or found["metadata"]["uid"] != entry.lever.uid:
            return GONE
        return DONE if _is_set(found, *_setting(entry)) else NOT_DONE

    def read_left(self, entry: Entry) -> str:
        for ended in entry.ends:
            try:
                metadata = self._api.read_metadata(entry.namespace, ended.name)
            except MarkError as exc:
                if exc.result == "replaced":
                    continue
                raise
            if metadata.get("uid") == ended.incarnation:
                return _describe_left(ended.name, metadata)
        return ""

    def tell(self, entry: Entry, text: str) -> None:
        target = entry.target
        regarding = {
            "apiVersion": f"{target.group}/{target.version}",
            "kind": target.kind,
            "namespace": entry.namespace,
            "name": target.name,
            "uid": target.uid,
        }
        note = f"{text}. To resume it: {entry.undo}. No further action follows while it has the annotation {ACTED}"
        self._events.record_once(regarding, entry.wall, EVENTS[entry.verb], note, entry.ident)
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
        """Patches the lever. Raises MarkError `conflict` if anything has changed on which the action depends."""
        first = depends_on(lever.found)
        for left in reversed(range(PATCHES_MAX)):
            try:
                return self._patch_once(lever, note, **options)
            except MarkError as exc:
                if exc.result != "conflict" or not left:
                    raise
                lever = lever._replace(found=self._read_again(lever, exc))
                if depends_on(lever.found) != first:
                    raise
        raise AssertionError("unreachable")

    def _read_again(self, lever: Lever, conflict: MarkError) -> Json:
        """Returns the present lever, as TargetReader does. Raises MarkError, `conflict` if it is gone or unreadable."""
        group, version, namespace, _, name = lever.place
        link = Link(f"{group}/{version}", lever.kind, name, lever.reference.uid)
        found = self._owners.look(namespace, self._clock.monotonic() + AGAIN_S).read(link)
        if not isinstance(found, dict):
            raise conflict
        return found

    def _patch_once(self, lever: Lever, note: str, **options: Any) -> Json:
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


def _describe_left(name: str, metadata: Json) -> str:
    if not (since := metadata.get("deletionTimestamp")):
        return f"no controller has deleted pod {name}"
    finalizers = metadata.get("finalizers")
    waits = f"; it has the finalizers {finalizers}" if finalizers else ""
    return one_line(f"pod {name} was to end by {since}, and still exists{waits}", REASON_MAX)


def _setting(entry: Entry) -> tuple[tuple[str, ...], Any]:
    """Returns the path and the new value of the field that an action sets."""
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
