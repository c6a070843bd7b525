"""A target lists exactly the pods that an act ends. The real controllers of each kind prove it: one object is suspended.

JobSet, Kubeflow's training operator and MPI operator, Kueue and the controller manager are real; a test writes the pod
status that the kubelets would write.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from kubernetes import client
from kubernetes.client.exceptions import NotFoundException

from gpu_exporter.common.clock import SYSTEM_CLOCK
from gpu_exporter.reconciler.actor import DONE, Entry
from gpu_exporter.reconciler.decision.surroundings import Reference
from gpu_exporter.reconciler.decision.target import Skipped, Target, why_not
from gpu_exporter.reconciler.evidence.records import HolderName
from gpu_exporter.reconciler.kubernetes.actor import PodActor
from gpu_exporter.reconciler.kubernetes.client.api import Api
from gpu_exporter.reconciler.kubernetes.shapes import SHAPES
from gpu_exporter.reconciler.kubernetes.targets import ACTED
from gpu_exporter.reconciler.marks import MarkError
from tests.component.pods_bench import POLICY
from tests.component.test_surroundings import Site
from tests.testbed.control_plane import ControlPlane
from tests.testbed.gpu_resources import GPU_RESOURCES
from tests.testbed.operators import (
    OBJECTS,
    create,
    job_spec,
    jobset_spec,
    kubeflow_spec,
    make_queue,
    pod_template,
    start_with_operators,
)
from tests.testbed.processes import wait_for

pytestmark = pytest.mark.kubernetes
WALL = SYSTEM_CLOCK.wall()
VERBS = ("suspend", "deactivate", "stop")
QUEUE = {"kueue.x-k8s.io/queue-name": "team"}


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with start_with_operators(tmp_path_factory.mktemp("operators")) as started:
        yield started


class Ground(Site):
    """A namespace in which real controllers make the pods of objects."""

    def __init__(self, plane: ControlPlane, namespace: str) -> None:
        super().__init__(plane, namespace)
        self.admin = PodActor(Api(ControlPlane.connect(plane.admin)), POLICY, SYSTEM_CLOCK, resources=GPU_RESOURCES)
        self.custom = client.CustomObjectsApi(plane.api)

    def make(
        self, kind: str, name: str = "train", spec: Any = None, pods: int | None = None, **labels: str
    ) -> Reference:
        """Make an object, and run its pods once there are enough."""
        before, running = set(self.alive()), set[str]()
        made = create(self.plane, self.namespace, kind, name, spec, **labels)
        wanted = pods if pods is not None else count_pods(spec or OBJECTS[kind][1])

        def has_all() -> bool:
            pods = set(self.alive()) - before
            for pod in pods - running:
                self.set_running(pod, 9000.0)  # some controllers make further pods when the first ones run
            running.update(pods)
            return len(running) >= wanted

        wait_for(has_all, f"{wanted} pods of {kind} {name}", each_s=0.3)
        group, version, _ = OBJECTS[kind][0]
        return Reference(group, version, kind, name, made["metadata"]["uid"])

    def list_pods(self) -> Sequence[Any]:
        return self.plane.core.list_namespaced_pod(self.namespace).items  # type: ignore[no-any-return]

    def alive(self) -> list[str]:
        return sorted(
            pod.metadata.name
            for pod in self.list_pods()
            if pod.metadata.deletion_timestamp is None and pod.status.phase not in ("Succeeded", "Failed")
        )

    def pod(self, name: str, gpus: int = 0, owner: Reference | None = None, **labels: str) -> str:
        """Make a running pod without a controller."""
        template = pod_template(gpus, **labels)
        metadata: dict[str, Any] = {"name": name, "labels": labels}
        if owner is not None:
            version = "/".join(filter(None, (owner.group, owner.version)))
            reference = {"apiVersion": version, "kind": owner.kind, "name": owner.name, "uid": owner.uid}
            metadata["ownerReferences"] = [{**reference, "controller": True}]
        self.plane.core.create_namespaced_pod(self.namespace, {**template, "metadata": metadata})
        self.set_running(name, 9000.0)
        return name

    def read(self, reference: Reference) -> Target:
        return self.admin.read(reference, self.namespace, VERBS, 9000.0, SYSTEM_CLOCK.wall())

    def ends_of(self, reference: Reference) -> set[str]:
        return {part.name.name for part in self.read(reference).ends}

    def rest(self, reference: Reference) -> set[str]:
        """Suspend the object as the reconciler does. Returns the pods that its controllers end."""
        before = set(self.alive())

        def act() -> tuple[Target, Entry] | None:
            """None if a controller has changed the object since it was read: then the reconciler reads it again."""
            target = self.read(reference)
            try:
                self.admin.rehearse(target)
                entry = self.admin.open_entry(target, "0a0b0c0d", SYSTEM_CLOCK.wall())
                self.admin.act(target, entry)
            except MarkError as exc:
                if "status 409" not in str(exc):
                    raise
                return None
            return target, entry

        target, entry = wait_for(act, "the object to be at rest")
        assert self.admin.look(entry) == DONE
        expected = {part.name.name for part in target.ends}
        with contextlib.suppress(AssertionError):  # the pods that ended until then are compared
            wait_for(lambda: not expected & set(self.alive()), "the pods to end", 30.0, 0.3)
        self.admin.tell(entry, "done")
        return before - set(self.alive())

    def clear(self) -> None:
        """Remove the objects whose pods the controllers would replace."""
        for (group, version, plural), _ in OBJECTS.values():
            with contextlib.suppress(NotFoundException):
                self.custom.delete_collection_namespaced_custom_object(
                    group, version, self.namespace, plural, propagation_policy="Background"
                )
        self.plane.core.delete_collection_namespaced_pod(self.namespace, grace_period_seconds=0)

    def live(self, reference: Reference) -> dict[str, Any]:
        plural = next(plural for (group, _, plural), _ in OBJECTS.values() if plural == f"{reference.kind.lower()}s")
        where = reference.group, reference.version, self.namespace, plural, reference.name
        return dict(self.custom.get_namespaced_custom_object(*where))


def count_pods(spec: dict[str, Any]) -> int:
    """The number of pods that an object with this spec makes."""
    if "parallelism" in spec:
        return int(spec["parallelism"])
    if "replicatedJobs" in spec:
        return sum(each["replicas"] * each["template"]["spec"]["parallelism"] for each in spec["replicatedJobs"])
    (roles,) = (value for key, value in spec.items() if key.endswith("ReplicaSpecs"))
    return sum(each["replicas"] for each in roles.values())


@pytest.fixture
def ground(plane: ControlPlane, request: pytest.FixtureRequest) -> Iterator[Ground]:
    name = re.sub("[^a-z0-9]+", "-", request.node.name.lower().removeprefix("test_"))
    made = Ground(plane, f"{name[:40].strip('-')}-{name[-12:].strip('-')}")
    yield made
    made.clear()


def test_every_shape_except_notebooks_is_tested_with_its_controller() -> None:
    assert {kind for _, kind in SHAPES} - {"Notebook"} == set(OBJECTS)


@pytest.mark.parametrize("kind", OBJECTS)
def test_a_target_lists_exactly_the_pods_that_its_controllers_end(ground: Ground, kind: str) -> None:
    """There are also another object of the kind, pods made by hand, and foreign pods that name the object's group."""
    reference = ground.make(kind)
    ground.make(kind, "beside")
    ground.pod("by-hand", 1)
    others = set(ground.alive())
    target = ground.read(reference)
    ends = {part.name.name for part in target.ends}
    assert (target.obstacle, target.strangers, target.unread, target.above, target.note) == (None, (), (), "", "")
    roles = [part.role for part in target.ends]
    assert target.wants == {role: roles.count(role) for role in roles}, "it has all that it wants"
    assert len(ends) == count_pods(OBJECTS[kind][1])
    with_gpus = {part.name.name for part in target.ends if part.units}
    assert len(with_gpus) in (len(ends), len(ends) - 1), "the driver, master or launcher has none"
    assert ground.rest(reference) == ends
    assert set(ground.alive()) == others - ends
    live = ground.live(reference)
    assert live["metadata"]["annotations"][ACTED].startswith("suspend 20")
    held = why_not(ground.read(reference), {}, VERBS, ())
    assert held is not None and held.reason == "rests"


