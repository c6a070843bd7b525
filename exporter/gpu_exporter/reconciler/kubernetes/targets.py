"""Reads the target of an action, and all pods that the action would end, from one list of the pods in its namespace.

A pod is a member if its chain of controllers was read and fits the shape of the target's kind. A pod whose controller's
kind is not in the shape is no member: the action does not end it, and its controllers are not read.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from gpu_exporter.common.clock import Clock
from gpu_exporter.common.config.defaults import Policy
from gpu_exporter.common.outside import parse_timestamp
from gpu_exporter.reconciler.decision.surroundings import Reference
from gpu_exporter.reconciler.decision.target import Part, Skipped, Target
from gpu_exporter.reconciler.evidence.records import HolderName
from gpu_exporter.reconciler.kubernetes.around.optouts import Place, read_wish
from gpu_exporter.reconciler.kubernetes.checks import Resources
from gpu_exporter.reconciler.kubernetes.client.api import Api, Budget, Json, OddAnswer
from gpu_exporter.reconciler.kubernetes.client.keys import QUEUE, STOPPED
from gpu_exporter.reconciler.kubernetes.client.lean import is_read, trim, trim_controller, weigh
from gpu_exporter.reconciler.kubernetes.client.namespace import (
    ALIVE,
    LARGE_MAX,
    VIEW_MAX,
    PodView,
    has_ended,
    holds_gpus,
    view_pod,
)
from gpu_exporter.reconciler.kubernetes.gangs import Key, group_keys
from gpu_exporter.reconciler.kubernetes.owners import (
    Link,
    OwnerLook,
    Owners,
    Unread,
    controller_of,
    has_pods_above,
    pods_above,
)
from gpu_exporter.reconciler.kubernetes.shapes import (
    DEACTIVATE,
    SHAPES,
    STOP,
    Found,
    Shape,
    Wanted,
)
from gpu_exporter.reconciler.marks import EXEMPT_UNTIL, PREFIX, MarkError, Refused

SCHEDULER = "kubernetes"
ACTED = PREFIX + "acted"
MANAGED = "managedFields"
WORKLOAD_OF = "kueue.x-k8s.io/job-uid"  # label of Kueue's Workload: the UID of the object that it was created for
KUEUE, WORKLOADS = "kueue.x-k8s.io", "workloads.kueue.x-k8s.io"
NOT_DEACTIVATED = "Kueue manages it, and actions.kinds does not list deactivate"
WITHIN_S = 10.0  # for the list and the owners
LIST_MAX = 256 * 1024 * 1024  # bytes: 40,000 pods of 6 kB
# Values of `managedBy` that mean the object's own controller.
MANAGERS = (
    "",
    "kubernetes.io/job-controller",
    "jobset.sigs.k8s.io/jobset-controller",
    "kubeflow.org/training-operator",
    "kubeflow.org/mpi-operator",
)


class Lever(NamedTuple):
    """The object that an action patches.

    `place`: group, version, namespace, plural and name. `found`: the object as it was read. `path`, `value`: the field
    that the action sets, and its new value.
    """

    place: tuple[str, str, str, str, str]
    kind: str
    found: Json
    path: tuple[str, ...]
    value: Any

    @property
    def reference(self) -> Reference:
        group, version, _, _, name = self.place
        return Reference(group, version, self.kind, name, str(self.found["metadata"]["uid"]))


class _Pods(NamedTuple):
    """The pods of a namespace that may be related to a target."""

    own: list[PodView]  # controlled by the target itself
    below: dict[Link, list[PodView]]  # by their controller, whose kind may be between the target and its pods
    loose: list[PodView]  # without a controller
    others: list[PodView]  # with GPUs and another controller
    dependents: list[tuple[PodView, frozenset[str]]]  # pods that name pods as owners, with the UIDs of these owners
    odd: list[str]  # pods that are malformed or too large, with the reason


class TargetReader:
    """Reads targets from one API server."""

    def __init__(self, api: Api, policy: Policy, clock: Clock, owners: Owners, resources: Resources) -> None:
        self._api = api
        self._policy = policy
        self._clock = clock
        self._owners = owners
        self._resources = resources

    def read(self, reference: Reference, namespace: str, verbs: Sequence[str], idle_s: float, wall: float) -> Target:
        until = self._clock.monotonic() + WITHIN_S
        look = self._owners.look(namespace, until)
        link = Link(f"{reference.group}/{reference.version}", reference.kind, reference.name, reference.uid)
        found, shape = look.read(link), SHAPES[link.group, link.kind]
        if fault := self._api.clock_fault:
            raise MarkError("error", fault)
        if found is None:
            raise Refused("replaced", f"{reference.title} is gone, or another object has its name")
        if isinstance(found, Unread):
            raise Refused("unread", found.why)
        metadata = found["metadata"]
        try:
            pods = self._list(namespace, link, shape, until)
        except MarkError as exc:
            if exc.result != "size":
                raise
            raise Refused("size", f"the reconciler cannot check the pods of {namespace} before it acts: {exc}") from exc
        members, between, strangers, unread = self._sort(pods, look, link, shape, found)
        lever, obstacle = None, _obstacle(found, reference.title)
        if obstacle is None:
            lever, obstacle = self._lever(look, link, shape, found, verbs)
        wish = read_wish([Place("owner", reference.title, metadata)], self._policy, wall)
        own = Place("owner", reference.title, metadata)
        notes = [(each.get("annotations") or {}).get(ACTED, "") for each in (metadata, _metadata(lever))]
        ends = tuple(self._part(pod, shape, owner, namespace, idle_s, wall) for owner, pod in members)
        verb = shape.verbs[0] if lever is None or lever.kind == link.kind else DEACTIVATE
        if lever is not None and lever.kind == link.kind:
            reference = lever.reference  # with the version that the API server serves
        return Target(
            reference,
            namespace,
            verb,
            ends,
            _wants(shape, Found(found, between)),
            tuple(strangers),
            tuple(unread),
            _above(found, reference.title),
            _wish_text(wish.exemption.why if wish.exemption is not None else wish.ceiling, wish.idle_after_s, idle_s),
            own.labelled_class,
            next(filter(None, notes), ""),
            obstacle,
            _undo(verb, lever) if lever is not None else "",
            lever,
        )

    def _list(self, namespace: str, link: Link, shape: Shape, until: float) -> _Pods:
        """Lists the pods of the namespace, and keeps those that may be related to the target. Raises MarkError."""
        kept = _Pods([], {}, [], [], [], [])
        left_out: dict[str, tuple[str, str]] = {}
        left = VIEW_MAX
        listed = self._api.pages(
            self._api.core.list_namespaced_pod,
            namespace,
            kind="Pod",
            keep=lambda pod: self._trim_pod(pod, link, shape),
            odd=lambda name, reason, why: left_out.update({name.rpartition("/")[2]: (reason, why)}),
            most=Budget(LIST_MAX, until, self._clock),
            field_selector=ALIVE,
        )
        for entry in itertools.chain(listed, self._large_pods(namespace, left_out)):
            if entry is None:
                continue
            owner, view = entry
            left -= weigh(entry)
            if left < 0:
                raise MarkError("size", f"the pod list needs over {VIEW_MAX // 2**20} MiB of the reconciler's memory")
            if above := pods_above(view.metadata):
                kept.dependents.append((view, above))
            is_near = owner is None or owner.uid == link.uid or (owner.group, owner.kind) in shape.between
            if view.odd is not None and (is_near or above):
                kept.odd.append(f"pod {_name(view)}: {view.odd[1]}")
            if owner is None:
                kept.loose.append(view)
            elif owner.uid == link.uid:
                kept.own.append(view)
            elif is_near:
                kept.below.setdefault(owner, []).append(view)
            elif view.gpus != 0:
                kept.others.append(view)
        kept.odd.extend(f"pod {name or 'without a name'}: {why}" for name, (_, why) in left_out.items())
        return kept

    def _large_pods(
        self, namespace: str, left_out: dict[str, tuple[str, str]]
    ) -> Iterator[tuple[Link | None, PodView]]:
        """Yields the metadata of pods that are malformed or too large. Removes each yielded pod from `left_out`."""
        for name, (reason, why) in list(left_out.items())[:LARGE_MAX]:
            if name:
                try:
                    metadata = self._api.read_metadata(namespace, name)
                except MarkError as exc:
                    if exc.result == "replaced":  # it has ended since the list
                        del left_out[name]
                    continue
                del left_out[name]
                yield controller_of(metadata), PodView(trim(metadata), None, "", "", (reason, why))

    def _trim_pod(self, pod: Json, link: Link, shape: Shape) -> tuple[Link | None, PodView] | None:
        """Returns a pod with the reference to its controller; None for a pod that cannot be related to the target."""
        if has_ended(pod):
            return None
        metadata = pod["metadata"]
        owner = controller_of(metadata)
        is_near = owner is None or owner.uid == link.uid or (owner.group, owner.kind) in shape.between
        is_kept = is_near or has_pods_above(metadata) or holds_gpus(pod, self._resources)
        return (owner, view_pod(pod, self._resources)) if is_kept else None

    def _sort(
        self, pods: _Pods, look: OwnerLook, link: Link, shape: Shape, found: Json
    ) -> tuple[list[tuple[Json, PodView]], dict[str, Json], list[str], list[str]]:
        """Sorts the pods. Returns the members, each with its controller; the objects between members and target, by
        UID; strangers; and unread objects.
        """
        members: list[tuple[Json, PodView]] = []
        between: dict[str, Json] = {}
        strangers: list[str] = []
        unread: list[str] = [*pods.odd]
        if () in shape.chains:
            members += [(found, pod) for pod in pods.own]
        else:
            strangers += [
                f"{_name(pod)} belongs to the target in a way that the reconciler does not support" for pod in pods.own
            ]
        for owner, below in sorted(pods.below.items()):
            parent = look.parent(owner)
            if isinstance(parent, Unread):
                unread.append(f"{_name(below[0])}: {parent.why}")
            elif parent is not None and parent.uid == link.uid:
                # It may have changed since it was read for a mark, so it is read again.
                intermediate = look.read(owner)
                if isinstance(intermediate, dict):
                    between[owner.uid] = intermediate
                    members += [(intermediate, pod) for pod in below]
                elif intermediate is not None:
                    unread.append(f"{_name(below[0])}: {intermediate.why}")
            elif parent is not None and (parent.group, parent.kind, parent.name) == (link.group, link.kind, link.name):
                strangers.append(f"{owner.title} belongs to an earlier object with the target's name")
            elif shape.shares_name and owner.name == link.name:
                strangers.append(f"{owner.title} has the target's name, but does not belong to it")
        whole = Found(found, between)
        strangers += [
            f"{_name(pod)} has no controller, and the target would adopt it"
            for pod in pods.loose
            if shape.adopts(pod.labels, whole)
        ]
        strangers += _below_pods([pod for _, pod in members], pods.dependents)
        keys: set[Key] = set().union(*(group_keys(pod.metadata, ()) for _, pod in members))
        for pod in pods.others:
            if keys.isdisjoint(group_keys(pod.metadata, ())):
                continue
            chain = look.chain(pod.metadata)
            if chain.unread is not None:
                why = f"and the controllers of this pod are unknown: {chain.unread.why}"
                unread.append(f"{_name(pod)} names the same group as a member, {why}")
            elif any(owner.link.uid == link.uid for owner in chain.owners):
                strangers.append(f"{_name(pod)} belongs to the target in a way that the reconciler does not support")
        return members, between, strangers, unread

    def _part(self, pod: PodView, shape: Shape, owner: Json, namespace: str, idle_s: float, wall: float) -> Part:
        own = Place("pod", f"pod {_name(pod)}", pod.metadata)
        wish = read_wish([own], self._policy, wall)
        why = wish.exemption.why if wish.exemption is not None else wish.ceiling
        return Part(
            HolderName(SCHEDULER, namespace, _name(pod)),
            str(pod.metadata["uid"]),
            pod.gpus,
            shape.role(pod.labels, owner["metadata"].get("labels") or {}),
            pod.waits,
            own.labelled_class,
            _wish_text(why, wish.idle_after_s, idle_s),
            parse_timestamp(pod.start) or wall,
            pod.grace_s,
        )

    def _lever(
        self, look: OwnerLook, link: Link, shape: Shape, found: Json, verbs: Sequence[str]
    ) -> tuple[Lever | None, Skipped | None]:
        """Returns the object to patch, or the reason why it cannot be patched."""
        place = look.place(link)
        if isinstance(place, Unread):
            return None, Skipped("unread", place.why)
        own = Lever((*place, link.name), link.kind, found, shape.rest, True)
        if shape.verbs == (STOP,):
            return own, None
        is_queued = QUEUE in (found["metadata"].get("labels") or {})
        if is_queued and DEACTIVATE not in verbs:
            return None, Skipped("kind", NOT_DEACTIVATED)
        version = self._owners.kinds.preferred(KUEUE).rpartition("/")[2]
        if not version:
            if not is_queued:
                return own, None
            return None, Skipped(
                "kueue", f"it has the label {QUEUE}, but the API server does not serve Kueue's Workloads"
            )
        try:
            workloads = self._workloads(version, place[2], link.uid)
        except OddAnswer as exc:
            return None, Skipped("kueue", f"it is unknown whether Kueue manages it: {exc}")
        except MarkError as exc:
            if exc.status != 403:
                raise
            return None, Skipped(
                "kueue", f"it is unknown whether Kueue manages it: the reconciler needs `list` on {WORKLOADS}"
            )
        if not workloads and not is_queued:
            return own, None
        if DEACTIVATE not in verbs:  # Kueue can manage an object without the label too, and would resume it
            return None, Skipped("kind", NOT_DEACTIVATED)
        if len(workloads) != 1:
            which = "it is unknown which Workload has the quota"
            return None, Skipped("kueue", f"Kueue has {len(workloads)} Workloads for it, and {which}")
        (workload,) = workloads
        name = str(workload["metadata"]["name"])
        lever = Lever((KUEUE, version, place[2], "workloads", name), "Workload", workload, ("spec", "active"), False)
        return lever, _obstacle(workload, f"Workload {name}")

    def _workloads(self, version: str, namespace: str, uid: str) -> list[Json]:
        """Kueue's Workloads of an object. Raises MarkError."""
        place = KUEUE, version, namespace, "workloads"
        of_it, left_out = f"{WORKLOAD_OF}={uid}", list[tuple[str, str]]()
        listed = self._api.pages(
            self._api.custom.list_namespaced_custom_object,
            *place,
            kind="Workload",
            keep=lambda found: trim_controller(found, is_counted=True),
            odd=lambda name, reason, why: left_out.append((reason, f"Workload {name}: {why}")),
            label_selector=of_it,
        )
        rows = ((each, controller_of(each["metadata"])) for each in listed)
        found = [each for each, owner in rows if owner is not None and owner.uid == uid]
        if left_out:
            raise OddAnswer(*left_out[0])
        return found


