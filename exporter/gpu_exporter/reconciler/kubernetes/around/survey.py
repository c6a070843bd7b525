"""Reads the surroundings of pods with a few requests for each namespace that has idle pods.

A namespace is read again if a pod in it is about to get a higher stage, and otherwise at most once in VIEW_S. So the
number of requests grows with the number of stage changes, and not with the number of holders.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from gpu_exporter.common.clock import Clock
from gpu_exporter.common.config.defaults import Policy
from gpu_exporter.common.durations import describe_duration
from gpu_exporter.common.model.holders import RESERVATION_NAMESPACES
from gpu_exporter.common.outside import whole
from gpu_exporter.common.plain import describe_bug, shorten
from gpu_exporter.common.threads import NoThread, run_ahead
from gpu_exporter.reconciler.decision.policy import LABEL, UNDERUSED
from gpu_exporter.reconciler.decision.surroundings import (
    LOOSE,
    SERVING,
    UNCLEAR,
    Exemption,
    Member,
    Reference,
    Surroundings,
    Unreadable,
)
from gpu_exporter.reconciler.evidence.records import EVIDENCE_S, HolderName
from gpu_exporter.reconciler.kubernetes.around.kinds import Signs, classify, serving_doubt
from gpu_exporter.reconciler.kubernetes.around.optouts import OptOut, Place, read_serving_label, read_wish
from gpu_exporter.reconciler.kubernetes.checks import Resources
from gpu_exporter.reconciler.kubernetes.client.api import Api, Budget
from gpu_exporter.reconciler.kubernetes.client.keys import CLASS, DAEMON_SET, GROUPS, KUEUE_GROUP, KUEUE_TOTAL
from gpu_exporter.reconciler.kubernetes.client.lean import SPEC_GROUP
from gpu_exporter.reconciler.kubernetes.client.namespace import NamespaceView, PodView, read_namespace
from gpu_exporter.reconciler.kubernetes.client.routes import NO_ROUTE, Route
from gpu_exporter.reconciler.kubernetes.client.stream import MALFORMED, TOO_LARGE
from gpu_exporter.reconciler.kubernetes.gangs import SCHEDULES, gangs, group_keys, unnamed_gang
from gpu_exporter.reconciler.kubernetes.owners import (
    FAILED,
    Chain,
    Link,
    Owner,
    OwnerLook,
    Owners,
    Unread,
    controller_of,
)
from gpu_exporter.reconciler.kubernetes.shapes import match
from gpu_exporter.reconciler.marks import MarkError

log = logging.getLogger(__name__)
SCHEDULER = "kubernetes"
VIEW_S = 60.0  # how long a view of a namespace is used, so how long a new wish on an owner may stay unseen ...
VIEW_EACH_S = 0.5  # ... or this long per namespace that has idle pods: at most ten requests per second
VIEW_MAX_S = 300.0
FRESH_S = 5.0  # a view that is younger was read in this cycle
SERVED_KEEP_S = 900.0  # endpoints and autoscalers may disappear for a while during the rollout of a server
LEAVES = ("", "apps", "batch")  # API groups whose controllers control pods only, and no other controllers
WORKERS = 4
TENANT = re.compile(r"[A-Za-z0-9]([\w.-]{0,61}[A-Za-z0-9])?", re.ASCII)  # as the API server validates label values
SIGN_MAX = 100  # characters of a key in a text
NAMESPACE_S = 20.0  # for the lists of one namespace and the owners of its pods; 20,000 pods take four seconds
LIST_MAX = 1024 * 1024 * 1024  # bytes of all lists of one namespace, which are read as streams
KEPT_MAX = 96 * 1024 * 1024  # approximate bytes of memory for all namespaces together


class _SharedGang(NamedTuple):
    """The members of a gang that hold GPUs, and the route to any member: also to one without GPUs."""

    members: tuple[Member, ...]
    route: Route


class _NamespaceRead(NamedTuple):
    """One namespace, the controllers above its pods, and the time of the read (monotonic seconds).

    `unread`: a controller because of which other members of a gang may not be known; None if all are known.
    """

    view: NamespaceView
    gangs: Mapping[str, _SharedGang]
    chains: Mapping[str, Chain | Unreadable]
    when: float
    unread: Unread | None = None


class PodSurveyor:
    """Reads the surroundings of pods through one API server."""

    def __init__(self, api: Api, policy: Policy, clock: Clock, resources: Resources) -> None:
        self._api = api
        self._policy = policy
        self._clock = clock
        self._resources = resources
        self._owners = Owners(api, clock)
        self._reads: dict[str, _NamespaceRead | Unreadable] = {}
        self._slow: set[str] = set()  # namespaces that were too large at their last read
        self._served: dict[
            str, tuple[float, Route]
        ] = {}  # by pod UID: when it was last served (monotonic), and by what

    def survey(
        self, names: Collection[HolderName], fresh: Collection[HolderName], wall: float
    ) -> Mapping[HolderName, Surroundings | Unreadable]:
        now = self._clock.monotonic()
        wanted: dict[str, set[str]] = {}
        for name in names:
            wanted.setdefault(name.namespace, set()).add(name.name)
        keep_s = min(VIEW_MAX_S, max(VIEW_S, VIEW_EACH_S * len(wanted)))
        again = {name.namespace for name in fresh}
        kept = {
            namespace: read
            for namespace, read in self._reads.items()
            if isinstance(read, _NamespaceRead)
            and namespace in wanted
            and now - read.when < (FRESH_S if namespace in again else keep_s)
            and wanted[namespace] <= read.chains.keys()
        }
        others = {
            namespace: read
            for namespace, read in self._reads.items()
            if namespace not in wanted and isinstance(read, _NamespaceRead) and now - read.when < VIEW_MAX_S
        }
        self._reads = {
            **others,
            **kept,
            **self._read_all({name: pods for name, pods in wanted.items() if name not in kept}),
        }
        self._make_room()
        self._served = {uid: seen for uid, seen in self._served.items() if now - seen[0] < SERVED_KEEP_S}
        if fault := self._api.clock_fault:
            return dict.fromkeys(names, Unreadable(fault, is_failure=True))
        return {name: self._guarded(name, wall) for name in names}

    def _guarded(self, name: HolderName, wall: float) -> Surroundings | Unreadable:
        """Returns the surroundings of one holder. An error on its objects does not affect other holders."""
        try:
            return self._surroundings(name, wall)
        except Exception as exc:
            log.exception("internal error: the surroundings of %s are unknown in this cycle", name)
            return _left_out(name.namespace, name.name, MALFORMED, describe_bug(exc))

    def _make_room(self) -> None:
        """Drops the largest namespaces until the others fit into KEPT_MAX, so that small namespaces are kept."""
        weights = {name: read.view.weight for name, read in self._reads.items() if isinstance(read, _NamespaceRead)}
        total = sum(weights.values())
        for name in sorted(weights, key=weights.__getitem__, reverse=True):
            if total <= KEPT_MAX:
                return
            total -= weights[name]
            why = f"namespace {name} is too large: all namespaces together may need at most {KEPT_MAX // 2**20} MiB"
            self._reads[name] = Unreadable(why, reason=TOO_LARGE, kind="Namespace")

    def _read_all(self, wanted: Mapping[str, Collection[str]]) -> dict[str, _NamespaceRead | Unreadable]:
        """Reads these pods of these namespaces. A namespace that is not read in time is unreadable in this cycle."""
        found: dict[str, _NamespaceRead | Unreadable] = {}
        until = self._clock.monotonic() + EVIDENCE_S
        late = Unreadable(f"the API server was too slow for {len(wanted)} namespaces in this cycle", True)

        def read(namespace: str) -> tuple[str, _NamespaceRead | Unreadable]:
            began = self._clock.monotonic()
            if began > until:
                return namespace, late._replace(is_failure=namespace not in self._slow)
            try:
                found_now = self._read(namespace, wanted[namespace], min(until, began + NAMESPACE_S))
                self._slow.discard(namespace)
                return namespace, found_now
            except MarkError as exc:
                why = f"the pods of namespace {namespace} and their owners cannot be read: {exc}"
                if exc.result == "size":  # this namespace is too large
                    self._slow.add(namespace)
                    return namespace, Unreadable(why, reason=TOO_LARGE, kind="Namespace")
                return namespace, Unreadable(why, exc.result != "replaced")
            except Exception as exc:  # a failure in one namespace does not affect others
                log.exception("internal error: the pods of namespace %s are unknown in this cycle", namespace)
                return namespace, Unreadable(f"namespace {namespace} cannot be read: {describe_bug(exc)}", True)

        try:
            # Namespaces that were too large come last, so that others do not wait for them.
            names = sorted(wanted, key=lambda name: (name in self._slow, name))
            self._slow &= set(wanted)
            found.update(run_ahead(read, names, min(WORKERS, len(wanted)), "survey"))
        except NoThread as exc:
            late = Unreadable(str(exc), True)
        return dict.fromkeys(wanted, late) | found

    def _read(self, namespace: str, pods: Collection[str], until: float) -> _NamespaceRead:
        """Reads a namespace, and the controllers of these pods. Raises MarkError."""
        most = Budget(LIST_MAX, until, self._clock)
        view = read_namespace(self._api, self._owners.kinds, namespace, self._resources, pods, most)
        look = self._owners.look(namespace, until)
        chains: dict[str, Chain | Unreadable] = {}
        for name in sorted(pods):  # before other pods of the namespace, since a limit may be reached
            pod = view.pods.get(name)
            if name in view.left_out:
                chains[name] = _left_out(namespace, name, *view.left_out[name])
            elif pod is not None and pod.odd is not None:
                chains[name] = _left_out(namespace, name, *pod.odd)
            elif pod is not None:
                chains[name] = _lonely(pod, view, _ancestry(look, pod)) or _chain(look, namespace, name, pod)
            else:
                chains[name] = Unreadable(f"{namespace}/{name} has ended or is gone")
        holding = sorted(view.pods.items(), key=lambda item: (item[0] not in pods, item[1].gpus == 0))
        links = {name: _ancestry(look, pod) for name, pod in (*holding, *view.fronts.items())}
        return _NamespaceRead(view, _gangs_of(namespace, links, view), chains, self._clock.monotonic(), look.unread)

    def _surroundings(self, name: HolderName, wall: float) -> Surroundings | Unreadable:
        read = self._reads[name.namespace]
        if isinstance(read, Unreadable):
            return read
        chain = read.chains[name.name]
        if isinstance(chain, Unreadable):
            return chain
        if chain.unread is not None:
            _, reason, why = chain.unread
            return Unreadable(why, reason == FAILED, reason, chain.unread.link.kind)
        pod = read.view.pods[name.name]
        gang = read.gangs[name.name]
        route = self._route(pod, read.view, chain.owners, gang)
        found = describe(name, read.view, chain.owners, gang.members, route, self._policy, wall)
        if read.unread is not None and any(owner.group not in LEAVES for owner in chain.owners):
            doubt = f"another pod may belong to its group: {read.unread.why}"
            if pod.labels.get(LABEL) == UNDERUSED:  # a mark stays for policy.unsupported_max, as without evidence
                return Unreadable(doubt, reason=read.unread.reason, kind=read.unread.link.kind)
            return found._replace(ceiling="; ".join(filter(None, (found.ceiling, doubt))))
        return found

    def _route(self, pod: PodView, view: NamespaceView, owners: Sequence[Owner], gang: _SharedGang) -> Route:
        """Returns the object that sends requests to the pod or scales it, or sends requests to another member of its
        gang, now or within the last SERVED_KEEP_S.
        """
        uid, now = str(pod.metadata["uid"]), self._clock.monotonic()
        scaled = next(filter(None, (view.scaled.get((each.kind, each.link.name)) for each in owners)), "")
        found = sorted((pod.route, Route(scaled), gang.route), key=lambda each: (not each.title, each.is_weak))
        route = found[0]
        _, before = self._served.get(uid, (0.0, NO_ROUTE))
        if route.title and (not route.is_weak or before.is_weak or not before.title):
            self._served[uid] = now, route
            return route
        if not before.title:
            return NO_ROUTE
        return before._replace(title=f"{before.title}, within the last {describe_duration(SERVED_KEEP_S)}")


def _ancestry(look: OwnerLook, pod: PodView) -> list[Link]:
    """As OwnerLook.ancestry. After an internal error, returns only the reference in the pod. Raises MarkError."""
    try:
        return look.ancestry(pod.metadata)
    except MarkError:
        raise
    except Exception:
        log.exception("internal error: only the first of the owners above pod %s is known", pod.metadata["name"])
        own = controller_of(pod.metadata)
        return [] if own is None else [own]


def _chain(look: OwnerLook, namespace: str, name: str, pod: PodView) -> Chain | Unreadable:
    """Returns the controllers above a pod. A malformed controller does not affect other pods. Raises MarkError."""
    try:
        return look.chain(pod.metadata)
    except MarkError:
        raise
    except Exception as exc:
        log.exception("internal error: the controllers of pod %s/%s are unknown in this cycle", namespace, name)
        return _left_out(namespace, name, MALFORMED, f"its controllers: {describe_bug(exc)}")


def _lonely(pod: PodView, view: NamespaceView, ancestry: Sequence[Link]) -> Unreadable | None:
    """Returns why a pod cannot be judged: members of its gang are not known. None if it can."""
    name = pod.metadata["name"]
    if sign := unnamed_gang(pod.metadata, ancestry):
        why = f"{shorten(sign, SIGN_MAX)} makes pod {name} a member of a gang, but no known label names the gang"
        return Unreadable(f"{why}: give all members one label, such as {GROUPS[0]}")
    if pod.metadata.get(SPEC_GROUP) and view.left_out:  # of these pods only the metadata was read
        others = ", ".join(sorted(view.left_out)[:3])
        return Unreadable(f"{others} cannot be read, and may be in the gang of pod {name}")
    return None


def _left_out(namespace: str, name: str, reason: str, why: str) -> Unreadable:
    """Returns the result for a pod that is malformed or too large."""
    return Unreadable(f"pod {namespace}/{name} cannot be read: {why}", reason=reason, kind="Pod")


def _gangs_of(namespace: str, links: Mapping[str, Sequence[Link]], view: NamespaceView) -> dict[str, _SharedGang]:
    """Returns the gang of each pod that holds GPUs. Pods of one gang share one object, which may have thousands of
    members.

    `links`: by pod, references to its controllers, nearest first.
    """
    pods = {**view.fronts, **view.pods}
    found: dict[frozenset[str], _SharedGang] = {}
    gangs_ = gangs({name: group_keys(pods[name].metadata, its) for name, its in links.items()})
    for gang in gangs_.values():
        if gang in found:
            continue
        names = sorted(gang)
        members = tuple(
            Member(HolderName(SCHEDULER, namespace, name), str(pod.metadata["uid"]), pod.gpus, pod.waits)
            for name in names
            if (pod := view.pods.get(name)) is not None
        )
        found[gang] = _SharedGang(members, _shared_route(names, pods, links, view) if len(names) > 1 else NO_ROUTE)
    return {name: found[gang] for name, gang in gangs_.items() if name in view.pods}


def _shared_route(
    names: Sequence[str], pods: Mapping[str, PodView], links: Mapping[str, Sequence[Link]], view: NamespaceView
) -> Route:
    """Returns the first route to a member of a gang, or the first autoscaler of a controller above a member."""
    for name in names:
        route = pods[name].route
        scaled = (view.scaled.get((link.kind, link.name)) for link in links[name])
        if title := ("" if route.is_weak else route.title) or next(filter(None, scaled), ""):
            return Route(f"{title} of member {name}")
    return NO_ROUTE


def describe(
    name: HolderName,
    view: NamespaceView,
    owners: Sequence[Owner],
    members: tuple[Member, ...],
    route: Route,
    policy: Policy,
    wall: float,
) -> Surroundings:
    """Returns the surroundings of a pod of `view`.

    `owners`: nearest first. `members`: the pods of its gang that hold GPUs, including the pod. `route`: the object that
    sends requests to it, or scales it.
    """
    pod = view.pods[name.name]
    own = [
        Place("pod", f"pod {name.name}", pod.metadata),
        *(Place("owner", owner.title, owner.metadata) for owner in owners),
    ]
    wish = read_wish([*own, Place("namespace", f"namespace {name.namespace}", view.metadata)], policy, wall)
    kind, kind_why = classify(pod.labels, owners, route, Signs.of(policy))
    shown = kind
    if (place := next((each for each in own if each.labelled_class), None)) is not None:
        if place.labelled_class == SERVING != kind:
            wish = wish.also(read_serving_label(place, policy, wall))
        else:
            kind, kind_why = place.labelled_class, f"label {CLASS} of {place.title}"
    if kind == UNCLEAR and (doubt := serving_doubt(pod.labels, view.unread)):
        wish = wish.also(OptOut(ceiling=doubt))
    missing = pods_missing(pod, owners, view)
    is_gang = len(members) > 1 or missing > 0
    return Surroundings(
        group=acts_on(owners),
        members=members if is_gang else (),
        missing=missing,
        kind=kind,
        kind_why=kind_why,
        exemption=wish.exemption or _find_reservation(name.namespace),
        idle_after_s=wish.idle_after_s,
        idle_after_by=wish.idle_after_by,
        ceiling=wish.ceiling,
        labels=pod.labels,
        owner_kinds=kinds_of(owners),
        target=target_of(owners),
        possible=found[0].verbs if (found := match([owner.link for owner in owners])) is not None else (),
        shown=shown,
        tenant=named if TENANT.fullmatch(named := view.metadata.get("labels", {}).get(policy.tenant_label, "")) else "",
        is_daemon=bool(owners) and (owners[0].group, owners[0].kind) == DAEMON_SET,
    )


def _find_reservation(namespace: str) -> Exemption | None:
    """Returns the exemption of a scheduler's reservation pods, which an older exporter reports as holders."""
    if namespace not in RESERVATION_NAMESPACES:
        return None
    return Exemption("namespace", f"the pods of namespace {namespace} only reserve GPUs for other pods")