@pytest.mark.parametrize("kind", ["Job", "JobSet", "TFJob", "PyTorchJob"])
def test_a_pod_that_a_controller_could_adopt_is_a_stranger(ground: Ground, kind: str) -> None:
    """The pod has the labels of a member and no controller. Whether a controller adopts it depends on timing."""
    reference = ground.make(kind)
    member = ground.plane.pod(sorted(ground.ends_of(reference))[0], ground.namespace)
    labels = {key: value for key, value in member["metadata"]["labels"].items() if "hash" not in key}
    ground.pod("orphan", 1, None, **labels)
    target = ground.read(reference)
    if "orphan" in {part.name.name for part in target.ends}:
        # A controller with one pod too many may have deleted the adopted one by now.
        assert all(pod.metadata.owner_references for pod in ground.list_pods() if pod.metadata.name == "orphan")
    else:
        assert any("orphan" in each for each in target.strangers), "no act while that is not decided"
    died = ground.rest(reference)
    assert died <= {part.name.name for part in target.ends} | {"orphan"}


def test_pods_that_name_a_member_as_their_owner_are_strangers(ground: Ground) -> None:
    """Like the executors of a Spark driver, these pods name a member as owner. The member may or may not control them."""
    reference = ground.make("Job")
    (member, *_) = sorted(ground.ends_of(reference))

    def pod(name: str, above: str, gpus: int, **more: bool) -> None:
        uid = ground.plane.pod(above, ground.namespace)["metadata"]["uid"]
        owner = {"apiVersion": "v1", "kind": "Pod", "name": above, "uid": uid, **more}
        template = pod_template(gpus)
        body = {**template, "metadata": {"name": name, "ownerReferences": [owner]}}
        ground.plane.core.create_namespaced_pod(ground.namespace, body)
        ground.set_running(name, 9000.0)

    pod("executor", member, 0, controller=True)
    pod("worker", member, 1)
    pod("below", "worker", 0)
    target = ground.read(reference)
    held = why_not(target, {}, VERBS, ())
    assert held is not None and held.reason == "stranger"
    dependents = {"executor", "worker", "below"}
    assert {each.split()[0] for each in target.strangers} == dependents
    ground.rest(reference)
    wait_for(lambda: not dependents & set(ground.alive()), "the garbage collector", each_s=0.5)