def depends_on(found: Json) -> Json:
    """Returns the parts of a trimmed object on which an action depends. Other parts, such as a heartbeat, may change
    before it.

    The parts: the identity, owners, labels, annotations and spec, and from the status the counts of pods and the
    conditions.
    """
    metadata, status = found["metadata"], found.get("status") or {}
    labels = {key: value for key, value in (metadata.get("labels") or {}).items() if is_read(key)}
    # A wish is as old as the last write of its annotation, so its owner may have renewed it without any other change.
    skipped = (
        {"resourceVersion"} if EXEMPT_UNTIL in (metadata.get("annotations") or {}) else {"resourceVersion", MANAGED}
    )
    conditions = status.get("conditions")
    rows = [row for row in conditions if isinstance(row, dict)] if isinstance(conditions, list) else []
    return {
        "metadata": {key: value for key, value in metadata.items() if key not in skipped} | {"labels": labels},
        "spec": found.get("spec"),
        "counts": _counts({key: value for key, value in status.items() if key != "conditions"}),
        "conditions": sorted((str(row.get("type")), str(row.get("status"))) for row in rows),
    }


def _counts(value: Any) -> Any:
    """Returns a part of a status without its texts, because a text may contain the changing time of a heartbeat."""
    if isinstance(value, dict):
        return {key: _counts(each) for key, each in value.items() if not isinstance(each, str)}
    return [_counts(each) for each in value if not isinstance(each, str)] if isinstance(value, list) else value


