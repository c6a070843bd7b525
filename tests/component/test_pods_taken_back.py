"""Actions on a real API server with its controllers: what is suspended, what never is, and what a crash leaves."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client
from kubernetes.client.exceptions import ApiException, NotFoundException

from gpu_exporter.defaults import Actions
from gpu_exporter.reconciler.actions.actor import Actor
from gpu_exporter.reconciler.actions.proofs import Record, RecordKey, Warned
from gpu_exporter.reconciler.actions.runner import ActionRunner
from gpu_exporter.reconciler.audit import AuditLog
from gpu_exporter.reconciler.cycle import Cycle
from gpu_exporter.reconciler.evidence import HolderName
from gpu_exporter.reconciler.judge import judge_of
from gpu_exporter.reconciler.kubernetes.actor import ACTED, STOPPED, PodActor
from gpu_exporter.reconciler.kubernetes.api import Api
from gpu_exporter.reconciler.policy import LABEL
from gpu_exporter.reconciler.rulebook import Rulebook
from tests.component.test_pods_marked import plane  # noqa: F401  # a fixture
from tests.component.test_surroundings import Site
from tests.testbed.chart import Helm, find
from tests.testbed.control_plane import ControlPlane
from tests.testbed.processes import wait_for

pytestmark = pytest.mark.kubernetes
# How long an owner must have been warned is shown in tests/unit/reconciler/test_actions.py.
ACT = Actions(mode="act", kinds="suspend, deactivate, stop", warned_for=0.0, cycle_max=5, hour_max=100)
POOL = "nvidia_com_gpu"
CRDS = (  # group, version, plural, kind
    ("jobset.x-k8s.io", "v1alpha2", "jobsets", "JobSet"),
    ("kubeflow.org", "v1", "pytorchjobs", "PyTorchJob"),
    ("kubeflow.org", "v1beta1", "notebooks", "Notebook"),
    ("kueue.x-k8s.io", "v1beta1", "workloads", "Workload"),
    ("example.org", "v1", "pipelines", "Pipeline"),
    *(
        ("kubeflow.org", "v1", f"{kind.lower()}jobs", f"{kind}Job")
        for kind in ("JAX", "MPI", "Paddle", "TF", "XGBoost")
    ),
)


class SaidProofs:
    """Proofs as a test says them: everybody was warned long ago, the policy was right, and eight GPUs are wanted."""

    def __init__(self) -> None:
        self.unwarned: set[str] = set()
        self.record = Record(100.0, 1.0)
        self.waiting = 8.0

    def read_warnings(self, names: Collection[HolderName]) -> Mapping[HolderName, Warned]:
        return Everybody(self.unwarned)

    def read_records(self) -> Mapping[RecordKey, Record]:
        return {("policy", "batch"): self.record, ("policy", "interactive"): self.record}

    def read_demand(self, names: Collection[HolderName]) -> Mapping[HolderName, Mapping[str, float]]:
        return {name: {POOL: self.waiting} for name in names} if self.waiting else {}


class Everybody(dict[HolderName, Warned]):
    """Every holder but these pods."""

    def __init__(self, but: Collection[str]) -> None:
        self._but = but

    def __contains__(self, name: object) -> bool:
        return isinstance(name, HolderName) and name.name not in self._but

    def __getitem__(self, name: HolderName) -> Warned:
        return Warned(time.time() - 1.0, ("gpu-owners",))  # later than any holder began


class Died(BaseException):
    """The process is gone."""


class MortalApi(Api):
    """Dies at the call of this number: before it, or when its answer comes."""

    def __init__(self, connection: client.ApiClient, at: int, *, answered: bool) -> None:
        super().__init__(connection)
        self._left, self._answered = at, answered

    def call(self, function: Any, *arguments: Any, **options: Any) -> Any:
        self._left -= 1
        if self._left == 0 and not self._answered:
            raise Died
        try:
            return super().call(function, *arguments, **options)
        finally:
            if self._left == 0:
                raise Died


class Team(Site):
    """A namespace with a reconciler that acts."""

    settings = ACT
    actor: Actor | None = None
    leads = True

    def __init__(self, plane: ControlPlane, namespace: str, path: Path) -> None:  # noqa: F811
        self.proofs = SaidProofs()
        self.audit_path = path / "audit.jsonl"
        self.done: list[tuple[str, str]] = []
        self.held: set[str] = set()
        super().__init__(plane, namespace)

    def count_action(self, action: str, result: str) -> None:
        self.done.append((action, result))

    def count_held(self, reason: str) -> None:
        self.held.add(reason)

    def restart(self) -> None:
        super().restart()
        book = Rulebook(self.policy)
        audit = AuditLog(self.audit_path, book, self.clock, lambda: pytest.fail("audit"))
        actor = self.actor or PodActor(Api(ControlPlane.connect(self.plane.admin)), self.policy)
        runner = ActionRunner(
            self.settings,
            self.proofs,  # type: ignore[arg-type]  # as the real one answers, which test_proofs shows
            [actor],
            {"kubernetes": self.marker},
            self,
            self.clock,
            audit,
            lambda: self.leads,
        )
        judge = judge_of(self.source, [self.marker], book, self.clock)
        self.cycle = Cycle(judge, [self.marker], self.policy, self.tally, self.clock, audit=audit, act=runner.run)

    def act(self) -> tuple[list[tuple[str, str]], set[str]]:
        """A cycle that marks, and one that may act: what was done in both, and why nothing was done."""
        self.done, self.held = [], set()
        self.run()
        self.run()
        return self.done, self.held

    def read(self, group: str, version: str, plural: str, name: str) -> dict[str, Any]:
        custom = client.CustomObjectsApi(self.plane.api)
        return dict(custom.get_namespaced_custom_object(group, version, self.namespace, plural, name))

    def live_job(self, name: str) -> dict[str, Any]:
        return self.read("batch", "v1", "jobs", name)

    def is_suspended(self, name: str) -> bool:
        return bool(self.live_job(name)["spec"].get("suspend"))

    def records(self) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.audit_path.read_text("utf-8").splitlines()]
        return [line for line in lines if line["action"] == "action"]

    def last_event(self, kind: str, name: str) -> tuple[str, str]:
        selector = f"involvedObject.kind={kind},involvedObject.name={name}"
        found = self.plane.core.list_namespaced_event(self.namespace, field_selector=selector).items
        event = max((each for each in found if each.reason.startswith("Gpu")), key=lambda each: each.event_time)
        return event.reason, event.message


@pytest.fixture(scope="module")
def kinds(plane: ControlPlane) -> None:  # noqa: F811
    """Kinds of objects whose controllers are not here: what is written to them is looked at."""
    plane.define(*CRDS)


@pytest.fixture
def team(plane: ControlPlane, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Team]:  # noqa: F811
    name = re.sub("[^a-z0-9]+", "-", request.node.name.removeprefix("test_"))
    made = Team(plane, f"{name[:40].strip('-')}-{name[-15:].strip('-')}", tmp_path)
    yield made
    client.BatchV1Api(plane.api).delete_collection_namespaced_job(made.namespace, propagation_policy="Background")
    plane.core.delete_collection_namespaced_pod(made.namespace, grace_period_seconds=0)


def gone(team: Team, selector: str) -> bool:
    """Whether the controller has ended these pods, as the kubelet would confirm it."""
    for pod in team.plane.core.list_namespaced_pod(team.namespace, label_selector=selector).items:
        if pod.metadata.deletion_timestamp is not None:
            with contextlib.suppress(NotFoundException):  # it went by itself, since it is on no node
                team.delete_pod(pod.metadata.name)
    return not team.pods(selector)


def resume(team: Team, name: str) -> None:
    batch = client.BatchV1Api(team.plane.api)
    batch.patch_namespaced_job(name, team.namespace, {"spec": {"suspend": False}})


def test_a_job_is_suspended_as_a_whole_once_and_its_owner_has_the_last_word(team: Team) -> None:
    team.job("train", 2)
    assert team.act() == ([("suspend", "done")], set())
    job = team.live_job("train")
    assert job["spec"]["suspend"] is True
    assert job["metadata"]["annotations"][ACTED].startswith("suspend 20")
    reason, note = team.last_event("Job", "train")
    assert reason == "GpuSuspended"
    assert "All of its 2 GPUs were idle since" in note
    assert "kubectl patch -n" in note and '{"spec":{"suspend":false}}' in note
    begun, done = (team.records()[at] for at in (0, -1))
    assert (begun["result"], done["result"], done["act"], done["target"]) == (
        "begins",
        "done",
        "suspend",
        "batch/v1/Job/train",
    )
    assert (done["receivers"], done["decisions"], done["regrets"], done["waited_for"]) == (
        ["gpu-owners"],
        100,
        1,
        {POOL: 8},
    )
    wait_for(lambda: gone(team, "job-name=train"), "the real controller to end its pods", 60, 0.2)
    team.source.pods.clear()
    assert team.act() == ([], set())

    resume(team, "train")
    (first, second) = team.run_all("job-name=train", 2)
    assert team.act() == ([], {"acted"})
    assert [team.labels(pod)[LABEL] for pod in (first, second)] == ["underused"] * 2, "marked, and left alone"
    assert not team.is_suspended("train")


def test_one_busy_member_one_without_a_warning_or_a_wish_keep_the_whole_job(team: Team) -> None:
    pods = team.job("train", 3)
    team.proofs.unwarned = {pods[2]}
    assert team.act() == ([], {"not_warned"})
    team.proofs.unwarned = set()
    team.set_run(pods[1], 1.0)
    assert team.act() == ([], set())
    team.set_run(pods[1], 7000.0)
    # A wish that the last look at the namespace has not seen yet, since it may be a minute old.
    team.run()
    team.annotate("job", "train", exempt_until="2099-01-01T00:00:00Z")
    team.done, team.held = [], set()
    team.run()
    assert (team.done, team.held) == ([], {"exempt"})
    assert not team.is_suspended("train")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"record": Record(49.0, 0.0)}, "shadow"),
        ({"record": Record(100.0, 6.0)}, "regret"),
        ({"waiting": 0.0}, "no_demand"),
    ],
)
def test_what_is_not_proven_is_not_done(team: Team, change: dict[str, Any], reason: str) -> None:
    team.job("train", 1)
    for name, value in change.items():
        setattr(team.proofs, name, value)
    assert team.act() == ([], {reason})
    assert not team.is_suspended("train")


def test_no_more_is_taken_than_is_waited_for_and_than_the_limits_allow(team: Team) -> None:
    team.proofs.waiting = 3.0
    for name in ("a", "b", "c"):
        team.job(name, 2)
    done, held = team.act()
    assert done == [("suspend", "done")] * 2, "two of two GPUs each, for three that are wanted"
    assert "no_demand" in held
    team.proofs.waiting = 9.0
    team.settings = ACT._replace(hour_max=1)
    team.job("d", 1)
    team.restart()
    done, held = team.act()
    assert done == [("suspend", "done")] and "limit" in held


def test_shadow_says_it_once_and_changes_nothing(team: Team) -> None:
    team.settings = ACT._replace(mode="shadow")
    team.restart()
    team.job("train", 1)
    before = team.live_job("train")["metadata"]
    assert team.act() == ([("suspend", "shadow")], set())
    assert team.act() == ([], set())
    after = team.live_job("train")["metadata"]
    assert (after["generation"], after.get("annotations")) == (before["generation"], before.get("annotations"))
    assert team.records() == []


def test_what_has_no_controller_of_a_known_kind_is_left_alone(team: Team, kinds: None) -> None:
    bare = team.run_pod("bare")
    team.source.pods["bare"] = (bare, 7000.0)
    team.deployment("web", 1)
    team.own(CRDS[4], "pipe", {}, 1)
    team.job("slow", 1)
    team.annotate("job", "slow", **{"class": "x"})
    done, held = team.act()
    assert done == [("suspend", "done")]
    assert held == {"kind"}
    assert team.is_suspended("slow")


def test_a_run_of_a_cron_job_is_left_alone(team: Team) -> None:
    """Suspended, it would be the last run of one that forbids two at a time."""
    team.job("run", 1)
    batch = client.BatchV1Api(team.plane.api)
    job = batch.read_namespaced_job("run", team.namespace)
    template = {"spec": {"containers": [{"name": "c", "image": "i"}], "restartPolicy": "Never"}}
    spec = {"schedule": "0 0 1 1 *", "concurrencyPolicy": "Forbid", "jobTemplate": {"spec": {"template": template}}}
    made = batch.create_namespaced_cron_job(team.namespace, {"metadata": {"name": "nightly"}, "spec": spec})
    owner = {"apiVersion": "batch/v1", "kind": "CronJob", "name": "nightly", "uid": made.metadata.uid}
    change = {"metadata": {"ownerReferences": [owner | {"controller": True}]}}
    batch.patch_namespaced_job(job.metadata.name, team.namespace, change)
    assert team.act() == ([], {"kind"})
    assert not team.is_suspended("run")


@pytest.mark.parametrize("kind", ["Pipeline", "OfNoApi"])
def test_a_job_of_another_controller_is_left_to_that_one(team: Team, kinds: None, kind: str) -> None:
    team.job("step", 1)
    custom = client.CustomObjectsApi(team.plane.api)
    body = {"apiVersion": "example.org/v1", "kind": "Pipeline", "metadata": {"name": "p"}}
    made = custom.create_namespaced_custom_object("example.org", "v1", team.namespace, "pipelines", body)
    owner = {"apiVersion": "example.org/v1", "kind": kind, "name": "p", "uid": made["metadata"]["uid"]}
    change = {"metadata": {"ownerReferences": [owner | {"controller": True}]}}
    client.BatchV1Api(team.plane.api).patch_namespaced_job("step", team.namespace, change)
    assert team.act()[1] == {"kind"}
    assert not team.is_suspended("step")


@pytest.mark.parametrize(
    ("crd", "spec", "path"),
    [
        (CRDS[0], {"replicatedJobs": []}, ("spec", "suspend")),
        (CRDS[1], {"runPolicy": {"cleanPodPolicy": "None"}}, ("spec", "runPolicy", "suspend")),
    ],
    ids=["jobset", "pytorch"],
)
def test_groups_of_other_kinds_have_their_own_switch(
    team: Team, kinds: None, crd: tuple[str, str, str, str], spec: Any, path: Sequence[str]
) -> None:
    team.own(crd, "train", spec, 2)
    assert team.act() == ([("suspend", "done")], set())
    found: Any = team.read(*crd[:3], "train")
    assert found["metadata"]["annotations"][ACTED]
    assert found["spec"] == {
        **spec,
        **({"suspend": True} if len(path) == 2 else {"runPolicy": {**spec["runPolicy"], "suspend": True}}),
    }


def test_a_notebook_is_stopped_and_needs_its_own_permission(team: Team, kinds: None) -> None:
    team.policy = team.policy._replace(interactive_after=8000.0)
    team.settings = ACT._replace(kinds="suspend")
    team.restart()
    team.own(CRDS[2], "lab", {}, 1, **{"notebook-name": "lab"})
    assert team.act()[1] == {"kind"}
    team.settings = ACT
    team.restart()
    assert team.act()[0] == [("stop", "done")]
    assert team.read(*CRDS[2][:3], "lab")["metadata"]["annotations"][STOPPED].startswith("20")
    assert team.last_event("Notebook", "lab")[0] == "GpuStopped"


@pytest.mark.parametrize("labels", [{"kueue.x-k8s.io/queue-name": "team"}, {}], ids=["queue", "all"])
def test_what_kueue_runs_is_deactivated_in_its_workload(team: Team, kinds: None, labels: dict[str, str]) -> None:
    """It may be set to manage what has no label, too."""
    team.own(CRDS[1], "train", {}, 1, **labels)
    if labels:
        assert team.act()[1] == {"kueue"}, "no Workload: nobody knows what holds the quota"
    owner = team.read(*CRDS[1][:3], "train")
    uid = owner["metadata"]["uid"]
    reference = {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "name": "train", "uid": uid, "controller": True}
    metadata = {"name": "wl", "labels": {"kueue.x-k8s.io/job-uid": uid}, "ownerReferences": [reference]}
    body = {"apiVersion": "kueue.x-k8s.io/v1beta1", "kind": "Workload", "metadata": metadata, "spec": {"active": True}}
    custom = client.CustomObjectsApi(team.plane.api)
    custom.create_namespaced_custom_object("kueue.x-k8s.io", "v1beta1", team.namespace, "workloads", body)
    assert team.act()[0] == [("deactivate", "done")]
    workload = team.read(*CRDS[3][:3], "wl")
    assert workload["spec"]["active"] is False
    assert workload["metadata"]["annotations"][ACTED].startswith("deactivate 20")
    assert "suspend" not in (team.read(*CRDS[1][:3], "train")["spec"].get("runPolicy") or {})


class MeddlingApi(Api):
    """Somebody changes the Job between the look at it and the patch."""

    def __init__(self, connection: client.ApiClient, team: Team) -> None:
        super().__init__(connection)
        self._team = team

    def call(self, function: Any, *arguments: Any, **options: Any) -> Any:
        if function.__name__ == "patch_namespaced_custom_object":
            self._team.annotate("job", "train", exempt_until="2099-01-01T00:00:00Z")
        return super().call(function, *arguments, **options)


def test_a_change_in_the_last_moment_wins(team: Team) -> None:
    team.actor = PodActor(MeddlingApi(ControlPlane.connect(team.plane.admin), team), team.policy)
    team.restart()
    team.job("train", 1)
    done, _ = team.act()
    assert done[0] == ("suspend", "conflict")
    assert not team.is_suspended("train")


@pytest.mark.parametrize("answered", [False, True], ids=["before", "after"])
def test_a_process_that_dies_at_any_step_leaves_a_job_that_is_suspended_once(team: Team, answered: bool) -> None:
    deaths = 0
    for step in range(1, 30):
        name = f"train-{step}"
        team.job(name, 1)
        generation = team.live_job(name)["metadata"]["generation"]
        team.actor = PodActor(MortalApi(ControlPlane.connect(team.plane.admin), step, answered=answered), team.policy)
        team.restart()
        try:
            team.act()
        except Died:
            deaths += 1
        team.actor = None
        team.restart()
        team.act()
        job = team.live_job(name)
        assert job["spec"]["suspend"] is True, f"step {step}"
        assert job["metadata"]["generation"] == generation + 1, f"step {step}: changed more than once"
        team.source.pods.clear()
        wait_for(lambda name=name: gone(team, f"job-name={name}"), "its pods to go", 60, 0.2)  # type: ignore[misc]
        if deaths < step:
            break
    assert deaths >= 6, "reads, the patch, the Event and the look back"


def test_a_replica_that_lost_its_lease_in_the_last_moment_does_nothing(team: Team) -> None:
    team.job("train", 1)
    team.leads = False
    team.restart()
    assert team.act()[1] == {"fenced"}
    assert not team.is_suspended("train")


ACCOUNT = "system:serviceaccount:gpu-exporter:gpu-gpu-exporter-reconciler"
VALUES = {
    "settings": {"actions": {"mode": "act", "kinds": "suspend, deactivate, stop"}},
    "reconciler": {"apply": True, "admissionPolicy": True, "alertmanagerURL": "http://alertmanager:9093"},
}


@pytest.fixture(scope="module")
def chart(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return Helm(tmp_path_factory.mktemp("helm")).objects(VALUES)


class Account:
    """The chart's account, with some of its rights."""

    def __init__(self, plane: ControlPlane, rules: list[dict[str, Any]]) -> None:  # noqa: F811
        self.rules = [
            {**rule, "resources": [resource], "verbs": [verb]}
            for rule in rules
            for resource in rule["resources"]
            for verb in rule["verbs"]
        ]
        self.own = [rule for rule in self.rules if rule["resources"][0] != "pods" and rule["verbs"] == ["patch"]]
        self.own += [rule for rule in self.rules if rule["resources"] == ["workloads"] and rule["verbs"] != ["patch"]]
        self._rbac = client.RbacAuthorizationV1Api(plane.api)
        self._rbac.create_cluster_role({"metadata": {"name": "actor"}, "rules": self.rules})
        role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "actor"}
        subject = {"kind": "User", "name": ACCOUNT, "apiGroup": "rbac.authorization.k8s.io"}
        body = {"metadata": {"name": "actor"}, "roleRef": role, "subjects": [subject]}
        self._rbac.create_cluster_role_binding(body)
        self.kubeconfig = plane.authority.kubeconfig("actor", plane.url, ACCOUNT)
        self._reviews = client.AuthorizationV1Api(ControlPlane.connect(self.kubeconfig))

    def grant(self, missing: dict[str, Any] | None) -> None:
        """All rights but this one, and wait until the API server says so."""
        self._rbac.patch_cluster_role("actor", {"rules": [rule for rule in self.rules if rule is not missing]})

        def may(rule: dict[str, Any]) -> bool:
            asked = {"group": rule["apiGroups"][0], "resource": rule["resources"][0], "verb": rule["verbs"][0]}
            review = {"spec": {"resourceAttributes": asked}}
            return bool(self._reviews.create_self_subject_access_review(review).status.allowed)

        wait_for(lambda: all(may(rule) == (rule is not missing) for rule in self.own), f"all but {missing}", 30)


