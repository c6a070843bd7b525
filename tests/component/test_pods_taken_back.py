"""Actions on a real API server with the real controllers: suspended objects, protected objects, and crashes."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client
from kubernetes.client.exceptions import ApiException, NotFoundException

from gpu_exporter.defaults import Actions
from gpu_exporter.reconciler.actions.actor import Actor
from gpu_exporter.reconciler.actions.acts import Acts
from gpu_exporter.reconciler.actions.gates import Gates
from gpu_exporter.reconciler.actions.journal import CONFIRM_S, KEY, Journal, parse
from gpu_exporter.reconciler.actions.proofs import Work
from gpu_exporter.reconciler.actions.runner import ActionRunner, Parts
from gpu_exporter.reconciler.audit import AuditLog
from gpu_exporter.reconciler.cycle import CycleHooks, ReconcileCycle
from gpu_exporter.reconciler.decision.policy import LABEL, Decision
from gpu_exporter.reconciler.decision.rulebook import Rulebook
from gpu_exporter.reconciler.decision.surroundings import Reference
from gpu_exporter.reconciler.decision.target import Held
from gpu_exporter.reconciler.evidence.records import HostLimits
from gpu_exporter.reconciler.judge import judge_of
from gpu_exporter.reconciler.kubernetes.actor import PodActor
from gpu_exporter.reconciler.kubernetes.client.api import Api
from gpu_exporter.reconciler.kubernetes.client.lease import Lease
from gpu_exporter.reconciler.kubernetes.shapes import STOPPED
from gpu_exporter.reconciler.kubernetes.targets import ACTED
from gpu_exporter.reconciler.marks import MarkError
from gpu_exporter.reconciler.record import PolicyStanding
from tests.component.test_shapes import QUEUE, Ground, count_pods, plane  # noqa: F401  # a fixture
from tests.testbed.chart import Helm, find
from tests.testbed.control_plane import ControlPlane
from tests.testbed.gpu_resources import GPU_RESOURCES
from tests.testbed.operators import OBJECTS, make_queue
from tests.testbed.processes import wait_for
from tests.testbed.proven import SaidProofs, SaidRecord

pytestmark = pytest.mark.kubernetes
# How long an owner must have been warned is shown in tests/unit/reconciler/test_actions.py.
ACT = Actions(mode="act", kinds="suspend, deactivate, stop", warned_for=0.0, cycle_max=5, hour_max=16)
POOL = "nvidia_com_gpu"
NOTEBOOK = ("kubeflow.org", "v1beta1", "notebooks", "Notebook")
PIPELINE = ("example.org", "v1", "pipelines", "Pipeline")
WORKLOAD = ("kueue.x-k8s.io", "v1beta2", "workloads", "Workload")


class Died(BaseException):
    """The process has died."""


class MortalApi(Api):
    """Dies at the call with this number: before the call, or when its answer arrives."""

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


class Team(Ground):
    """A namespace with a reconciler that acts and keeps its journal in a Lease."""

    settings = ACT
    actor: Actor | None = None
    leads = True

    def __init__(self, plane: ControlPlane, namespace: str, path: Path) -> None:  # noqa: F811
        self.proofs, self.said = SaidProofs(POOL), SaidRecord()
        self.said.answers["policy", "interactive"] = PolicyStanding(100.0, 1.0)
        self.audit_path = path / "audit.jsonl"
        self.journal_api: Api | None = None
        self.done: list[tuple[str, str]] = []
        self.held: set[str] = set()
        self.spared: list[str] = []
        super().__init__(plane, namespace)

    def count_action(self, action: str, result: str) -> None:
        self.done.append((action, result))

    def count_held(self, reason: str) -> None:
        self.held.add(reason)

    def note_spared(self, decisions: Collection[Decision], reason: str) -> None:
        self.spared += [reason] * len(decisions)

    def restart(self) -> None:
        """Continue as a new process, which knows only the objects and the Lease."""
        super().restart()
        book = Rulebook(self.policy)
        audit = AuditLog(self.audit_path, book, self.clock, lambda: pytest.fail("audit"))
        admin = Api(ControlPlane.connect(self.plane.admin))
        actors = {"kubernetes": self.actor or PodActor(admin, self.policy, self.clock, resources=GPU_RESOURCES)}
        self.lease = Lease(self.journal_api or admin, self.namespace, "leader", self.clock, identity="test")
        self.lease.tick()
        proofs: Any = self.proofs  # answers like the real one (see test_proofs)
        record: Any = self.said
        judge = judge_of(self.source, [self.marker], book, self.clock)
        acts = Acts(Journal(self.lease), actors, record, audit, self, self.clock)
        gates = Gates(self.settings, proofs, record, HostLimits(0.25, 20e6), self.clock)
        markers = {"kubernetes": self.marker}
        parts = Parts(
            proofs,
            gates,
            acts if self.settings.mode == "act" else None,
            actors,
            markers,
            judge.look_again,
            lambda: self.leads and self.lease.may_write(),
        )
        runner = ActionRunner(self.settings, parts, self, self.clock)
        self.cycle = ReconcileCycle(
            judge, [self.marker], self.policy, self.tally, self.clock, CycleHooks(audit=audit, act=runner.run)
        )

    def act(self, cycles: int = 2) -> tuple[list[tuple[str, str]], set[str]]:
        """Run a cycle that marks and a cycle that may act. Returns the acts, and the reasons why nothing was done."""
        self.done, self.held, self.spared = [], set(), []
        for _ in range(cycles):
            self.lease.tick()
            self.run()
        return self.done, self.held

    def idle(self, reference: Reference) -> list[str]:
        """Make the members that hold GPUs idle, and return them."""
        names = sorted(part.name.name for part in self.read(reference).ends if part.units)
        for name in names:
            self.set_run(name, 8500.0)
        return names

    def idle_object(self, kind: str, name: str = "train", spec: Any = None, **labels: str) -> Reference:
        reference = self.make(kind, name, spec, **labels)
        self.idle(reference)
        return reference

    def notebook(self, name: str, owned: bool = True) -> list[str]:
        """A notebook with the StatefulSet that Kubeflow's controller would make. Kubeflow itself does not run here."""
        group, version, plural, kind = NOTEBOOK
        body = {"apiVersion": f"{group}/{version}", "kind": kind, "metadata": {"name": name}}
        made = self.custom.create_namespaced_custom_object(group, version, self.namespace, plural, body)
        pods = self.stateful(name, 1, **{"notebook-name": name})
        owner = {"apiVersion": f"{group}/{version}", "kind": kind, "name": name, "uid": made["metadata"]["uid"]}
        if owned:
            change = {"metadata": {"ownerReferences": [{**owner, "controller": True}]}}
            client.AppsV1Api(self.plane.api).patch_namespaced_stateful_set(name, self.namespace, change)
        for pod in pods:
            self.set_run(pod, 8500.0)
        return pods

    def workload(self, reference: Reference) -> None:
        """A Workload as Kueue would make it. Kueue itself does not run here."""
        group, version, plural, kind = WORKLOAD
        owner = {
            "apiVersion": f"{reference.group}/{reference.version}",
            "kind": reference.kind,
            "name": reference.name,
            "uid": reference.uid,
            "controller": True,
        }
        labels = {"kueue.x-k8s.io/job-uid": reference.uid}
        container = {"name": "c", "image": "i"}
        template = {"spec": {"containers": [container], "restartPolicy": "Never"}}
        spec = {"active": True, "podSets": [{"name": "main", "count": 1, "template": template}]}
        metadata = {"name": f"wl-{reference.name}", "labels": labels, "ownerReferences": [owner]}
        body = {"apiVersion": f"{group}/{version}", "kind": kind, "metadata": metadata, "spec": spec}
        self.custom.create_namespaced_custom_object(group, version, self.namespace, plural, body)

    def object(self, crd: tuple[str, ...], name: str) -> dict[str, Any]:
        return dict(self.custom.get_namespaced_custom_object(crd[0], crd[1], self.namespace, crd[2], name))

    def live_job(self, name: str) -> dict[str, Any]:
        return self.object(OBJECTS["Job"][0], name)

    def is_suspended(self, name: str) -> bool:
        return bool(self.live_job(name)["spec"].get("suspend"))

    def control(self, job: str, owner: dict[str, Any]) -> None:
        """Put a Job below this controller."""
        change = {"metadata": {"ownerReferences": [owner | {"controller": True}]}}
        client.BatchV1Api(self.plane.api).patch_namespaced_job(job, self.namespace, change)

    def records(self) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.audit_path.read_text("utf-8").splitlines()]
        return [line for line in lines if line["action"] == "action"]

    def told(self, kind: str, name: str) -> list[tuple[str, str]]:
        """The Events on the object that notify its owner: reasons and notes."""
        selector = f"involvedObject.kind={kind},involvedObject.name={name}"
        found = self.plane.core.list_namespaced_event(self.namespace, field_selector=selector).items
        return [(each.reason, each.message) for each in found if each.reason.startswith("Gpu")]