def kinds_of(owners: Sequence[Owner]) -> tuple[str, ...]:
    """Returns the kinds of the controllers in both common forms: PyTorchJob, and kubeflow.org/PyTorchJob."""
    if not owners:
        return ("Pod",)
    return tuple(text for owner in owners for text in _kind_texts(owner.kind, owner.group))


def _kind_texts(kind: str, group: str) -> tuple[str, ...]:
    return (kind, f"{group}/{kind}") if group else (kind,)


def acts_on(owners: Sequence[Owner]) -> str:
    """Returns the title of the object that a user or tool must end to free the GPUs: the highest controller of all
    these pods.

    A scheduled run counts, not its schedule. A Deployment counts, not the object that created it.
    """
    found = ""
    for at, owner in enumerate(owners):
        is_made = at > 0 and owners[at - 1].kind in LOOSE and owner.kind not in LOOSE
        if owner.kind in SCHEDULES or is_made:
            break
        found = owner.title
    return found


def target_of(owners: Sequence[Owner]) -> Reference | None:
    """Returns the target of an action on a pod with these controllers; None if the reconciler never acts on it."""
    found = match([owner.link for owner in owners])
    if found is None:
        return None
    link = owners[found[1]].link
    group, _, version = link.api_version.rpartition("/")
    return Reference(group, version, link.kind, link.name, link.uid)


def pods_missing(pod: PodView, owners: Sequence[Owner], view: NamespaceView) -> int:
    """Returns the number of members of the pod's gang that do not exist yet. The existing members wait for them."""
    missing = 0
    if owners and owners[0].wanted is not None and owners[0].kind not in LOOSE:
        missing = owners[0].wanted - view.alive.get(owners[0].link, 0)
    group = pod.labels.get(KUEUE_GROUP)
    total = whole(pod.annotations.get(KUEUE_TOTAL, ""))
    if group and total is not None:
        missing = max(missing, total - view.alive.get(group, 0))
    return max(0, missing)