@pytest.fixture(scope="module")
def account(plane: ControlPlane, chart: list[dict[str, Any]]) -> Account:  # noqa: F811
    return Account(plane, find(chart, "ClusterRole", "-reconciler")["rules"])


def make(team: Team, resource: str, name: str) -> None:
    """An idle object of that kind with one pod; for Workloads one that Kueue runs."""
    if resource == "jobs":
        team.job(name, 1)
        return
    crd = next(each for each in CRDS if each[2] == ("pytorchjobs" if resource == "workloads" else resource))
    if resource == "notebooks":
        team.own(crd, name, {}, 1, **{"notebook-name": name})
    elif resource != "workloads":
        team.own(crd, name, {"runPolicy": {}} if crd[0] == "kubeflow.org" else {}, 1)
    else:
        team.own(crd, name, {}, 1, **{"kueue.x-k8s.io/queue-name": "team"})
        uid = team.read(*crd[:3], name)["metadata"]["uid"]
        owner = {"apiVersion": "kubeflow.org/v1", "kind": crd[3], "name": name, "uid": uid, "controller": True}
        metadata = {"name": name, "labels": {"kueue.x-k8s.io/job-uid": uid}, "ownerReferences": [owner]}
        workload = {"apiVersion": "kueue.x-k8s.io/v1beta1", "kind": "Workload", "spec": {"active": True}}
        custom = client.CustomObjectsApi(team.plane.api)
        body = {**workload, "metadata": metadata}
        custom.create_namespaced_custom_object("kueue.x-k8s.io", "v1beta1", team.namespace, "workloads", body)