@pytest.fixture(scope="module")
def kinds(plane: ControlPlane) -> None:  # noqa: F811
    """Kinds of objects whose controllers do not run here."""
    plane.define(NOTEBOOK, PIPELINE)


@pytest.fixture
def team(plane: ControlPlane, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Team]:  # noqa: F811
    name = re.sub("[^a-z0-9]+", "-", request.node.name.lower().removeprefix("test_"))
    made = Team(plane, f"{name[:40].strip('-')}-{name[-15:].strip('-')}", tmp_path)
    yield made
    made.clear()


def gone(team: Team, selector: str) -> bool:
    """Whether the controller has ended these pods, as the kubelet would confirm it."""
    for pod in team.plane.core.list_namespaced_pod(team.namespace, label_selector=selector).items:
        if pod.metadata.deletion_timestamp is not None:
            with contextlib.suppress(NotFoundException):  # the pod is already gone, because it is on no node
                team.delete_pod(pod.metadata.name)
    return not team.pods(selector)


def resume(team: Team, name: str) -> None:
    batch = client.BatchV1Api(team.plane.api)
    batch.patch_namespaced_job(name, team.namespace, {"spec": {"suspend": False}})


def test_a_job_is_suspended_as_a_whole_and_only_once_if_its_owner_resumes_it(team: Team) -> None:
    team.job("train", 2)
    assert team.act() == ([("suspend", "done")], set())
    job = team.live_job("train")
    assert job["spec"]["suspend"] is True
    assert job["metadata"]["annotations"][ACTED].startswith("suspend 20")
    ((reason, note),) = team.told("Job", "train")
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
    assert (begun["receivers"], begun["decisions"], begun["regrets"], begun["waited_for"]) == (
        ["gpu-owners"],
        50,
        2,
        {POOL: 8},
    )
    assert begun["id"] == done["id"] and begun["id"] in job["metadata"]["annotations"][ACTED]
    wait_for(lambda: gone(team, "job-name=train"), "the real controller to end its pods", 60, 0.2)
    team.source.pods.clear()
    assert team.act() == ([], set())

    resume(team, "train")
    (first, second) = team.run_all("job-name=train", 2)
    assert team.act() == ([], {"acted"})
    assert [team.labels(pod)[LABEL] for pod in (first, second)] == ["underused"] * 2, "marked, and left alone"
    assert not team.is_suspended("train")


