"""A hostile tenant on a real API server: its forged objects change nothing in other namespaces, and only delay in its own.

Every run prints a new seed; GPU_EXPORTER_HOSTILE_SEED repeats a run.
"""

from __future__ import annotations

import itertools
import os
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from kubernetes import client
from kubernetes.client.exceptions import ApiException, NotFoundException

from gpu_exporter.common.config.defaults import Policy
from gpu_exporter.reconciler.decision.policy import UNDERUSED, Decision
from gpu_exporter.reconciler.decision.rulebook import Rulebook
from gpu_exporter.reconciler.decision.target import Target, why_not
from gpu_exporter.reconciler.evidence.records import Evidence, HolderName
from gpu_exporter.reconciler.judge import judge_of
from gpu_exporter.reconciler.kubernetes.actor import PodActor
from gpu_exporter.reconciler.kubernetes.client.api import Api
from gpu_exporter.reconciler.kubernetes.marker import PodMarker
from tests.component.pods_bench import POLICY, Source
from tests.component.test_shapes import VERBS, Ground, plane  # noqa: F401  # a fixture
from tests.testbed.control_plane import ControlPlane
from tests.testbed.gpu_resources import GPU_RESOURCES
from tests.testbed.processes import wait_for

pytestmark = pytest.mark.kubernetes
SEED = int(os.environ.get("GPU_EXPORTER_HOSTILE_SEED", "0")) or secrets.randbits(32)
EXAMPLES = settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck), database=None)
IDLE_S = 8500.0
PREFIX = "gpu-exporter.io/"


class Made(NamedTuple):
    """A pod of the hostile tenant. `owner`: an index of REFERENCES, or None; `keeps_uid`: with the true UID."""

    gpus: int
    owner: int | None
    keeps_uid: bool
    is_controller: bool
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    runs: bool
    idles: bool


class Plot(NamedTuple):
    """The objects that the tenant creates at the same time."""

    pods: tuple[Made, ...]
    services: tuple[str | None, ...]  # the label app that each Service selects; None for headless
    quota: str


LABELS = {
    "job-name": ("train",),
    "batch.kubernetes.io/job-name": ("train",),
    "training.kubeflow.org/job-name": ("torch",),
    "training.kubeflow.org/replica-type": ("worker", "master", "evaluator"),
    "jobset.sigs.k8s.io/jobset-name": ("set",),
    "jobset.sigs.k8s.io/replicatedjob-name": ("worker",),
    "app": ("web", "train"),
    "kueue.x-k8s.io/pod-group-name": ("g",),
    "scheduling.x-k8s.io/pod-group": ("train", "torch"),
    PREFIX + "class": ("serving", "batch", "interactive"),
    "notebook-name": ("lab",),
}
ANNOTATIONS = {
    "kueue.x-k8s.io/pod-group-total-count": ("99", "x", "1e9"),
    "scheduling.k8s.io/group-name": ("train", "torch"),
    PREFIX + "exempt": ("true",),
    PREFIX + "exempt-until": ("2099-01-01T00:00:00Z", "for ever"),
    PREFIX + "idle-after": ("90h", "x"),
    PREFIX + "acted": ("suspend 2026-01-01T00:00:00Z 0a0b",),
    PREFIX + "utilization-since": ("2020-01-01T00:00:00Z",),
}
FOREIGN = (  # references to missing objects, as kind and apiVersion
    ("Pipeline", "example.org/v1"),
    ("Job", "batch/v0"),
    ("Job", "batch.example.org/v1"),
    ("x" * 60, "a.b.c.d/v1"),
)


def some_of(values: Mapping[str, Sequence[str]]) -> st.SearchStrategy[dict[str, str]]:
    return st.dictionaries(st.sampled_from(sorted(values)), st.integers(0, 2), max_size=3).map(
        lambda drawn: {key: values[key][at % len(values[key])] for key, at in drawn.items()}
    )


PODS = st.builds(
    Made,
    st.sampled_from((0, 1, 1)),
    st.sampled_from((None, *range(12))),
    st.sampled_from((True, True, False)),
    st.sampled_from((True, True, False)),
    some_of(LABELS),
    some_of(ANNOTATIONS),
    st.sampled_from((True, True, False)),
    st.booleans(),
)
PLOTS = st.builds(
    Plot,
    st.lists(PODS, min_size=1, max_size=4).map(tuple),  # half of the number that may become idle together
    st.lists(st.sampled_from(("web", "train", None)), max_size=2).map(tuple),
    st.sampled_from(("", "count/jobs.batch", "pods")),
)