def test_the_charts_rights_are_what_each_action_needs_and_no_more(team: Team, kinds: None, account: Account) -> None:
    team.policy, team.proofs.waiting = team.policy._replace(interactive_after=8000.0), 1000.0
    team.actor = PodActor(Api(ControlPlane.connect(account.kubeconfig)), team.policy)
    team.restart()
    resources = sorted({rule["resources"][0] for rule in account.own})
    assert len(account.own) == 12
    for resource in resources:
        account.grant(None)
        make(team, resource, f"well-{resource}")
        done, held = team.act()
        assert [result for _, result in done] == ["done"], f"{resource}: {done} {held}"
        team.source.pods.clear()
    for rule in account.own:
        account.grant(rule)
        (resource,), (verb,) = rule["resources"], rule["verbs"]
        make(team, resource, f"{verb}-{resource}")
        done, held = team.act()
        results = held | {result for _, result in done}
        assert results & {"error", "unconfirmed"}, f"nothing needs {verb} on {resource}"
        team.source.pods.clear()


@pytest.fixture(scope="module")
def confined(plane: ControlPlane, kinds: None, chart: list[dict[str, Any]]) -> Api:  # noqa: F811
    """The chart's account under its policy, which RBAC would let do everything."""
    registration = client.AdmissionregistrationV1Api(plane.api)
    registration.create_validating_admission_policy(find(chart, "ValidatingAdmissionPolicy", "-actions"))
    registration.create_validating_admission_policy_binding(find(chart, "ValidatingAdmissionPolicyBinding", "-actions"))
    return Api(ControlPlane.connect(plane.authority.kubeconfig("confined", plane.url, ACCOUNT, "system:masters")))