def test_a_job_with_a_false_note_of_an_act_is_left_alone_and_counted(team: Team) -> None:
    """The owner wrote the annotation by hand to protect the Job."""
    team.job("train", 1)
    team.annotate("job", "train", acted="suspend 2026-01-01T00:00:00Z 0a0b0c0d")
    assert team.act() == ([], {"noted"})
    assert team.spared == ["noted"], "in the second cycle: the first one marks"
    assert not team.is_suspended("train")


def test_a_busy_or_unwarned_member_or_an_exemption_protects_the_whole_job(team: Team) -> None:
    pods = team.job("train", 3)
    team.proofs.unwarned = {pods[2]}
    assert team.act() == ([], {"not_warned"})
    team.proofs.unwarned = set()
    team.set_run(pods[1], 1.0)
    assert team.act() == ([], set())
    team.set_run(pods[1], 7000.0)
    # An exemption that was set after the last look at the namespace, which can be a minute old.
    team.run()
    team.annotate("job", "train", exempt_until="2099-01-01T00:00:00Z")
    assert team.act(1) == ([], {"exempt"})
    assert not team.is_suspended("train")


@pytest.mark.parametrize("reason", ["shadow", "regret", "no_demand"])
def test_the_reconciler_does_not_act_without_proof(team: Team, reason: str) -> None:
    team.job("train", 1)
    team.said.answers["policy", "batch"] = PolicyStanding(50.0, 2.0) if reason == "no_demand" else Held(reason, "")
    team.proofs.waiting = 0.0 if reason == "no_demand" else 8.0
    assert team.act() == ([], {reason})
    assert not team.is_suspended("train")


def test_acts_do_not_exceed_the_demand_and_the_limits(team: Team) -> None:
    team.proofs.waiting = 3.0
    for name in ("a", "b", "c"):
        team.job(name, 2)
    done, held = team.act()
    assert done == [("suspend", "done")] * 2, "two of two GPUs each, for three that are wanted"
    assert "no_demand" in held
    team.proofs.waiting = 9.0
    team.settings = ACT._replace(hour_max=3)
    team.job("d", 1)
    team.restart()
    done, held = team.act()
    assert done == [("suspend", "done")] and "limit" in held, "what another process did counts"


