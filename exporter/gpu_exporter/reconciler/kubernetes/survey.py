"""What surrounds pods: a few requests for each namespace that has idle ones, and what they say of each pod.

A namespace is read again when a pod in it is about to rise, and otherwise once in VIEW_S at most, so that requests are
as many as transitions and not as holders.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from gpu_exporter.clock import Clock
from gpu_exporter.defaults import Policy
from gpu_exporter.reconciler.evidence import EVIDENCE_S, HolderName
from gpu_exporter.reconciler.kubernetes.api import Api
from gpu_exporter.reconciler.kubernetes.checks import GPU_RESOURCES, Resources
from gpu_exporter.reconciler.kubernetes.gangs import KUEUE_GROUP, KUEUE_TOTAL, LOOSE, gangs, group_keys
from gpu_exporter.reconciler.kubernetes.kinds import classify
from gpu_exporter.reconciler.kubernetes.namespace import NamespaceView, PodView, read_namespace
from gpu_exporter.reconciler.kubernetes.optouts import Place, read_wish
from gpu_exporter.reconciler.kubernetes.owners import Owner, Owners
from gpu_exporter.reconciler.marks import MarkError
from gpu_exporter.reconciler.surroundings import Member, Surroundings, Unreadable
from gpu_exporter.threads import NoThread, run_ahead

log = logging.getLogger(__name__)
SCHEDULER = "kubernetes"
VIEW_S = 60.0  # a wish that is written on an owner or a namespace is seen within so long ...
VIEW_EACH_S = 0.5  # ... or so long for each namespace that has idle pods: ten requests a second at the most
VIEW_MAX_S = 300.0
FRESH_S = 5.0  # what was read in this cycle is fresh
WORKERS = 4


class _Read(NamedTuple):
    """One namespace, the controllers above its pods, and when they were read (monotonic seconds)."""

    view: NamespaceView
    gangs: Mapping[str, tuple[Member, ...]]
    owners: Mapping[str, Sequence[Owner] | Unreadable]
    when: float


class PodSurveyor:
    """Pods of one API server."""

    def __init__(self, api: Api, policy: Policy, clock: Clock, resources: Resources = GPU_RESOURCES) -> None:
        self._api = api
        self._policy = policy
        self._clock = clock
        self._resources = resources
        self._owners = Owners(api)
        self._reads: dict[str, _Read | Unreadable] = {}

    def survey(
        self, names: Collection[HolderName], fresh: Collection[HolderName], wall: float
    ) -> Mapping[HolderName, Surroundings | Unreadable]:
        """As Surveyor."""
        now = self._clock.monotonic()
        wanted: dict[str, set[str]] = {}
        for name in names:
            wanted.setdefault(name.namespace, set()).add(name.name)
        keep_s = min(VIEW_MAX_S, max(VIEW_S, VIEW_EACH_S * len(wanted)))
        again = {name.namespace for name in fresh}
        kept = {
            namespace: read
            for namespace, read in self._reads.items()
            if isinstance(read, _Read)
            and namespace in wanted
            and now - read.when < (FRESH_S if namespace in again else keep_s)
            and wanted[namespace] <= read.owners.keys()
        }
        others = {
            namespace: read
            for namespace, read in self._reads.items()
            if namespace not in wanted and isinstance(read, _Read) and now - read.when < VIEW_MAX_S
        }
        self._reads = {
            **others,
            **kept,
            **self._read_all({name: pods for name, pods in wanted.items() if name not in kept}),
        }
        return {name: self._surroundings(name, wall) for name in names}

    def _read_all(self, wanted: Mapping[str, Collection[str]]) -> dict[str, _Read | Unreadable]:
        """The namespaces, of each these pods; what is not there in time is not readable now."""
        found: dict[str, _Read | Unreadable] = {}
        until = self._clock.monotonic() + EVIDENCE_S
        late = Unreadable(f"the API server was too slow for {len(wanted)} namespaces in this cycle", True)

        def read(namespace: str) -> tuple[str, _Read | Unreadable]:
            if self._clock.monotonic() > until:
                return namespace, late
            try:
                return namespace, self._read(namespace, wanted[namespace])
            except MarkError as exc:
                why = f"what surrounds pods of {namespace} cannot be read: {exc}"
                return namespace, Unreadable(why, exc.result != "replaced")
            except Exception as exc:  # what one namespace holds costs no other its decisions
                log.exception("unforeseen")
                return namespace, Unreadable(f"unforeseen in namespace {namespace}: {type(exc).__name__}: {exc}", True)

        try:
            found.update(run_ahead(read, sorted(wanted), min(WORKERS, len(wanted)), "survey"))
        except NoThread as exc:
            late = Unreadable(str(exc), True)
        return dict.fromkeys(wanted, late) | found

    def _read(self, namespace: str, pods: Collection[str]) -> _Read:
        """A namespace, and what is above these of its pods. Raises MarkError."""
        view = read_namespace(self._api, namespace, self._resources, pods)
        keys = {
            name: group_keys(pod.metadata, self._owners.ancestry(namespace, pod.metadata))
            for name, pod in view.pods.items()
        }
        known: dict[str, Owner | None] = {}
        owners: dict[str, Sequence[Owner] | Unreadable] = {}
        for name in pods:
            pod = view.pods.get(name)
            if pod is None:
                owners[name] = Unreadable(f"{namespace}/{name} has ended or is gone")
            else:
                owners[name] = self._owners.chain(namespace, pod.metadata, known)
        return _Read(view, _members_of(namespace, gangs(keys), view), owners, self._clock.monotonic())

    def _surroundings(self, name: HolderName, wall: float) -> Surroundings | Unreadable:
        read = self._reads[name.namespace]
        if isinstance(read, Unreadable):
            return read
        owners = read.owners[name.name]
        if isinstance(owners, Unreadable):
            return owners
        return describe(name, read.view, owners, read.gangs[name.name], self._policy, wall)


def _members_of(
    namespace: str, gangs_: Mapping[str, frozenset[str]], view: NamespaceView
) -> dict[str, tuple[Member, ...]]:
    """By pod, the members of its gang: one list for all of them, since a gang may have thousands."""
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
    policy: Policy,
    wall: float,
) -> Surroundings:
    """What surrounds a pod of `view`. `owners`: nearest first. `members`: the pods of its gang, itself among them."""
    pod = view.pods[name.name]
    places = [
        Place("pod", f"pod {name.name}", pod.metadata),
        *(Place("owner", owner.title, owner.metadata) for owner in owners),
        Place("namespace", f"namespace {name.namespace}", view.metadata),
    ]
    wish = read_wish(places, policy, wall)
    served_by = view.served.get(str(pod.metadata["uid"]), "")
    scaled = (view.scaled.get((owner.kind, owner.metadata["name"])) for owner in owners)
    kind, kind_why = classify(pod.labels, owners, served_by, next(filter(None, scaled), ""))
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
    )


def kinds_of(owners: Sequence[Owner]) -> tuple[str, ...]:
    """The kinds of the controllers as people write them: PyTorchJob, and kubeflow.org/PyTorchJob."""
    if not owners:
        return ("Pod",)
    groups = (owner.api_version.rpartition("/")[0] for owner in owners)
    return tuple(text for owner, group in zip(owners, groups, strict=True) for text in _kind_texts(owner.kind, group))


def _kind_texts(kind: str, group: str) -> tuple[str, ...]:
    return (kind, f"{group}/{kind}") if group else (kind,)


def acts_on(owners: Sequence[Owner]) -> str:
    """What somebody who takes the GPUs back must act on: the topmost controller, but a run and not its schedule."""
    below = [owner for owner in owners if owner.kind not in ("CronJob", "Node")]
    return below[-1].title if below else ""


def pods_missing(pod: PodView, owners: Sequence[Owner], view: NamespaceView) -> int:
    """Members of the pod's gang that are to exist and do not: those that are there can only wait for them."""
    missing = 0
    if owners and owners[0].wanted is not None and owners[0].kind not in LOOSE:
        missing = owners[0].wanted - view.alive.get(str(owners[0].metadata["uid"]), 0)
    group = pod.labels.get(KUEUE_GROUP)
    total = pod.annotations.get(KUEUE_TOTAL, "")
    if group and total.isdigit():
        missing = max(missing, int(total) - view.alive.get(group, 0))
    return max(0, missing)