class Everywhere:
    """Evidence of several namespaces."""

    def __init__(self, *sources: Source) -> None:
        self.sources = sources

    def read_evidence(self, marked: Collection[HolderName] = ()) -> Evidence:
        read = [source.read_evidence() for source in self.sources]
        return read[0]._replace(holders=tuple(holder for each in read for holder in each.holders))

    def read_holders(self, names: Collection[HolderName]) -> Evidence:
        evidence = self.read_evidence()
        return evidence._replace(holders=tuple(each for each in evidence.holders if each.name in names))


class SlurmSnapshot(NamedTuple):
    """The decisions of a reconciler that has just started on the honest holders, by pod, and its targets."""

    decisions: dict[str, Decision]
    targets: dict[str, Target]

    def said(self) -> tuple[Any, ...]:
        """The part that must remain the same."""
        decisions = {
            name: (each.stage, each.reason, each.exempt_by, each.around and each.around._replace(labels={}))
            for name, each in self.decisions.items()
        }
        return decisions, {title: each._replace(live=None) for title, each in self.targets.items()}


class Village(Ground):
    """A namespace of honest tenants: idle Jobs of several kinds, a serving pod, and a working pod."""

    def settle(self) -> None:
        self.references = [
            self.make("Job"),
            self.make("PyTorchJob", "torch"),
            self.make("JobSet", "set"),
        ]
        for reference in self.references:
            for part in self.read(reference).ends:
                if part.units:
                    self.set_run(part.name.name, IDLE_S)
        (web,) = self.deployment("web", 1)
        (works,) = self.job("works", 1)
        self.set_run(web, IDLE_S)
        self.set_run(works, 1.0)
        self.honest = dict(self.source.pods)
        apps = client.AppsV1Api(self.plane.api)
        batch = client.BatchV1Api(self.plane.api)
        sets = apps.list_namespaced_replica_set(self.namespace).items
        jobs = batch.list_namespaced_job(self.namespace).items
        self.owners = [("Job", "batch/v1", each.metadata.name, each.metadata.uid) for each in jobs]
        self.owners += [("ReplicaSet", "apps/v1", each.metadata.name, each.metadata.uid) for each in sets]
        for each in self.references[1:]:
            self.owners.append((each.kind, f"{each.group}/{each.version}", each.name, each.uid))
        self.owners += [(kind, version, "train", "0") for kind, version in FOREIGN]

    def look(self, *others: Source, policy: Policy = POLICY) -> SlurmSnapshot:
        api = Api(ControlPlane.connect(self.plane.admin))
        marker, actor = (
            PodMarker(api, policy, self.clock, resources=GPU_RESOURCES),
            PodActor(api, policy, self.clock, resources=GPU_RESOURCES),
        )
        source = Everywhere(*others, self.source)  # the hostile source is read first
        decisions = judge_of(source, [marker], Rulebook(policy)).judge().decisions
        own = {each.name.name: each for each in decisions if each.name.namespace == self.namespace}
        targets = {each.title: actor.read(each, self.namespace, VERBS, IDLE_S, 0.0) for each in self.references}
        return SlurmSnapshot(own, targets)


class Hostile:
    """A tenant of a namespace, who creates the objects of a plot and removes them."""

    number = itertools.count()

    def __init__(self, village: Village, namespace: str) -> None:
        self.village, self.namespace = village, namespace
        self.core = village.plane.core
        self.source = Source(namespace)
        self.source.clock = village.clock

    def begin(self, plot: Plot) -> dict[str, bool]:
        """Create the objects. Returns the pods that exist, and whether each of them is idle."""
        tag = next(self.number)
        for at, app in enumerate(plot.services):
            spec = {"ports": [{"port": 80}], "selector": {"app": app or "web"}}
            spec |= {} if app else {"clusterIP": "None"}
            body = {"metadata": {"name": f"svc-{tag}-{at}", "labels": {"of": "plot"}}, "spec": spec}
            self.core.create_namespaced_service(self.namespace, body)
        if plot.quota:
            body = {"metadata": {"name": f"quota-{tag}"}, "spec": {"hard": {plot.quota: "1000"}}}
            self.core.create_namespaced_resource_quota(self.namespace, body)
        made: dict[str, bool] = {}
        for at, pod in enumerate(plot.pods):
            name = f"plot-{tag}-{at}"
            container: dict[str, Any] = {"name": "c", "image": "i"}
            if pod.gpus:
                container["resources"] = {"limits": {"nvidia.com/gpu": "1"}}
            metadata: dict[str, Any] = {
                "name": name,
                "labels": {**pod.labels, "of": "plot"},
                "annotations": dict(pod.annotations),
            }
            if pod.owner is not None:
                owners = self.village.owners
                kind, version, of, uid = owners[pod.owner % len(owners)]
                uid = uid if pod.keeps_uid else f"made-up-{at}"
                reference = {"apiVersion": version, "kind": kind, "name": of, "uid": uid}
                metadata["ownerReferences"] = [{**reference, "controller": pod.is_controller}]
            body = {"metadata": metadata, "spec": {"containers": [container], "restartPolicy": "Never"}}
            created = self.core.create_namespaced_pod(self.namespace, body)
            try:
                if pod.runs:
                    self.village.run_in(self.namespace, name)
            except (NotFoundException, ApiException):  # a controller or the garbage collector was faster
                continue
            made[name] = pod.idles
            if pod.gpus:
                self.source.pods[name] = (created.metadata.uid, IDLE_S if pod.idles else 1.0)
        return made

    def end(self) -> None:
        self.source.pods.clear()
        self.core.delete_collection_namespaced_pod(self.namespace, label_selector="of=plot", grace_period_seconds=0)
        for each in self.core.list_namespaced_service(self.namespace, label_selector="of=plot").items:
            self.core.delete_namespaced_service(each.metadata.name, self.namespace)
        self.core.delete_collection_namespaced_resource_quota(self.namespace)
        listed = self.core.list_namespaced_pod
        wait_for(lambda: not listed(self.namespace, label_selector="of=plot").items, "its pods to be gone", each_s=0.1)