def test_shadow_mode_reports_an_act_once_and_changes_nothing(team: Team) -> None:
    team.settings = ACT._replace(mode="shadow")
    team.restart()
    team.job("train", 1)
    before = team.live_job("train")["metadata"]
    assert team.act() == ([("suspend", "shadow")], set())
    assert team.act() == ([], set())
    after = team.live_job("train")["metadata"]
    assert (after["generation"], after.get("annotations")) == (before["generation"], before.get("annotations"))
    assert team.records() == [] and team.told("Job", "train") == []


def test_pods_without_a_controller_of_a_known_kind_are_left_alone(team: Team, kinds: None) -> None:
    bare = team.run_pod("bare")
    team.source.pods["bare"] = (bare, 7000.0)
    team.deployment("web", 1)
    team.own(PIPELINE, "pipe", {}, 1)
    team.job("slow", 1)
    team.annotate("job", "slow", **{"class": "x"})
    done, held = team.act()
    assert done == [("suspend", "done")]
    assert held == {"kind"}
    assert team.is_suspended("slow")


def test_a_run_of_a_cron_job_is_left_alone(team: Team) -> None:
    """With `concurrencyPolicy: Forbid`, a suspended run would block all later runs."""
    team.job("run", 1)
    batch = client.BatchV1Api(team.plane.api)
    template = {"spec": {"containers": [{"name": "c", "image": "i"}], "restartPolicy": "Never"}}
    spec = {"schedule": "0 0 1 1 *", "concurrencyPolicy": "Forbid", "jobTemplate": {"spec": {"template": template}}}
    made = batch.create_namespaced_cron_job(team.namespace, {"metadata": {"name": "nightly"}, "spec": spec})
    team.control("run", {"apiVersion": "batch/v1", "kind": "CronJob", "name": "nightly", "uid": made.metadata.uid})
    assert team.act() == ([], {"above"})
    assert not team.is_suspended("run")


@pytest.mark.parametrize("kind", ["Pipeline", "OfNoApi"])
def test_a_job_below_another_controller_is_left_alone(team: Team, kinds: None, kind: str) -> None:
    team.job("step", 1)
    body = {"apiVersion": "example.org/v1", "kind": "Pipeline", "metadata": {"name": "p"}}
    made = team.custom.create_namespaced_custom_object("example.org", "v1", team.namespace, "pipelines", body)
    team.control("step", {"apiVersion": "example.org/v1", "kind": kind, "name": "p", "uid": made["metadata"]["uid"]})
    team.act()
    assert not team.is_suspended("step")
    assert team.held == ({"above"} if kind == "Pipeline" else set())


@pytest.mark.parametrize("kind", [kind for kind in OBJECTS if kind != "Job"])
def test_each_kind_of_group_has_its_own_switch(team: Team, kind: str) -> None:
    reference = team.idle_object(kind)
    spec = team.live(reference)["spec"]
    assert team.act() == ([("suspend", "done")], set())
    found = team.live(reference)
    assert found["metadata"]["annotations"][ACTED]
    switch = spec if kind == "JobSet" else spec["runPolicy"]
    switch["suspend"] = True
    assert found["spec"] == spec, "nothing else is changed"


def test_a_working_launcher_protects_its_workers(team: Team) -> None:
    reference = team.idle_object("MPIJob")
    (launcher,) = (part.name.name for part in team.read(reference).beside)
    for work in (Work(0.06, 0.0), Work(0.0, 1.1e6), Work(None, 0.0), Work(0.0, None)):
        team.proofs.beside = {launcher: work}
        assert team.act() == ([], {"beside"}), work
    team.proofs.beside = {launcher: Work(0.04, 0.9e6)}
    assert team.act(1) == ([("suspend", "done")], set())


def test_unreadable_kinds_do_not_prevent_acts_on_other_pods(team: Team) -> None:
    team.job("train", 2)
    for at in range(20):
        owner = Reference("example.org", "v1", "OfNoApi", f"x{at}", f"uid-{at}")
        team.pod(f"odd-{at}", 1, owner)
        team.set_run(f"odd-{at}", 7000.0)
    assert team.act() == ([("suspend", "done")], set())
    assert LABEL not in team.labels("odd-3"), "itself it is unknown"


def test_a_notebook_is_stopped_only_with_its_own_permission(team: Team, kinds: None) -> None:
    team.policy = team.policy._replace(interactive_after=4000.0)
    team.settings = ACT._replace(kinds="suspend")
    team.restart()
    team.notebook("lab")
    assert team.act()[1] == {"kind"}
    team.settings = ACT
    team.restart()
    assert team.act()[0] == [("stop", "done")]
    assert team.object(NOTEBOOK, "lab")["metadata"]["annotations"][STOPPED].startswith("20")
    assert [reason for reason, _ in team.told("Notebook", "lab")] == ["GpuStopped"]