FORBIDDEN = [
    ("jobs", {"spec": {"parallelism": 0}}, "only changes suspend and active"),
    ("jobs", {"spec": {"activeDeadlineSeconds": 1}}, "only changes suspend and active"),
    ("jobs", {"metadata": {"labels": {"a": "b"}}}, "neither labels nor finalizers nor owners"),
    ("jobs", {"metadata": {"finalizers": ["example.org/x"]}}, "neither labels nor finalizers nor owners"),
    ("jobs", {"metadata": {"annotations": {"gpu-exporter.io/exempt-until": "x"}}}, "of the annotations"),
    ("jobs", {"metadata": {"annotations": {"note": None}}}, "of the annotations"),
    ("jobs", {"spec": {"suspend": True}}, "says so"),
    ("notebooks", {"metadata": {"annotations": {STOPPED: "2027"}}}, "says so"),
    ("jobsets", {"spec": {"replicatedJobs": []}}, "only changes suspend and active"),
    ("pytorchjobs", {"spec": {"runPolicy": {"cleanPodPolicy": "All"}}}, "only changes suspend and active"),
    ("workloads", {"spec": {"priority": 1}}, "only changes suspend and active"),
]


def refusal(api: Api, team: Team, resource: str, name: str, change: dict[str, Any]) -> str:
    group, version = next(((each[0], each[1]) for each in CRDS if each[2] == resource), ("batch", "v1"))
    patch = api.custom.patch_namespaced_custom_object
    where = group, version, team.namespace, resource, name
    try:
        patch(*where, change, dry_run="All", _content_type="application/merge-patch+json")
    except ApiException as exc:
        return str(exc.body)
    return ""