@pytest.fixture(scope="module")
def village(plane: ControlPlane) -> Iterator[Village]:  # noqa: F811
    made = Village(plane, "village")
    made.settle()
    yield made
    made.clear()


# Holders that become idle at the same time are frozen. Every plot would then delay everything and prove nothing.
UNFROZEN = POLICY._replace(freeze_max=0.0)


def test_forged_objects_change_nothing_in_another_namespace(village: Village) -> None:
    print(f"GPU_EXPORTER_HOSTILE_SEED={SEED}")
    village.plane.core.create_namespace({"metadata": {"name": "hostile"}})
    wait_for(lambda: village.plane.has_account("hostile"), "the namespace's ServiceAccount")
    hostile = Hostile(village, "hostile")
    honest = village.look(policy=UNFROZEN)
    stages = {each.stage for each in honest.decisions.values()}
    assert stages >= {UNDERUSED, "active"} and all(
        why_not(each, honest_of(honest, each), VERBS, ()) is None for each in honest.targets.values()
    ), "without it they would be acted on"

    @seed(SEED)
    @EXAMPLES
    @given(PLOTS)
    def meddle(plot: Plot) -> None:
        try:
            hostile.begin(plot)
            assert village.look(hostile.source, policy=UNFROZEN).said() == honest.said()
        finally:
            hostile.end()

    meddle()


def honest_of(look: SlurmSnapshot, target: Target) -> dict[HolderName, Decision]:
    """The decisions on the holders in a target."""
    names = {part.name for part in target.ends if part.units != 0}
    return {each.name: each for each in look.decisions.values() if each.name in names and each.stage == UNDERUSED}


RANK = ("candidate", UNDERUSED)


def test_forged_objects_in_a_shared_namespace_only_delay_and_targets_are_idle(village: Village) -> None:
    print(f"GPU_EXPORTER_HOSTILE_SEED={SEED}")
    hostile = Hostile(village, village.namespace)
    honest = village.look(policy=UNFROZEN)
    delayed: set[str] = set()

    @seed(SEED)
    @EXAMPLES
    @given(PLOTS)
    def meddle(plot: Plot) -> None:
        try:
            made = hostile.begin(plot)
            alive = set(village.alive())
            look = village.look(hostile.source, policy=UNFROZEN)
            for name, before in honest.decisions.items():
                after = look.decisions.get(name)
                if after is None or name not in alive:
                    continue
                raised = after.stage in RANK and (
                    before.stage not in RANK or RANK.index(after.stage) > RANK.index(before.stage)
                )
                assert not raised, f"{name}: {before.stage} became {after.stage}: {after.reason}"
                if after.stage != before.stage:
                    delayed.add(after.stage)
                    assert after.reason, name
            for target in look.targets.values():
                held = why_not(target, honest_of(look, target), VERBS, ())
                if held is None:
                    would_end = {part.name.name for part in target.ends if part.units != 0}
                    truth = {**dict.fromkeys(village.honest, True), **made}
                    truth |= {name: run > 100 for name, (_, run) in village.honest.items()}
                    assert all(truth[name] for name in would_end), (target.title, would_end)
        finally:
            hostile.end()

    meddle()
    print(f"delayed: {sorted(delayed)}")