def test_a_foreign_stateful_set_with_the_notebooks_name_protects_both(team: Team, kinds: None) -> None:
    """Kubeflow's controller scales any StatefulSet with the notebook's name."""
    team.policy = team.policy._replace(interactive_after=4000.0)
    team.restart()
    team.notebook("lab", owned=False)
    owner = team.object(NOTEBOOK, "lab")["metadata"]
    template = team.template(labels={"notebook-name": "lab"})
    body = {
        "metadata": {
            "name": "lab2",
            "ownerReferences": [
                {
                    "apiVersion": "kubeflow.org/v1beta1",
                    "kind": "Notebook",
                    "name": "lab",
                    "uid": owner["uid"],
                    "controller": True,
                }
            ],
        },
        "spec": {
            "serviceName": "lab2",
            "selector": {"matchLabels": {"own": "lab2"}},
            "template": {
                **template,
                "metadata": {"labels": {"notebook-name": "lab", "own": "lab2"}},
                "spec": {key: value for key, value in template["spec"].items() if key != "restartPolicy"},
            },
        },
    }
    client.AppsV1Api(team.plane.api).create_namespaced_stateful_set(team.namespace, body)
    team.run_all("own=lab2", 1)
    team.set_run("lab2-0", 8500.0)
    assert team.act()[0] == []
    assert "stranger" in team.held
    assert STOPPED not in (team.object(NOTEBOOK, "lab")["metadata"].get("annotations") or {})


def queued(kind: str) -> dict[str, Any]:
    """The object as Kueue's webhook would change it."""
    spec = json.loads(json.dumps(OBJECTS[kind][1]))
    (spec if kind in ("Job", "JobSet") else spec["runPolicy"])["suspend"] = True
    return dict(spec)


def test_an_object_with_a_recreated_workload_is_not_acted_on_again(team: Team) -> None:
    make_queue(team.plane, team.namespace, 8)
    reference = team.idle_object("Job", spec=queued("Job"), **QUEUE)
    assert team.act() == ([("deactivate", "done")], set())
    assert len(team.told("Job", "train")) == 1
    wait_for(lambda: gone(team, "job-name=train"), "Kueue to end its pods", 60, 0.2)
    team.source.pods.clear()
    workloads = WORKLOAD[0], WORKLOAD[1], team.namespace, WORKLOAD[2]
    (old,) = team.custom.list_namespaced_custom_object(*workloads)["items"]
    team.custom.delete_namespaced_custom_object(*workloads, old["metadata"]["name"])
    team.run_all("job-name=train", 3)
    (new,) = team.custom.list_namespaced_custom_object(*workloads)["items"]
    assert ACTED not in (new["metadata"].get("annotations") or {}), "Kueue has made another one, and let it run"
    assert team.act() == ([], {"acted"})
    assert team.ends_of(reference)


def test_an_object_of_kueue_without_a_workload_is_left_alone(team: Team) -> None:
    team.idle_object("MPIJob", **QUEUE)  # Kueue does not manage this kind here
    assert team.act()[1] == {"kueue"}


def test_an_object_of_kueue_is_not_suspended_if_deactivation_is_not_allowed(team: Team) -> None:
    """Kueue would resume the object."""
    team.settings = ACT._replace(kinds="suspend")
    team.restart()
    reference = team.idle_object("MPIJob")
    team.workload(reference)
    assert team.act() == ([], {"kind"})


def test_an_object_without_a_queue_label_can_be_managed_by_kueue(team: Team) -> None:
    reference = team.idle_object("MPIJob")
    team.workload(reference)
    assert team.act()[0] == [("deactivate", "done")]
    workload = team.object(WORKLOAD, "wl-train")
    assert workload["spec"]["active"] is False
    notes = [each["metadata"]["annotations"][ACTED] for each in (workload, team.live(reference))]
    assert notes[0] == notes[1] and notes[0].startswith("deactivate 20")
    assert not team.live(reference)["spec"]["runPolicy"].get("suspend")


