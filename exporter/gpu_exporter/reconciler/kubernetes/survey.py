"""Reads the surroundings of pods with a few requests for each namespace that has idle pods.

A namespace is read again if a pod in it is about to get a higher stage, and otherwise at most once in VIEW_S. So the
number of requests grows with the number of stage changes, and not with the number of holders.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from gpu_exporter.common.clock import Clock
from gpu_exporter.common.config.defaults import Policy
from gpu_exporter.common.durations import describe_duration
from gpu_exporter.common.outside import whole
from gpu_exporter.common.plain import describe_bug, shorten
from gpu_exporter.common.threads import NoThread, run_ahead
from gpu_exporter.reconciler.decision.surroundings import SERVING, Member, Reference, Surroundings, Unreadable
from gpu_exporter.reconciler.evidence.records import EVIDENCE_S, HolderName
from gpu_exporter.reconciler.kubernetes.checks import Resources
from gpu_exporter.reconciler.kubernetes.client.api import Api, Budget
from gpu_exporter.reconciler.kubernetes.client.keys import CLASS, GROUPS, KUEUE_GROUP, KUEUE_TOTAL
from gpu_exporter.reconciler.kubernetes.client.lean import SPEC_GROUP
from gpu_exporter.reconciler.kubernetes.client.namespace import NamespaceView, PodView, read_namespace
from gpu_exporter.reconciler.kubernetes.client.stream import MALFORMED, TOO_LARGE
from gpu_exporter.reconciler.kubernetes.gangs import LOOSE, SCHEDULES, gangs, group_keys, unnamed_gang
from gpu_exporter.reconciler.kubernetes.kinds import classify
from gpu_exporter.reconciler.kubernetes.optouts import Place, read_serving_label, read_wish
from gpu_exporter.reconciler.kubernetes.owners import FAILED, Chain, Link, Owner, OwnerLook, Owners, controller_of
from gpu_exporter.reconciler.kubernetes.shapes import match
from gpu_exporter.reconciler.marks import MarkError

log = logging.getLogger(__name__)
SCHEDULER = "kubernetes"
VIEW_S = 60.0  # how long a view of a namespace is used, so how long a new wish on an owner may stay unseen ...
VIEW_EACH_S = 0.5  # ... or this long per namespace that has idle pods: at most ten requests per second
VIEW_MAX_S = 300.0
FRESH_S = 5.0  # a view that is younger was read in this cycle
SERVED_KEEP_S = 900.0  # endpoints and autoscalers may disappear for a while during the rollout of a server
WORKERS = 4
SIGN_MAX = 100  # characters of a key in a text
NAMESPACE_S = 20.0  # for the lists of one namespace and the owners of its pods; 20,000 pods take four seconds
LIST_MAX = 1024 * 1024 * 1024  # bytes of all lists of one namespace, which are read as streams
KEPT_MAX = 96 * 1024 * 1024  # approximate bytes of memory for all namespaces together


class _NamespaceRead(NamedTuple):
    """One namespace, the controllers above its pods, and the time of the read (monotonic seconds)."""

    view: NamespaceView
    gangs: Mapping[str, tuple[Member, ...]]
    chains: Mapping[str, Chain | Unreadable]
    when: float


class PodSurveyor:
    """Surveys the pods of one API server."""

    def __init__(self, api: Api, policy: Policy, clock: Clock, resources: Resources) -> None:
        self._api = api
        self._policy = policy
        self._clock = clock
        self._resources = resources
        self._owners = Owners(api, clock)
        self._reads: dict[str, _NamespaceRead | Unreadable] = {}
        self._slow: set[str] = set()  # namespaces that were too large at their last read
        self._served: dict[str, tuple[float, str]] = {}  # by pod UID: when it was last served (monotonic), and by what

    def survey(
        self, names: Collection[HolderName], fresh: Collection[HolderName], wall: float
    ) -> Mapping[HolderName, Surroundings | Unreadable]:
        """See Surveyor.survey."""
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
        """The surroundings of one holder. An error on its objects does not affect other holders."""
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
                why = f"the surroundings of pods in {namespace} cannot be read: {exc}"
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
        view = read_namespace(self._api, namespace, self._resources, pods, most)
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
        keys = {name: group_keys(pod.metadata, _ancestry(look, pod)) for name, pod in holding}
        return _NamespaceRead(view, _members_of(namespace, gangs(keys), view), chains, self._clock.monotonic())

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
        server = self._server(pod, read.view, chain.owners)
        return describe(name, read.view, chain.owners, read.gangs[name.name], server, self._policy, wall)

    def _server(self, pod: PodView, view: NamespaceView, owners: Sequence[Owner]) -> str:
        """The Service or autoscaler in front of a pod, now or within the last SERVED_KEEP_S; "" for none."""
        uid, now = str(pod.metadata["uid"]), self._clock.monotonic()
        scaled = (view.scaled.get((owner.kind, owner.metadata["name"])) for owner in owners)
        if server := view.server_of(pod) or next(filter(None, scaled), ""):
            self._served[uid] = now, server
            return server
        _, before = self._served.get(uid, (0.0, ""))
        return f"{before}, within the last {describe_duration(SERVED_KEEP_S)}" if before else ""


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
    """The controllers above a pod. A malformed controller does not affect other pods. Raises MarkError."""
    try:
        return look.chain(pod.metadata)
    except MarkError:
        raise
    except Exception as exc:
        log.exception("internal error: the controllers of pod %s/%s are unknown in this cycle", namespace, name)
        return _left_out(namespace, name, MALFORMED, f"its controllers: {describe_bug(exc)}")


def _lonely(pod: PodView, view: NamespaceView, ancestry: Sequence[Link]) -> Unreadable | None:
    """The reason not to judge a pod by itself: its gang has members that are not known. None for other pods."""
    name = pod.metadata["name"]
    if sign := unnamed_gang(pod.metadata, ancestry):
        why = f"{shorten(sign, SIGN_MAX)} makes pod {name} a member of a gang, but no known label names the gang"
        return Unreadable(f"{why}: give all members one label, such as {GROUPS[0]}")
    if pod.metadata.get(SPEC_GROUP) and view.left_out:  # of these pods only the metadata was read
        others = ", ".join(sorted(view.left_out)[:3])
        return Unreadable(f"it is not known whether {others} is in the gang of pod {name}, because it cannot be read")
    return None


def _left_out(namespace: str, name: str, reason: str, why: str) -> Unreadable:
    """The result for a pod that is malformed or too large."""
    return Unreadable(f"pod {namespace}/{name} cannot be read: {why}", reason=reason, kind="Pod")


def _members_of(
    namespace: str, gangs_: Mapping[str, frozenset[str]], view: NamespaceView
) -> dict[str, tuple[Member, ...]]:
    """The members of each pod's gang, by pod. Pods of one gang share one list: it may have thousands of members."""
    lists: dict[frozenset[str], tuple[Member, ...]] = {}
    for gang in gangs_.values():
        if gang not in lists:
            pods = ((name, view.pods[name]) for name in sorted(gang))
            lists[gang] = tuple(
                Member(HolderName(SCHEDULER, namespace, name), str(pod.metadata["uid"]), pod.gpus, pod.waits)
                for name, pod in pods
            )
    return {name: lists[gang] for name, gang in gangs_.items()}