def _below_pods(members: Sequence[PodView], dependents: Sequence[tuple[PodView, frozenset[str]]]) -> list[str]:
    """Returns the pods that the garbage collector deletes after the members, as an owner is a pod that ends."""
    ending = {str(pod.metadata["uid"]) for pod in members}
    own, found = frozenset(ending), list[str]()
    left = [(pod, above) for pod, above in dependents if str(pod.metadata["uid"]) not in own]
    while below := [pod for pod, above in left if not ending.isdisjoint(above)]:
        ending.update(str(pod.metadata["uid"]) for pod in below)
        found += [f"{_name(pod)} has a pod of the target as its owner, and would end with it" for pod in below]
        left = [(pod, above) for pod, above in left if str(pod.metadata["uid"]) not in ending]
    return found


def _name(pod: PodView) -> str:
    return str(pod.metadata["name"])


def _metadata(lever: Lever | None) -> Mapping[str, Any]:
    return lever.found["metadata"] if lever is not None else {}


def _wants(shape: Shape, found: Found) -> Wanted:
    return shape.wants(found)


def _wish_text(why: str, idle_after_s: float, idle_s: float) -> str:
    return why or ("its owner asked for a longer idle time" if idle_after_s > idle_s else "")


def _above(found: Json, title: str) -> str:
    """Returns the controller that would undo the action, or that depends on the target, in words; "" for none."""
    owner = controller_of(found["metadata"])
    if owner is not None:
        why = "whose other runs depend on it" if owner.kind == "CronJob" else "which would undo the action"
        return f"{title} belongs to {owner.kind}/{owner.name}, {why}"
    spec = found.get("spec") or {}
    manager = str(spec.get("managedBy") or (spec.get("runPolicy") or {}).get("managedBy") or "")
    return "" if manager in MANAGERS else f"{title} is managed by {manager}"