def test_under_the_policy_the_reconciler_lets_things_rest_and_changes_nothing_else(team: Team, confined: Api) -> None:
    admin = Api(ControlPlane.connect(team.plane.admin))
    for resource in ("jobs", "jobsets", "pytorchjobs", "notebooks", "workloads"):
        make(team, resource, f"a-{resource}")
    team.annotate("job", "a-jobs", exempt="false")
    client.BatchV1Api(team.plane.api).patch_namespaced_job(
        "a-jobs", team.namespace, {"metadata": {"annotations": {"note": "mine"}}}
    )
    wait_for(lambda: refusal(confined, team, *("jobs", "a-jobs"), FORBIDDEN[0][1]) or None, "the policy to count", 30)
    for resource, change, message in FORBIDDEN:
        name = f"a-{resource}"
        assert message in refusal(confined, team, resource, name, change), (resource, change)
        assert refusal(admin, team, resource, name, change) == "", (resource, change)
    with pytest.raises(ApiException, match="only lets rest what controls pods"):
        confined.custom.delete_namespaced_custom_object("batch", "v1", team.namespace, "jobs", "a-jobs", dry_run="All")

    team.policy = team.policy._replace(interactive_after=8000.0)
    team.actor = PodActor(confined, team.policy)
    team.restart()
    done, held = team.act()
    assert sorted(done) == [("deactivate", "done"), ("stop", "done"), *[("suspend", "done")] * 3], held
    assert "leaves alone" in refusal(confined, team, "jobs", "a-jobs", {"metadata": {"annotations": {ACTED: "again"}}})
    team.source.pods.clear()
    for resource, rest, wake in (
        ("jobs", {"suspend": True}, {"suspend": False}),
        ("pytorchjobs", {"runPolicy": {"suspend": True}}, {"runPolicy": {"suspend": False}}),
        ("workloads", {"active": False}, {"active": True}),
    ):
        make(team, resource, f"b-{resource}")
        group, version = next(((each[0], each[1]) for each in CRDS if each[2] == resource), ("batch", "v1"))
        where = group, version, team.namespace, resource, f"b-{resource}"
        admin.custom.patch_namespaced_custom_object(
            *where, {"spec": rest}, _content_type="application/merge-patch+json"
        )
        assert "takes none up again" in refusal(confined, team, resource, f"b-{resource}", {"spec": wake})
