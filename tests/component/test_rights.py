"""The chart's rights on a real API server: they are sufficient, and the reconciler needs each of them."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from kubernetes import client

from gpu_exporter.common.clock import SYSTEM_CLOCK
from gpu_exporter.reconciler.apply import withdraw_all
from gpu_exporter.reconciler.cycle import ReconcileCycle
from gpu_exporter.reconciler.decision.policy import LABEL
from gpu_exporter.reconciler.decision.rulebook import Rulebook
from gpu_exporter.reconciler.judge import judge_of
from gpu_exporter.reconciler.kubernetes.client.api import Api
from gpu_exporter.reconciler.kubernetes.client.lease import Lease, LeaseTexts
from gpu_exporter.reconciler.kubernetes.client.routes import POOL_GROUPS, POOLS
from gpu_exporter.reconciler.kubernetes.marker import PodMarker
from gpu_exporter.reconciler.marks import MarkError
from tests.component.pods_bench import POLICY, Tally, condition_of
from tests.component.test_surroundings import BUSY_S, IDLE_S, Site
from tests.testbed.chart import Helm, find
from tests.testbed.control_plane import ControlPlane, start_control_plane
from tests.testbed.gpu_resources import GPU_RESOURCES
from tests.testbed.node import static_pod
from tests.testbed.processes import Processes, wait_for

pytestmark = pytest.mark.kubernetes
USER = "the-reconciler"
Rule = dict[str, Any]


class Right(NamedTuple):
    """One verb on one resource."""

    group: str
    resource: str
    verb: str

    def __str__(self) -> str:
        return f"{self.verb} {self.resource}.{self.group}".rstrip(".")


class Ground:
    """Pods below every built-in kind of controller, and the account of the reconciler."""

    def __init__(self, plane: ControlPlane, rules: list[Rule]) -> None:
        self.plane, self.rules = plane, rules
        self.site = Site(plane, "rights")
        self.api = Api(ControlPlane.connect(plane.authority.kubeconfig(USER, plane.url, USER)))
        self.rbac = client.RbacAuthorizationV1Api(plane.api)
        self.rbac.create_cluster_role({"metadata": {"name": USER}, "rules": rules})
        reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": USER}
        subject = {"kind": "User", "name": USER, "apiGroup": "rbac.authorization.k8s.io"}
        self.rbac.create_cluster_role_binding({"metadata": {"name": USER}, "roleRef": reference, "subjects": [subject]})
        self.site.job("train", 1)
        self.site.deployment("web", 1)
        self.site.stateful("set", 1)
        self.run_scheduled()
        self.run_replicated()
        self.run_on_each_node()

    def run_scheduled(self) -> None:
        """Make a Job of a CronJob."""
        batch, namespace = client.BatchV1Api(self.plane.api), self.site.namespace
        template = {"spec": {"template": self.site.template()}}
        spec = {"schedule": "0 0 1 1 *", "suspend": True, "jobTemplate": template}
        made = batch.create_namespaced_cron_job(namespace, {"metadata": {"name": "nightly"}, "spec": spec})
        owner = {"apiVersion": "batch/v1", "kind": "CronJob", "name": "nightly", "uid": made.metadata.uid}
        metadata = {"name": "nightly-1", "ownerReferences": [{**owner, "controller": True}]}
        batch.create_namespaced_job(namespace, {"metadata": metadata, "spec": template["spec"]})
        self.site.run_all("job-name=nightly-1", 1)

    def run_replicated(self) -> None:
        template = self.site.template(labels={"app": "old"})
        template["spec"].pop("restartPolicy")
        spec = {"replicas": 1, "selector": {"app": "old"}, "template": template}
        body = {"metadata": {"name": "old"}, "spec": spec}
        self.plane.core.create_namespaced_replication_controller(self.site.namespace, body)
        self.site.run_all("app=old", 1)

    def run_on_each_node(self) -> None:
        """Make a pod of a DaemonSet. The controller makes no pod, because there is no node."""
        template = {"metadata": {"labels": {"app": "agent"}}, "spec": {"containers": [{"name": "a", "image": "x"}]}}
        spec = {"selector": {"matchLabels": {"app": "agent"}}, "template": template}
        apps, namespace = client.AppsV1Api(self.plane.api), self.site.namespace
        made = apps.create_namespaced_daemon_set(namespace, {"metadata": {"name": "agent"}, "spec": spec})
        owner = {"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "agent", "uid": made.metadata.uid}
        pod = static_pod("agent-1", 1, labels={"app": "agent"}, ownerReferences=[{**owner, "controller": True}])
        pod["metadata"]["namespace"] = namespace
        self.plane.create_pod(pod)
        self.site.set_running("agent-1", 9000.0)
        self.site.set_run("agent-1", IDLE_S)

    def rights(self) -> list[Right]:
        return [
            Right(group, resource, verb)
            for rule in self.rules
            for group in rule["apiGroups"]
            for resource in rule["resources"]
            for verb in rule["verbs"]
        ]

    def grant(self, missing: Right | None) -> None:
        """Grant all of the chart's rights but this one, and wait until the API server applies them."""
        rules: list[Rule] = []
        for rule in copy.deepcopy(self.rules):
            for resource in rule["resources"]:
                verbs = [v for v in rule["verbs"] if Right(rule["apiGroups"][0], resource, v) != missing]
                rules += [{**rule, "resources": [resource], "verbs": verbs}] if verbs else []
        self.rbac.patch_cluster_role(USER, {"rules": rules})
        reviews = client.AuthorizationV1Api(self.api.core.api_client)

        def may(right: Right) -> bool:
            resource, _, part = right.resource.partition("/")
            names = [rule.get("resourceNames", [""])[0] for rule in self.rules if right.verb in rule["verbs"]
                     and right.resource in rule["resources"]]  # fmt: skip
            asked = {"group": right.group, "resource": resource, "subresource": part, "verb": right.verb}
            asked |= {"namespace": self.site.namespace, "name": names[0]}
            review = {"spec": {"resourceAttributes": asked}}
            return bool(reviews.create_self_subject_access_review(review).status.allowed)

        wait_for(lambda: all(may(right) == (right != missing) for right in self.rights()), f"all rights but {missing}")

    def attempt(self) -> dict[str, Any]:
        """The results of a cycle over idle pods, of a cycle over working pods, and of the Lease. Then restores the first state."""
        site, tally = self.site, Tally()
        marker = PodMarker(self.api, POLICY, instance="test", sets_condition=True, resources=GPU_RESOURCES)
        cycle = ReconcileCycle(judge_of(site.source, [marker], Rulebook(POLICY)), [marker], POLICY, tally, SYSTEM_CLOCK)
        names = sorted(site.source.pods)
        events = {name: len(site.events(name)) for name in names}
        problem = cycle.run()
        found: dict[str, Any] = {
            "problem": bool(problem),
            "skips": sorted(tally.skips),
            "labels": {name: site.labels(name).get(LABEL) for name in names},
            "conditions": {name: bool(condition_of(site, name)) for name in names},
            "events": {name: len(site.events(name)) - events[name] for name in names},
        }
        for name in names:
            site.set_run(name, BUSY_S)
        cycle.run()
        found["left"] = {name: site.labels(name).get(LABEL) for name in names}
        lease = Lease(self.api, site.namespace, self.lease_name(), SYSTEM_CLOCK, "a")
        lease.tick()
        held = lease.may_write()
        renewed = lease._renewed
        lease.tick()
        found["lease"] = held, lease._renewed != renewed
        found["record"] = self.keep_record()
        list(
            withdraw_all(
                [PodMarker(Api(ControlPlane.connect(self.plane.admin)), POLICY, resources=GPU_RESOURCES)],
                SYSTEM_CLOCK,
                apply=True,
            )
        )
        for name in names:
            site.set_run(name, IDLE_S)
            self.plane.core.patch_namespaced_pod_status(name, site.namespace, {"status": {"conditions": None}})
        leases = client.CoordinationV1Api(self.plane.api)
        for left in leases.list_namespaced_lease(site.namespace).items:
            leases.delete_namespaced_lease(left.metadata.name, site.namespace)
        return found

    def keep_record(self) -> list[str]:
        """The texts that the next process reads after each of two writes to the record."""
        places = [LeaseTexts(self.api, self.site.namespace, f"{self.lease_name()}-record") for _ in range(2)]
        said = []
        try:
            said.append(places[0].read_text("record"))
            for text in ("one", "two"):
                places[0].write_text("record", text)
                said.append(places[1].read_text("record"))
        except MarkError as exc:
            said.append(exc.result)
        return said

    def lease_name(self) -> str:
        return next(str(rule["resourceNames"][0]) for rule in self.rules if rule.get("resourceNames"))


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    directory = tmp_path_factory.mktemp("control-plane")
    values = {"reconciler": {"apply": True, "condition": True, "ownerResources": None}}
    objects = Helm(tmp_path_factory.mktemp("helm")).objects(values)
    rules = [*find(objects, "ClusterRole", "-reconciler")["rules"], *find(objects, "Role", "-reconciler")["rules"]]
    with Processes(directory) as processes, start_control_plane(processes, directory) as plane:
        plane.define(*((group, "v1", POOLS, "InferencePool") for group in POOL_GROUPS))
        yield Ground(plane, rules)


def test_the_charts_rights_are_sufficient_and_each_of_them_is_needed(ground: Ground) -> None:
    ground.grant(None)
    well = ground.attempt()
    agent = {name for name in well["labels"] if name == "agent-1"}
    assert well["problem"] is False, json.dumps(well, indent=1)
    assert {well["labels"][name] for name in well["labels"] if name not in agent} == {"underused"}
    assert (well["labels"]["agent-1"], well["skips"]) == (None, ["daemonset"])
    assert all(well["conditions"][name] for name in well["labels"] if name not in agent)
    assert set(well["left"].values()) == {None}
    assert well["lease"] == (True, True)
    assert well["record"] == ["", "one", "two"]
    assert ground.attempt() == well, "the same again"
    rights = ground.rights()
    assert len(rights) >= 18
    superfluous = []
    for right in rights:
        ground.grant(right)
        if ground.attempt() == well:
            superfluous.append(str(right))
    assert superfluous == [], "rights that the chart gives and nothing needs"