def test_an_object_whose_definition_drops_suspend_gets_no_note_and_no_event(team: Team) -> None:
    """An operator that is older than runPolicy.suspend has such a definition."""
    extensions = client.ApiextensionsV1Api(team.plane.api)
    name = "paddlejobs.kubeflow.org"
    before = extensions.api_client.sanitize_for_serialization(extensions.read_custom_resource_definition(name))
    reference = team.idle_object("PaddleJob")
    old = json.loads(json.dumps(before))
    spec = old["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    del spec["properties"]["runPolicy"]["properties"]["suspend"]

    def is_dropped() -> bool:
        change = {"spec": {"runPolicy": {"suspend": True}}}
        where = "kubeflow.org", "v1", team.namespace, "paddlejobs", "train", change
        options = {"dry_run": "All", "_content_type": "application/merge-patch+json"}
        would = team.custom.patch_namespaced_custom_object(*where, **options)
        return "suspend" not in would["spec"]["runPolicy"]

    extensions.replace_custom_resource_definition(name, old)
    try:
        wait_for(is_dropped, "the older definition to count", 30, 0.2)
        assert team.act() == ([], {"refused"})
        assert ACTED not in (team.live(reference)["metadata"].get("annotations") or {})
        assert team.told("PaddleJob", "train") == [] and team.records() == []
    finally:
        now = extensions.read_custom_resource_definition(name).metadata.resource_version
        before["metadata"]["resourceVersion"] = now
        extensions.replace_custom_resource_definition(name, before)
        wait_for(lambda: not is_dropped(), "the definition to be as it was", 30, 0.2)


class MeddlingApi(Api):
    """Changes the Job right before the patch that is not a dry run."""

    def __init__(self, connection: client.ApiClient, happens: Any) -> None:
        super().__init__(connection)
        self._happens = happens

    def call(self, function: Any, *arguments: Any, **options: Any) -> Any:
        if function.__name__ == "patch_namespaced_custom_object" and "dry_run" not in options:
            self._happens()
        return super().call(function, *arguments, **options)


def test_a_change_right_before_the_patch_prevents_the_act(team: Team) -> None:
    def wish() -> None:
        team.annotate("job", "train", exempt_until="2099-01-01T00:00:00Z")

    api = MeddlingApi(ControlPlane.connect(team.plane.admin), wish)
    team.actor = PodActor(api, team.policy, team.clock, resources=GPU_RESOURCES)
    team.restart()
    team.job("train", 1)
    done, _ = team.act()
    assert done[0] == ("suspend", "conflict")
    assert not team.is_suspended("train")
    assert team.told("Job", "train") == []


class LossyApi(Api):
    """Loses the answer of each of these requests once, by name. The request itself takes effect."""

    def __init__(self, connection: client.ApiClient, *names: str) -> None:
        super().__init__(connection)
        self.names = list(names)

    def call(self, function: Any, *arguments: Any, **options: Any) -> Any:
        answer = super().call(function, *arguments, **options)
        if function.__name__ in self.names and "dry_run" not in options:
            self.names.remove(function.__name__)
            raise MarkError("error", "the answer was lost")
        return answer


@pytest.mark.parametrize(
    "lost",
    [
        ("patch_namespaced_custom_object",),
        ("create_namespaced_event",),
        ("patch_namespaced_custom_object", "create_namespaced_event"),
    ],
)
def test_a_lost_answer_changes_nothing_for_the_owner(team: Team, lost: tuple[str, ...]) -> None:
    team.actor = PodActor(
        LossyApi(ControlPlane.connect(team.plane.admin), *lost), team.policy, team.clock, resources=GPU_RESOURCES
    )
    team.restart()
    team.job("train", 1)
    assert team.act(3)[0] == [("suspend", "done")]
    assert team.is_suspended("train")
    assert len(team.told("Job", "train")) == 1
    assert [line["result"] for line in team.records()] == ["begins", "done"]
    (entry,) = parse(team.lease.read_text(KEY))
    assert entry.told == "done"


@pytest.mark.parametrize("answered", [False, True], ids=["before", "after"])
def test_a_crash_at_any_step_leaves_a_job_that_is_suspended_only_once(team: Team, answered: bool) -> None:
    """Before, during and after every read, the journal, the patch, the check of the result, and the Event."""
    deaths = 0
    team.proofs.waiting = 100.0
    team.settings = ACT._replace(hour_max=100)
    for step in range(1, 40):
        name = f"train-{step}"
        team.job(name, 1)
        generation = team.live_job(name)["metadata"]["generation"]
        api = MortalApi(ControlPlane.connect(team.plane.admin), step, answered=answered)
        team.actor, team.journal_api = PodActor(api, team.policy, team.clock, resources=GPU_RESOURCES), api
        try:
            team.restart()
            team.act()
        except Died:
            deaths += 1
        team.actor = team.journal_api = None
        team.restart()
        team.act()
        if not team.is_suspended(name):  # the act has begun, and a patch may still arrive
            team.clock.later += CONFIRM_S + 1.0
            team.restart()
            team.act(3)
        job = team.live_job(name)
        assert job["spec"]["suspend"] is True, f"step {step}: {team.held}"
        assert job["metadata"]["generation"] == generation + 1, f"step {step}: changed more than once"
        assert len(team.told("Job", name)) == 1, f"step {step}"
        note = job["metadata"]["annotations"][ACTED]
        entries = {entry.note: entry.told for entry in parse(team.lease.read_text(KEY))}
        assert entries[note] == "done", f"step {step}: {entries}"
        team.source.pods.clear()
        wait_for(lambda name=name: gone(team, f"job-name={name}"), "its pods to go", 60, 0.2)  # type: ignore[misc]
        if deaths < step:
            break
    assert deaths >= 9, "reads, the rehearsal, the journal, the patch, the look back, the Event"


def test_a_reconciler_that_restarts_often_does_not_act_more_often(team: Team) -> None:
    team.settings = ACT._replace(hour_max=2, cycle_max=1)
    for at in range(4):
        team.job(f"job-{at}", 1)
    done = []
    for _ in range(5):
        team.restart()
        done += team.act()[0]
    assert done == [("suspend", "done")] * 2
    assert "limit" in team.held


def test_an_unreadable_journal_prevents_every_act(team: Team) -> None:
    team.job("train", 1)
    team.act(1)
    lease = team.plane.api
    body = {"metadata": {"annotations": {"gpu-exporter.io/journal": "not a journal"}}}
    client.CoordinationV1Api(lease).patch_namespaced_lease("leader", team.namespace, body)
    team.restart()
    assert team.act() == ([], {"journal"})
    assert not team.is_suspended("train")


def test_a_replica_that_loses_its_lease_right_before_the_act_does_nothing(team: Team) -> None:
    team.job("train", 1)
    team.leads = False
    team.restart()
    assert team.act()[1] == {"fenced"}
    assert not team.is_suspended("train")


def test_a_namespace_that_is_too_large_to_read_prevents_the_act(team: Team, monkeypatch: pytest.MonkeyPatch) -> None:
    team.job("train", 1)
    monkeypatch.setattr("gpu_exporter.reconciler.kubernetes.targets.LIST_MAX", 100)
    assert team.act() == ([], {"size"})
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
    """The chart's account with some of its rights."""

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
        """Grant all rights but this one, and wait until the API server applies them."""
        self._rbac.patch_cluster_role("actor", {"rules": [rule for rule in self.rules if rule is not missing]})

        def may(rule: dict[str, Any]) -> bool:
            asked = {"group": rule["apiGroups"][0], "resource": rule["resources"][0], "verb": rule["verbs"][0]}
            review = {"spec": {"resourceAttributes": asked}}
            return bool(self._reviews.create_self_subject_access_review(review).status.allowed)

        wait_for(lambda: all(may(rule) == (rule is not missing) for rule in self.own), f"all but {missing}", 30)


@pytest.fixture(scope="module")
def account(plane: ControlPlane, chart: list[dict[str, Any]]) -> Account:  # noqa: F811
    return Account(plane, find(chart, "ClusterRole", "-reconciler")["rules"])


VERSIONS = {plural: (group, version) for (group, version, plural), _ in OBJECTS.values()} | {
    plural: (group, version) for group, version, plural, _ in (NOTEBOOK, WORKLOAD)
}
KIND_OF = {plural: kind for kind, ((_, _, plural), _) in OBJECTS.items()}


def make(team: Team, resource: str, name: str) -> None:
    """An idle object of that kind; for Workloads a Job that Kueue runs."""
    if resource == "notebooks":
        team.notebook(name)
    elif resource == "workloads":
        team.workload(team.idle_object("MPIJob", name))
    else:
        team.idle_object(KIND_OF[resource], name)


def called(prefix: str, resource: str) -> str:
    """The name of the object that `make` has made."""
    return f"{'wl-' if resource == 'workloads' else ''}{prefix}-{resource}"


def test_the_charts_rights_are_what_each_action_needs_and_no_more(team: Team, kinds: None, account: Account) -> None:
    team.policy, team.proofs.waiting = team.policy._replace(interactive_after=4000.0), 1000.0
    team.settings = ACT._replace(hour_max=100)
    team.actor = PodActor(
        Api(ControlPlane.connect(account.kubeconfig)), team.policy, team.clock, resources=GPU_RESOURCES
    )
    team.restart()
    resources = sorted({rule["resources"][0] for rule in account.own})
    assert len(account.own) == 12
    for resource in resources:
        account.grant(None)
        make(team, resource, f"well-{resource}")
        done, held = team.act()
        assert [result for _, result in done] == ["done"], f"{resource}: {done} {held}"
        assert is_told(team, resource, f"well-{resource}")
        team.source.pods.clear()
    for rule in account.own:
        account.grant(rule)
        (resource,), (verb,) = rule["resources"], rule["verbs"]
        make(team, resource, f"{verb}-{resource}")
        team.act()
        assert not is_told(team, resource, f"{verb}-{resource}"), f"nothing needs {verb} on {resource}"
        team.source.pods.clear()


def is_told(team: Team, resource: str, name: str) -> bool:
    """Whether an Event has notified the owner of the suspension."""
    return bool(team.told({"notebooks": "Notebook", "workloads": "MPIJob"}.get(resource) or KIND_OF[resource], name))


@pytest.fixture(scope="module")
def confined(plane: ControlPlane, kinds: None, chart: list[dict[str, Any]]) -> Api:  # noqa: F811
    """A client with the chart's account under its policy. RBAC allows everything."""
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
    ("jobs", {"spec": {"suspend": True}}, "must carry the annotation"),
    ("notebooks", {"metadata": {"annotations": {STOPPED: "2027"}}}, "must carry the annotation"),
    ("jobsets", {"spec": {"replicatedJobs": []}}, "only changes suspend and active"),
    ("pytorchjobs", {"spec": {"runPolicy": {"cleanPodPolicy": "All"}}}, "only changes suspend and active"),
    ("workloads", {"spec": {"priority": 1}}, "only changes suspend and active"),
]


