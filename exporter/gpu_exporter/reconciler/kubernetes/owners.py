"""Finds the controllers of a pod, from its own controller up to the top, if the API server confirms them.

Users can write any owner reference on their objects, and the API server does not check it. So a reference counts only
if its object was read in the same namespace and has the UID of the reference. An object is gone only if the API server
answers 404 and names it. After any other failure, it is unreadable.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

from gpu_exporter.common.clock import Clock
from gpu_exporter.common.outside import COUNT_MAX, count_indexes, need_whole, object_name
from gpu_exporter.common.plain import shorten
from gpu_exporter.reconciler.kubernetes.client.api import Api, Json, OddAnswer
from gpu_exporter.reconciler.kubernetes.client.keys import COUNTED
from gpu_exporter.reconciler.kubernetes.client.lean import TEXT_MAX, Room, trim_controller, weigh
from gpu_exporter.reconciler.kubernetes.client.stream import MALFORMED, REASONS
from gpu_exporter.reconciler.marks import MarkError

DEPTH_MAX = 8  # the longest known chain is LeaderWorkerSet, StatefulSet, Pod, StatefulSet, Pod
# Remembered parents of owners. They do not change while the owner lives, so a gang of thousands needs one request.
PARENTS_MAX = 20_000
READS_MAX = 200  # per namespace and look, so that references made up by a tenant cannot use up the cycle
DISCOVERIES_MAX = 10  # groups and versions per namespace and look, for the same reason
KINDS_KEEP_S = 600.0  # later, a definition may have been installed, or may no longer serve a version
LOOK_MAX = 8 * 1024 * 1024  # approximate bytes of memory for the owners that one look reads
FORBIDDEN, KIND, LIMIT, FAILED = ("forbidden", "kind", "limit", "failed")
UNREAD = (FORBIDDEN, KIND, LIMIT, FAILED, *REASONS)
# Valid words of a reference, as the API server allows them. They are used in paths and are printed.
GROUP = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
VERSION = re.compile(r"[a-z0-9]{1,63}")
WORD = re.compile(r"[A-Za-z][A-Za-z0-9-]{0,62}")
NO_KINDS: Mapping[str, str] = {}
# Conditions of a Job that starts no more pods (k8s.io/api/batch/v1). The last two are set before its pods have ended.
JOB_ENDS = frozenset(("Complete", "Failed", "SuccessCriteriaMet", "FailureTarget"))


class Link(NamedTuple):
    """The reference to the controller of an object, as the object contains it. It is not verified."""

    api_version: str
    kind: str
    name: str
    uid: str

    @property
    def title(self) -> str:
        """The title for people: batch/v1/Job/train."""
        return f"{self.api_version}/{self.kind}/{self.name}"

    @property
    def group(self) -> str:
        """The API group, "" for the core."""
        return self.api_version.rpartition("/")[0]

    @property
    def is_possible(self) -> bool:
        """Whether the object can exist: API version, kind and name are valid, and the UID is set."""
        group, slash, version = self.api_version.rpartition("/")
        is_version = VERSION.fullmatch(version) and (not slash or GROUP.fullmatch(group))
        return bool(is_version and WORD.fullmatch(self.kind) and object_name(self.name) and self.uid)


class Owner(NamedTuple):
    """A controller that was read. `wanted`: how many pods it keeps running at a time; None if this is unknown."""

    link: Link
    metadata: Mapping[str, Any]
    wanted: int | None = None

    @property
    def kind(self) -> str:
        return self.link.kind

    @property
    def group(self) -> str:
        """The API group, "" for the core."""
        return self.link.group

    @property
    def title(self) -> str:
        """The title for people: batch/v1/Job/train."""
        return self.link.title


class Unread(NamedTuple):
    """A controller that could not be read. `reason`: one of UNREAD. `why`: the same in a sentence, with the remedy."""

    link: Link
    reason: str
    why: str


class Chain(NamedTuple):
    """The controllers above an object, nearest first. `unread`: the next controller, if it could not be read."""

    owners: tuple[Owner, ...] = ()
    unread: Unread | None = None


def controller_of(metadata: Mapping[str, Any]) -> Link | None:
    """Returns the reference to the controller of an object; None if it has no controller."""
    for reference in rows_of(metadata, "ownerReferences"):
        if reference.get("controller"):
            return Link(
                *(shorten(str(reference.get(key) or ""), TEXT_MAX) for key in ("apiVersion", "kind", "name", "uid"))
            )
    return None


def has_pods_above(metadata: Mapping[str, Any]) -> bool:
    """Returns whether an object names a pod as an owner."""
    return any(each.get("kind") == "Pod" for each in rows_of(metadata, "ownerReferences"))


def pods_above(metadata: Mapping[str, Any]) -> frozenset[str]:
    """UIDs of all pods that an object names as owners, controllers or not. The object is deleted with these pods."""
    references = rows_of(metadata, "ownerReferences")
    return frozenset(str(each.get("uid") or "") for each in references if each.get("kind") == "Pod") - {""}


class Kinds:
    """The namespaced kinds that one API server serves. Requests raise MarkError."""

    def __init__(self, api: Api, clock: Clock) -> None:
        self._api = api
        self._clock = clock
        self._tables: dict[str, tuple[float, Mapping[str, str]]] = {}  # by group and version: when read, and resources
        self._preferred: tuple[float, Mapping[str, str]] | None = None

    def known(self, version: str) -> Mapping[str, str] | None:
        """Returns the resources of a group and version, by kind; None if they were not requested recently."""
        table = self._tables.get(version)
        return table[1] if table is not None and self._is_fresh(table[0]) else None

    def ask(self, version: str) -> Mapping[str, str]:
        """Requests the resources of a group and version now, by kind; empty if the API server does not serve it."""
        try:
            listed = self._api.call(self._api.custom.get_api_resources, *version.split("/"))
        except MarkError as exc:
            if exc.status == 404:
                return NO_KINDS
            raise
        table = {
            each["kind"]: each["name"]
            for each in rows_of(listed, "resources")
            if each.get("namespaced") and is_texts(each, "kind", "name") and "/" not in each["name"]
        }
        self._tables[version] = self._clock.monotonic(), table
        return table

    def plural(self, version: str, kind: str) -> str:
        """Returns the resource of a kind; "" if the API server does not serve the kind."""
        known = self.known(version)
        return (known if known is not None and kind in known else self.ask(version)).get(kind, "")

    def preferred(self, group: str) -> str:
        """Returns the preferred version of a group, as group/version; "" if the API server does not serve the group."""
        if self._preferred is None or not self._is_fresh(self._preferred[0]):
            groups = rows_of(self._api.call(self._api.groups.get_api_versions), "groups")
            found = {
                each["name"]: each["preferredVersion"]["groupVersion"]
                for each in groups
                if is_texts(each, "name") and is_texts(each.get("preferredVersion"), "groupVersion")
            }
            self._preferred = self._clock.monotonic(), found
        return self._preferred[1].get(group, "")

    def _is_fresh(self, when: float) -> bool:
        return self._clock.monotonic() - when < KINDS_KEEP_S


def rows_of(answer: Any, key: str) -> list[Json]:
    """Returns the JSON objects in a list; other values are skipped."""
    rows = answer.get(key) if isinstance(answer, dict) else None
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def is_texts(value: Any, *keys: str) -> bool:
    """Returns whether a value is an object with a text at each of these keys."""
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in keys)


Parents: TypeAlias = dict[tuple[str, Link], Link | None]


class Owners:
    """The controllers of one API server's objects."""

    def __init__(self, api: Api, clock: Clock) -> None:
        self._api = api
        self._clock = clock
        self.kinds = Kinds(api, clock)
        self._parents: Parents = {}

    def look(self, namespace: str, until: float = math.inf) -> OwnerLook:
        """Begins to read the owners in one namespace. After `until` (monotonic seconds) nothing more is read."""
        if len(self._parents) >= PARENTS_MAX:
            self._parents = {}
        return OwnerLook(self._api, self._clock, self.kinds, namespace, self._parents, until)