def describe(
    name: HolderName,
    view: NamespaceView,
    owners: Sequence[Owner],
    members: tuple[Member, ...],
    server: str,
    policy: Policy,
    wall: float,
) -> Surroundings:
    """The surroundings of a pod of `view`.

    `owners`: nearest first. `members`: the pods of its gang, including the pod. `server`: the Service or autoscaler in
    front of it, "" for none.
    """
    pod = view.pods[name.name]
    own = [
        Place("pod", f"pod {name.name}", pod.metadata),
        *(Place("owner", owner.title, owner.metadata) for owner in owners),
    ]
    wish = read_wish([*own, Place("namespace", f"namespace {name.namespace}", view.metadata)], policy, wall)
    kind, kind_why = classify(pod.labels, owners, server)
    shown = kind
    if (place := next((each for each in own if each.labelled_class), None)) is not None:
        if place.labelled_class == SERVING != kind:
            wish = wish.also(read_serving_label(place, policy, wall))
        else:
            kind, kind_why = place.labelled_class, f"label {CLASS} of {place.title}"
    missing = pods_missing(pod, owners, view)
    is_gang = len(members) > 1 or missing > 0
    return Surroundings(
        group=acts_on(owners),
        members=members if is_gang else (),
        missing=missing,
        kind=kind,
        kind_why=kind_why,
        exemption=wish.exemption,
        idle_after_s=wish.idle_after_s,
        idle_after_by=wish.idle_after_by,
        ceiling=wish.ceiling,
        labels=pod.labels,
        owner_kinds=kinds_of(owners),
        target=target_of(owners),
        possible=found[0].verbs if (found := match([owner.link for owner in owners])) is not None else (),
        shown=shown,
    )


def kinds_of(owners: Sequence[Owner]) -> tuple[str, ...]:
    """The kinds of the controllers in both common forms: PyTorchJob, and kubeflow.org/PyTorchJob."""
    if not owners:
        return ("Pod",)
    return tuple(text for owner in owners for text in _kind_texts(owner.kind, owner.group))


def _kind_texts(kind: str, group: str) -> tuple[str, ...]:
    return (kind, f"{group}/{kind}") if group else (kind,)


def acts_on(owners: Sequence[Owner]) -> str:
    """The title of the object on which a user or tool must act to free the GPUs: the highest controller of all these
    pods.

    For a scheduled run this is the run, not its schedule. For a Deployment it is the Deployment, not the object that
    created it.
    """
    found = ""
    for at, owner in enumerate(owners):
        is_made = at > 0 and owners[at - 1].kind in LOOSE and owner.kind not in LOOSE
        if owner.kind in SCHEDULES or is_made:
            break
        found = owner.title
    return found


def target_of(owners: Sequence[Owner]) -> Reference | None:
    """The target of an action on a pod with these controllers; None if the reconciler never acts on it."""
    found = match([owner.link for owner in owners])
    if found is None:
        return None
    link = owners[found[1]].link
    group, _, version = link.api_version.rpartition("/")
    return Reference(group, version, link.kind, link.name, link.uid)


def pods_missing(pod: PodView, owners: Sequence[Owner], view: NamespaceView) -> int:
    """The number of members of the pod's gang that do not exist yet. The existing members wait for them."""
    missing = 0
    if owners and owners[0].wanted is not None and owners[0].kind not in LOOSE:
        missing = owners[0].wanted - view.alive.get(owners[0].link, 0)
    group = pod.labels.get(KUEUE_GROUP)
    total = whole(pod.annotations.get(KUEUE_TOTAL, ""))
    if group and total is not None:
        missing = max(missing, total - view.alive.get(group, 0))
    return max(0, missing)