def refusal(api: Api, team: Team, resource: str, name: str, change: dict[str, Any]) -> str:
    group, version = VERSIONS[resource]
    patch = api.custom.patch_namespaced_custom_object
    where = group, version, team.namespace, resource, name
    try:
        patch(*where, change, dry_run="All", _content_type="application/merge-patch+json")
    except ApiException as exc:
        return str(exc.body)
    return ""


def test_the_policy_lets_the_reconciler_suspend_objects_and_change_nothing_else(team: Team, confined: Api) -> None:
    admin = Api(ControlPlane.connect(team.plane.admin))
    pods = {}
    for resource in ("jobs", "jobsets", "pytorchjobs", "notebooks", "workloads"):
        make(team, resource, f"a-{resource}")
        pods[resource] = dict(team.source.pods)
        team.source.pods.clear()
    team.annotate("job", "a-jobs", exempt="false")
    client.BatchV1Api(team.plane.api).patch_namespaced_job(
        "a-jobs", team.namespace, {"metadata": {"annotations": {"note": "mine"}}}
    )
    wait_for(lambda: refusal(confined, team, *("jobs", "a-jobs"), FORBIDDEN[0][1]) or None, "the policy to count", 30)
    for resource, change, message in FORBIDDEN:
        name = called("a", resource)
        assert message in refusal(confined, team, resource, name, change), (resource, change)
        assert refusal(admin, team, resource, name, change) == "", (resource, change)
    with pytest.raises(ApiException, match="only lets rest what controls pods"):
        confined.custom.delete_namespaced_custom_object("batch", "v1", team.namespace, "jobs", "a-jobs", dry_run="All")

    team.policy, team.proofs.waiting = team.policy._replace(interactive_after=4000.0), 1000.0
    team.actor = PodActor(confined, team.policy, team.clock, resources=GPU_RESOURCES)
    team.restart()
    for resource, idle in pods.items():  # if all became idle at once, a brake would hold the acts
        team.source.pods = idle
        done, held = team.act()
        verb = {"notebooks": "stop", "workloads": "deactivate"}.get(resource, "suspend")
        assert done == [(verb, "done")], (resource, held)
    assert "leaves alone" in refusal(confined, team, "jobs", "a-jobs", {"metadata": {"annotations": {ACTED: "again"}}})
    team.source.pods.clear()
    for resource, rest, wake in (
        ("jobs", {"suspend": True}, {"suspend": False}),
        ("pytorchjobs", {"runPolicy": {"suspend": True}}, {"runPolicy": {"suspend": False}}),
        ("workloads", {"active": False}, {"active": True}),
    ):
        make(team, resource, f"b-{resource}")
        group, version = VERSIONS[resource]
        where = group, version, team.namespace, resource, called("b", resource)
        admin.custom.patch_namespaced_custom_object(
            *where, {"spec": rest}, _content_type="application/merge-patch+json"
        )
        assert "takes none up again" in refusal(confined, team, resource, called("b", resource), {"spec": wake})