def test_a_job_of_an_earlier_jobset_with_the_same_name_is_a_stranger(ground: Ground) -> None:
    """JobSet's controller finds its Jobs by the name of their owner."""
    reference = ground.make("JobSet")
    (pod,) = ground.job("old", 1)
    owner = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "name": "train", "uid": "of-the-last-one"}
    change = {"metadata": {"ownerReferences": [{**owner, "controller": True}], "finalizers": ["example.org/keep"]}}
    batch = client.BatchV1Api(ground.plane.api)
    batch.patch_namespaced_job(
        "old", ground.namespace, change
    )  # the finalizer keeps the Job until the test has read it
    target = ground.read(reference)
    batch.patch_namespaced_job("old", ground.namespace, {"metadata": {"finalizers": None}})
    assert [each for each in target.strangers if "earlier object with the target's name" in each], pod


@pytest.mark.parametrize("kind", ["JobSet", "PyTorchJob", "MPIJob"])
def test_a_pod_that_names_the_object_is_a_member_or_a_stranger_by_kind(ground: Ground, kind: str) -> None:
    reference = ground.make(kind)
    member = ground.plane.pod(sorted(ground.ends_of(reference))[-1], ground.namespace)
    labels = dict(member["metadata"]["labels"]) if kind != "JobSet" else {}
    ground.pod("forged", 1, reference, **labels)
    target = ground.read(reference)
    is_member = "forged" in {part.name.name for part in target.ends}
    assert is_member is (kind != "JobSet")
    assert is_member or any("forged" in each for each in target.strangers)
    assert ground.rest(reference) <= {part.name.name for part in target.ends}


def test_pods_of_a_deployment_below_a_jobset_do_not_end_with_it(ground: Ground) -> None:
    """The JobSet is not in the Deployment's target either."""
    reference = ground.make("JobSet")
    (web,) = ground.deployment("web", 1)
    owner = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "name": "train", "uid": reference.uid}
    change = {"metadata": {"ownerReferences": [{**owner, "controller": True}]}}
    client.AppsV1Api(ground.plane.api).patch_namespaced_deployment("web", ground.namespace, change)
    assert web not in ground.ends_of(reference)
    decisions = ground.judge()
    around = decisions[web].around
    assert around is not None and around.target is None, "nothing is ever done to a Deployment"
    assert around.group == "apps/v1/Deployment/web", "the mark does not name the JobSet"
    assert web not in ground.rest(reference)


@pytest.mark.parametrize(
    ("kind", "spec", "pods", "reason"),
    [
        ("Job", job_spec(4), 3, "waiting"),
        ("PyTorchJob", kubeflow_spec("pytorchReplicaSpecs", "pytorch", Master=(1, 1), Worker=(3, 1)), 3, "waiting"),
        ("JobSet", jobset_spec(worker=(4, 1, 1)), 3, "waiting"),
        ("JobSet", jobset_spec(driver=(1, 1, 1), worker=(1, 3, 1)), 3, "waiting"),
    ],
)
def test_an_object_that_wants_more_pods_than_it_has_is_waiting(
    ground: Ground, kind: str, spec: Any, pods: int, reason: str
) -> None:
    """A quota leaves no room for the last pod, so the others may be waiting for it."""
    quota = {"metadata": {"name": "few"}, "spec": {"hard": {"pods": str(pods)}}}
    core = ground.plane.core
    core.create_namespaced_resource_quota(ground.namespace, quota)
    read = core.read_namespaced_resource_quota
    wait_for(lambda: (read("few", ground.namespace).status.used or {}).get("pods") == "0", "the quota", each_s=0.1)
    reference = ground.make(kind, spec=spec, pods=pods)
    held = why_not(ground.read(reference), {}, VERBS, ())
    assert held is not None and held.reason == reason, held