class OwnerLook:
    """One reading of the owners in one namespace. Reads each owner once, within the limits.

    Answers are kept, so only the next reading finds a kind that is installed later. `place` raises MarkError for any
    failed request; the other calls raise it only if the API server throttles (429).
    """

    def __init__(self, api: Api, clock: Clock, kinds: Kinds, namespace: str, parents: Parents, until: float) -> None:
        """`parents`: controllers of owners that were read before, by namespace and reference."""
        self._api = api
        self._clock = clock
        self._kinds = kinds
        self._namespace = namespace
        self._parents = parents
        self._until = until
        self.unread: Unread | None = None
        """The first controller that `ancestry` could not read although it may exist."""
        self._read: dict[Link, Json | Unread | None] = {}
        self._tables: dict[str, Mapping[str, str]] = {}  # resources that were asked for in this look
        self._reads_left, self._discoveries_left = READS_MAX, DISCOVERIES_MAX
        self._room = Room(LOOK_MAX, f"all owners of this namespace together are larger than {LOOK_MAX // 2**20} MiB")

    def chain(self, metadata: Mapping[str, Any]) -> Chain:
        """Returns the controllers above an object, as they are now. The chain ends at a controller that is gone."""
        owners: list[Owner] = []
        link = controller_of(metadata)
        while link is not None and len(owners) < DEPTH_MAX:
            found = self.read(link)
            if isinstance(found, Unread):
                return Chain(tuple(owners), found)
            if found is None:
                break
            try:
                wanted = pods_wanted(link.kind, found)
            except ValueError as exc:
                return Chain(tuple(owners), Unread(link, MALFORMED, f"{link.title} cannot be parsed: {exc}"))
            owners.append(Owner(link, found["metadata"], wanted))
            link = controller_of(found["metadata"])
        return Chain(tuple(owners))

    def ancestry(self, metadata: Mapping[str, Any]) -> list[Link]:
        """References to the controllers above an object, nearest first, without their present content.

        The last reference may be unverified, because its object is gone or could not be read.
        """
        links: list[Link] = []
        link = controller_of(metadata)
        while link is not None and len(links) < DEPTH_MAX:
            links.append(link)
            above = self.parent(link)
            if isinstance(above, Unread):
                self.unread = self.unread or (above if above.reason != KIND else None)
                break
            link = above
        return links

    def parent(self, link: Link) -> Link | Unread | None:
        """Returns the reference to an owner's controller; None without a controller, or if the owner is gone."""
        place = self._namespace, link
        if place in self._parents:
            return self._parents[place]
        found = self.read(link)
        return controller_of(found["metadata"]) if isinstance(found, dict) else found

    def place(self, link: Link) -> tuple[str, str, str, str] | Unread:
        """Group, version, namespace and resource for reading an owner. Raises MarkError."""
        return self._find(link)

    def read(self, link: Link) -> Json | Unread | None:
        """Returns the object of a reference; None if it is gone, or is not in this namespace."""
        if link not in self._read:
            found = self._ask(link)
            self._read[link] = found
            if isinstance(found, dict):
                self._parents[self._namespace, link] = controller_of(found["metadata"])
        return self._read[link]

    def _ask(self, link: Link) -> Json | Unread | None:
        try:
            found = self._fetch(link)
        except MarkError as exc:
            if exc.result == "replaced":
                return None
            if exc.result == "throttled":
                raise
            if exc.status == 403:
                remedy = "the reconciler needs `get` on it (chart: reconciler.ownerResources)"
                return Unread(link, FORBIDDEN, f"{link.title} cannot be read ({exc}); {remedy}")
            reason = exc.reason if isinstance(exc, OddAnswer) else FAILED
            return Unread(link, reason, f"{link.title} cannot be read ({exc})")
        return None if isinstance(found, dict) and found["metadata"].get("uid") != link.uid else found

    def _fetch(self, link: Link) -> Json | Unread:
        """Reads the object of a reference, without its pod templates. Raises MarkError."""
        if not link.is_possible:
            return Unread(link, KIND, "its owner reference names an object that cannot exist")
        if link.group:
            place = self._find(link)
            if isinstance(place, Unread):
                return place
            function: Any = self._api.custom.get_namespaced_custom_object
            what: tuple[str, ...] = (*place, link.name)
        elif (own := self._core().get(link.kind)) is not None:
            function, what = own, (link.name, self._namespace)
        else:
            return Unread(link, KIND, f"{link.title}: objects of this kind control no pods")
        if self._reads_left <= 0 or self._clock.monotonic() > self._until:
            return Unread(
                link,
                LIMIT,
                (
                    f"{link.title} was not read: the reconciler reads at most {READS_MAX} owners of a "
                    "namespace, within a time limit"
                ),
            )
        self._reads_left -= 1
        is_counted = (link.group, link.kind) in COUNTED

        def keep(found: Json) -> Json:
            kept = trim_controller(found, is_counted=is_counted)
            self._room.take(weigh(kept))
            return kept

        return self._api.call(function, *what, keep=keep)

    def _core(self) -> Mapping[str, Any]:
        """Returns the kinds of the core group that control pods, each with the function that reads it."""
        core = self._api.core
        return {"Pod": core.read_namespaced_pod, "ReplicationController": core.read_namespaced_replication_controller}

    def _find(self, link: Link) -> tuple[str, str, str, str] | Unread:
        """Group, version, namespace and resource for reading an owner.

        If the API server no longer serves the version in the reference, its preferred version is used. Raises
        MarkError.
        """
        versions = [link.api_version]
        for version in versions:
            table = self._kinds.known(version) or {}
            if link.kind not in table:  # it may have been installed since
                asked = self._discover(version)
                if asked is None:
                    limit = f"the limit of {DISCOVERIES_MAX} API groups and versions per namespace"
                    return Unread(link, LIMIT, f"{link.title} was not read because of {limit}")
                table = asked
            if link.kind in table:
                group, _, release = version.partition("/")
                return group, release, self._namespace, table[link.kind]
            other = self._kinds.preferred(link.group)
            if len(versions) == 1 and other not in ("", version):
                versions.append(other)
        return Unread(link, KIND, f"{link.title}: the API server serves no such namespaced kind")

    def _discover(self, version: str) -> Mapping[str, str] | None:
        """Returns the resources of a group and version, requested once; None above the limit. Raises MarkError."""
        if version not in self._tables:
            if self._discoveries_left <= 0:
                return None
            self._discoveries_left -= 1
            self._tables[version] = self._kinds.ask(version)
        return self._tables[version]


def pods_wanted(kind: str, found: Json) -> int | None:
    """Returns how many pods a Job or StatefulSet keeps running at a time; None if unspecified, and for other kinds.

    Raises ValueError if the number is invalid, because members may then be missing.
    """
    spec, status = found.get("spec") or {}, found.get("status") or {}
    if kind == "StatefulSet":
        return need_whole(spec.get("replicas", 1), COUNT_MAX)
    if kind != "Job" or "parallelism" not in spec:
        return None
    conditions = rows_of(status, "conditions")
    if any(each.get("type") in JOB_ENDS and each.get("status") == "True" for each in conditions):
        return 0
    running, ended = (need_whole(each, COUNT_MAX) for each in (spec["parallelism"], status.get("succeeded") or 0))
    if spec.get("completions") is None:  # a work queue: once a pod has succeeded, no other pod is started
        active = need_whole(status.get("active") or 0, COUNT_MAX)
        return running if not ended else min(running, active)
    given_up = count_indexes(status.get("failedIndexes") or "")
    if given_up is None:
        raise ValueError("its failed indexes are not a list of numbers")
    return max(0, min(running, need_whole(spec["completions"], COUNT_MAX) - ended - given_up))
