"""Who controls a pod, from its own controller up to the top, read from the API server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from gpu_exporter.reconciler.kubernetes.api import Api, Json
from gpu_exporter.reconciler.marks import MarkError

DEPTH_MAX = 8  # LeaderWorkerSet, StatefulSet, Pod, StatefulSet, Pod is the longest chain that is known
# Owners that hold what does not change for an owner's life, so that siblings in a gang cost one request each.
PARENTS_MAX = 20_000
KEPT = ("name", "uid", "labels", "annotations", "managedFields", "creationTimestamp", "ownerReferences")


class Owner(NamedTuple):
    """A controller. `wanted`: pods that it keeps running at once, where it says so; None where it does not."""

    api_version: str
    kind: str
    metadata: Mapping[str, Any]
    wanted: int | None = None

    @property
    def title(self) -> str:
        """As people and consumers name it: batch/v1/Job/train."""
        return f"{self.api_version}/{self.kind}/{self.metadata['name']}"


def controller_of(metadata: Mapping[str, Any]) -> Json | None:
    """The reference to the one owner that controls an object; None where there is none."""
    return next((ref for ref in metadata.get("ownerReferences") or () if ref.get("controller")), None)


def trim(metadata: Mapping[str, Any]) -> Json:
    """The metadata that is looked at."""
    return {key: metadata[key] for key in KEPT if key in metadata}


class Owners:
    """The controllers of one API server's objects. Requests raise MarkError."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._plurals: dict[str, dict[str, str]] = {}
        self._parents: dict[str, Json | None] = {}

    def chain(self, namespace: str, metadata: Mapping[str, Any], known: dict[str, Owner | None]) -> list[Owner]:
        """The controllers above an object, nearest first.

        `known`: owners by UID that were read a moment ago; what is read is added. An owner that is gone ends the chain.
        """
        owners: list[Owner] = []
        reference = controller_of(metadata)
        while reference is not None and len(owners) < DEPTH_MAX:
            uid = str(reference.get("uid"))
            if uid not in known:
                known[uid] = self._read(namespace, reference)
            owner = known[uid]
            if owner is None:
                break
            owners.append(owner)
            reference = controller_of(owner.metadata)
        return owners

    def ancestry(self, namespace: str, metadata: Mapping[str, Any]) -> list[Json]:
        """References to the controllers above an object, nearest first: who they are, and not what they say now."""
        references: list[Json] = []
        reference = controller_of(metadata)
        while reference is not None and len(references) < DEPTH_MAX:
            references.append(reference)
            uid = str(reference.get("uid"))
            if uid not in self._parents:
                owner = self._read(namespace, reference)
                self._remember(uid, owner)
            reference = self._parents[uid]
        return references

    def _remember(self, uid: str, owner: Owner | None) -> None:
        if len(self._parents) >= PARENTS_MAX:
            self._parents.clear()
        self._parents[uid] = None if owner is None else controller_of(owner.metadata)

    def _read(self, namespace: str, reference: Json) -> Owner | None:
        """The object that a reference means; None when it is gone, or is not of this namespace."""
        version, kind, name = (str(reference.get(key, "")) for key in ("apiVersion", "kind", "name"))
        group, slash, release = version.partition("/")
        place = f"{version}/{kind}/{name}"
        found: Json | None
        try:
            if not slash:  # of the core group, ReplicationControllers and Pods control pods
                found = self._read_core(namespace, kind, name)
            else:
                plural = self.plural(version, kind)
                custom = self._api.custom
                what = (group, release, namespace, plural, name)
                found = self._api.call(custom.get_namespaced_custom_object, *what) if plural else None
        except MarkError as exc:
            if exc.result == "replaced":
                return None
            raise MarkError(
                exc.result,
                f"{place} cannot be read ({exc}); the reconciler needs `get` on it, in the chart "
                "reconciler.ownerResources",
            ) from exc
        if not found or found["metadata"]["uid"] != reference.get("uid"):
            return None
        owner = Owner(version, kind, trim(found["metadata"]), pods_wanted(kind, found))
        self._remember(str(reference.get("uid")), owner)
        return owner

    def _read_core(self, namespace: str, kind: str, name: str) -> Json | None:
        core = self._api.core
        reads = {"Pod": core.read_namespaced_pod, "ReplicationController": core.read_namespaced_replication_controller}
        return self._api.call(reads[kind], name, namespace) if kind in reads else None

    def plural(self, version: str, kind: str) -> str:
        """The resource of a kind, as the API server says; "" for a kind that is not namespaced or not there."""
        if version not in self._plurals:
            listed = self._api.call(self._api.custom.get_api_resources, *version.split("/"))
            self._plurals[version] = {
                each["kind"]: each["name"]
                for each in listed.get("resources") or ()
                if each.get("namespaced") and "/" not in each["name"]
            }
        return self._plurals[version].get(kind, "")


def pods_wanted(kind: str, found: Json) -> int | None:
    """Pods that a Job or StatefulSet keeps running at once; None for other kinds, which have templates of their own."""
    spec, status = found.get("spec") or {}, found.get("status") or {}
    if kind == "StatefulSet":
        return int(spec.get("replicas", 1))
    if kind == "Job" and "parallelism" in spec:
        left = spec.get("completions")
        running = int(spec["parallelism"])
        return running if left is None else min(running, int(left) - int(status.get("succeeded", 0)))
    return None
