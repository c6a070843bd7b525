"""A namespace with a reconciler that acts on idle objects."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client
from kubernetes.client.exceptions import NotFoundException

from gpu_exporter.common.config.defaults import Actions
from gpu_exporter.reconciler.actions.acts import Acts
from gpu_exporter.reconciler.actions.ends import Ends
from gpu_exporter.reconciler.actions.gates import Gates
from gpu_exporter.reconciler.actions.journal import Journal
from gpu_exporter.reconciler.actions.record import PolicyStanding
from gpu_exporter.reconciler.actions.runner import ActionRunner, Parts
from gpu_exporter.reconciler.actor import ENDING, Actor
from gpu_exporter.reconciler.audit import AuditLog
from gpu_exporter.reconciler.cycle import CycleHooks, ReconcileCycle
from gpu_exporter.reconciler.decision.policy import Decision
from gpu_exporter.reconciler.decision.rulebook import Rulebook
from gpu_exporter.reconciler.decision.surroundings import Reference
from gpu_exporter.reconciler.evidence.records import HostLimits
from gpu_exporter.reconciler.judge import judge_of
from gpu_exporter.reconciler.kubernetes.actor import PodActor
from gpu_exporter.reconciler.kubernetes.client.api import Api
from gpu_exporter.reconciler.kubernetes.client.lease import Lease
from tests.component.test_shapes import Ground
from tests.testbed.control_plane import ControlPlane
from tests.testbed.gpu_resources import GPU_RESOURCES
from tests.testbed.operators import OBJECTS
from tests.testbed.processes import wait_for
from tests.testbed.proven import SaidProofs, SaidRecord

# How long an owner must have been warned is shown in tests/unit/reconciler/test_actions.py.
ACT = Actions(mode="act", kinds="suspend, deactivate, stop", warned_for=0.0, cycle_max=5, hour_max=16)
POOL = "nvidia_com_gpu"
NOTEBOOK = ("kubeflow.org", "v1beta1", "notebooks", "Notebook")
PIPELINE = ("example.org", "v1", "pipelines", "Pipeline")
WORKLOAD = ("kueue.x-k8s.io", "v1beta2", "workloads", "Workload")


class Died(BaseException):
    """The process has died."""


class Team(Ground):
    """A namespace with a reconciler that acts and keeps its journal in a Lease."""

    settings = ACT
    actor: Actor | None = None
    leads = True

    def __init__(self, plane: ControlPlane, namespace: str, path: Path) -> None:
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

    def count_not_acted(self, reason: str) -> None:
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
        judge = judge_of(self.source, [self.marker], book)
        ends = Ends(actors, proofs)
        acts = Acts(Journal(self.lease), actors, ends, record, audit, self, self.clock, self.settings.grace_max)
        self.acts = acts
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
        """Run a cycle that marks and a cycle that may act, and wait until the controllers have ended what was ended.

        Returns the acts, and the reasons why nothing was done.
        """
        self.begin(cycles)

        def has_ended() -> bool:
            self.acts._confirm()
            return ENDING not in self.results()

        wait_for(has_ended, "the pods to end", 60.0, 0.2)
        return self.done, self.held

    def begin(self, cycles: int = 2) -> tuple[list[tuple[str, str]], set[str]]:
        """The same, but does not wait for the end of anything."""
        self.done, self.held, self.spared = [], set(), []
        for _ in range(cycles):
            self.lease.tick()
            self.run()
        return self.done, self.held

    def results(self) -> list[str]:
        """The results in the journal, in the order of the acts."""
        return [entry.told for entry in self.acts.entries]

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


def queued(kind: str) -> dict[str, Any]:
    """The object as Kueue's webhook would change it."""
    spec = json.loads(json.dumps(OBJECTS[kind][1]))
    (spec if kind in ("Job", "JobSet") else spec["runPolicy"])["suspend"] = True
    return dict(spec)


ACCOUNT = "system:serviceaccount:gpu-exporter:gpu-gpu-exporter-reconciler"
VALUES = {
    "settings": {"actions": {"mode": "act", "kinds": "suspend, deactivate, stop"}},
    "reconciler": {"apply": True, "admissionPolicy": True, "alertmanagerURL": "http://alertmanager:9093"},
}