def _obstacle(live: Json, title: str) -> Skipped | None:
    """Returns why an object cannot be suspended or stopped: it is being deleted, ended or suspended already."""
    metadata, spec, status = live["metadata"], live.get("spec") or {}, live.get("status") or {}
    if metadata.get("deletionTimestamp"):
        return Skipped("terminating", f"{title} is being deleted")
    rests = spec.get("suspend") or (spec.get("runPolicy") or {}).get("suspend") or spec.get("active") is False
    if rests or STOPPED in (metadata.get("annotations") or {}):
        return Skipped("rests", f"{title} is suspended or stopped already")
    ended = ("Complete", "Failed", "Completed", "Succeeded", "Finished")
    if any(each.get("type") in ended and each.get("status") == "True" for each in status.get("conditions") or ()):
        return Skipped("ended", f"{title} has ended")
    return None


def _undo(verb: str, lever: Lever) -> str:
    """Returns the command that resumes the object."""
    group, _, namespace, plural, name = lever.place
    if verb == STOP:
        return f"kubectl annotate -n {namespace} notebook {name} {STOPPED}-"
    patch = "true" if verb == DEACTIVATE else "false"
    for key in reversed(lever.path):
        patch = f'{{"{key}":{patch}}}'
    return f"kubectl patch -n {namespace} {plural}.{group} {name} --type=merge -p '{patch}'"