def test_a_jobset_whose_jobs_a_quota_refuses_is_waiting(ground: Ground) -> None:
    """The Job does not exist, so no pod of it is missing."""
    quota = {"metadata": {"name": "few"}, "spec": {"hard": {"count/jobs.batch": "2"}}}
    core = ground.plane.core
    core.create_namespaced_resource_quota(ground.namespace, quota)
    read = core.read_namespaced_resource_quota
    wait_for(lambda: read("few", ground.namespace).status.used or {}, "the quota", each_s=0.1)
    reference = ground.make("JobSet", spec=jobset_spec(worker=(4, 1, 1)), pods=2)
    target = ground.read(reference)
    assert target.wants == {"worker": 4}
    held = why_not(target, {}, VERBS, ())
    assert held == Skipped("waiting", "it waits for 2 of 4 members of worker")


def finish(ground: Ground, name: str) -> None:
    state = {"name": "train", "state": {"terminated": {"exitCode": 0}}, "ready": False, "restartCount": 0}
    container = ground.plane.pod(name, ground.namespace)["spec"]["containers"][0]["name"]
    status = {"phase": "Succeeded", "containerStatuses": [{**state, "name": container, "image": "", "imageID": ""}]}
    ground.plane.core.patch_namespaced_pod_status(name, ground.namespace, {"status": status})


@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        ("Job", job_spec(3)),
        ("JobSet", jobset_spec(driver=(1, 1, 1), worker=(2, 1, 1))),
        ("PyTorchJob", kubeflow_spec("pytorchReplicaSpecs", "pytorch", Master=(1, 1), Worker=(2, 1))),
    ],
)
def test_members_that_have_ended_do_not_make_an_object_waiting(ground: Ground, kind: str, spec: Any) -> None:
    """If the reconciler waited for such members, it would never act."""
    reference = ground.make(kind, spec=spec)
    pods = sorted(ground.ends_of(reference))
    finish(ground, pods[-1])

    def is_whole() -> bool:
        target = ground.read(reference)
        held = why_not(target, {}, VERBS, ())
        return len(target.ends) == 2 and held is not None and held.reason == "members"

    wait_for(is_whole, "the two that are left to be all of it", each_s=0.3)
    assert ground.rest(reference) == set(pods[:-1])


def test_a_launcher_and_its_workers_are_one_target(ground: Ground) -> None:
    reference = ground.make("MPIJob")
    target = ground.read(reference)
    parts = {part.role: part for part in target.ends}
    assert (parts["launcher"].units, parts["worker"].units) == (0, 1)
    assert [part.name.name for part in target.beside] == [parts["launcher"].name.name]
    around = ground_decisions(ground, target)
    assert {each.target for each in around} == {reference}


def ground_decisions(ground: Ground, target: Target) -> list[Any]:
    """The surroundings of the object's members with GPUs, as they are on marks."""
    for part in target.ends:
        if part.units:
            ground.set_run(part.name.name, 7000.0)
    return [each.around for each in ground.judge().values()]


@pytest.mark.parametrize("kind", ["Job", "JobSet", "PyTorchJob"])
def test_an_object_of_kueue_is_deactivated_and_kueue_ends_its_pods(ground: Ground, kind: str) -> None:
    make_queue(ground.plane, ground.namespace, 8)
    spec = dict(OBJECTS[kind][1])
    if kind == "PyTorchJob":
        spec = {**spec, "runPolicy": {**spec["runPolicy"], "suspend": True}}
    else:
        spec["suspend"] = True  # Kueue's webhook would set this
    reference = ground.make(kind, spec=spec, **QUEUE)
    target = ground.read(reference)
    assert (target.verb, target.live.kind) == ("deactivate", "Workload")
    ends = {part.name.name for part in target.ends}
    assert ground.rest(reference) == ends and len(ends) == count_pods(spec)
    workloads = ground.custom.list_namespaced_custom_object("kueue.x-k8s.io", "v1beta2", ground.namespace, "workloads")
    (workload,) = workloads["items"]
    assert workload["spec"]["active"] is False
    notes = [workload["metadata"]["annotations"][ACTED], ground.live(reference)["metadata"]["annotations"][ACTED]]
    assert notes[0] == notes[1], "Kueue may make its Workload again"
    held = why_not(ground.read(reference), {}, VERBS, {notes[0]})
    assert held is not None and held.reason == "rests"
    assert HolderName("kubernetes", ground.namespace, min(ends))
