"""The rights of the chart's cleanup job on a real API server: they are sufficient, and the job needs each of them."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import pytest
from kubernetes import client

from gpu_exporter.common.clock import SYSTEM_CLOCK
from gpu_exporter.reconciler.decision.policy import LABEL
from gpu_exporter.reconciler.kubernetes.client.api import Api
from gpu_exporter.reconciler.kubernetes.client.lease import Lease
from gpu_exporter.reconciler.kubernetes.marker import PodMarker
from gpu_exporter.reconciler.marks import MarkError
from gpu_exporter.reconciler.runtime.loops import remove_all
from tests.component.pods_bench import POLICY, Bench, condition_of
from tests.testbed.chart import Helm, find
from tests.testbed.control_plane import ControlPlane
from tests.testbed.gpu_resources import GPU_RESOURCES
from tests.testbed.processes import wait_for

pytestmark = pytest.mark.kubernetes
NAMESPACE = "cleanup-rights"
ACCOUNT = "the-cleanup"
VALUES = {"namespaceOverride": NAMESPACE, "reconciler": {"apply": True, "condition": True}}
Rule = dict[str, Any]


class Outcome(NamedTuple):
    """What one removal did. `code`: exit code, None if it raised."""

    code: int | None
    is_labelled: bool
    has_condition: bool
    events: int


class Job:
    """The job's account, with each verb on each resource as a rule of its own."""

    def __init__(self, plane: ControlPlane, objects: list[dict[str, Any]]) -> None:
        self.bench = Bench(plane, NAMESPACE)
        self.api = Api(ControlPlane.connect(plane.authority.kubeconfig(ACCOUNT, plane.url, ACCOUNT)))
        (job,) = [each for each in objects if each["kind"] == "Job"]
        (container,) = job["spec"]["template"]["spec"]["containers"]
        (lease,) = [each for each in container["args"] if each.startswith("--kubernetes.lease=")]
        self.sets_condition = "--kubernetes.condition" in container["args"]
        self.namespace, self.lease = lease.partition("=")[2].split("/")
        self.rules = {
            kind: [
                {**rule, "resources": [resource], "verbs": [verb]}
                for rule in find(objects, kind, "-cleanup")["rules"]
                for resource in rule["resources"]
                for verb in rule["verbs"]
            ]
            for kind in ("ClusterRole", "Role")
        }
        self.leases = client.CoordinationV1Api(plane.api)
        self.rbac = client.RbacAuthorizationV1Api(plane.api)
        group = "rbac.authorization.k8s.io"
        about: dict[str, Any] = {"metadata": {"name": ACCOUNT}}
        subjects = [{"kind": "User", "name": ACCOUNT, "apiGroup": group}]
        self.rbac.create_cluster_role({**about, "rules": []})
        reference = {"apiGroup": group, "kind": "ClusterRole", "name": ACCOUNT}
        self.rbac.create_cluster_role_binding({**about, "roleRef": reference, "subjects": subjects})
        self.rbac.create_namespaced_role(self.namespace, {**about, "rules": []})
        reference = {**reference, "kind": "Role"}
        self.rbac.create_namespaced_role_binding(self.namespace, {**about, "roleRef": reference, "subjects": subjects})

    def grant(self, missing: Rule | None) -> None:
        """Grant all rights but this one, and wait until the API server applies them."""
        rules = {kind: [each for each in given if each is not missing] for kind, given in self.rules.items()}
        self.rbac.patch_cluster_role(ACCOUNT, {"rules": rules["ClusterRole"]})
        self.rbac.patch_namespaced_role(ACCOUNT, self.namespace, {"rules": rules["Role"]})
        reviews = client.AuthorizationV1Api(self.api.core.api_client)

        def may(rule: Rule) -> bool:
            resource, _, part = rule["resources"][0].partition("/")
            asked = {"group": rule["apiGroups"][0], "resource": resource, "subresource": part}
            asked |= {"verb": rule["verbs"][0], "namespace": self.namespace}
            asked["name"] = "".join(rule.get("resourceNames", ()))
            review = {"spec": {"resourceAttributes": asked}}
            return bool(reviews.create_self_subject_access_review(review).status.allowed)

        every = [rule for given in self.rules.values() for rule in given]
        wait_for(lambda: all(may(rule) == (rule is not missing) for rule in every), f"all rights but {missing}")

    def run(self, *, has_lease: bool) -> Outcome:
        """One removal of one mark, with a Lease that is free or does not exist."""
        bench = self.bench
        for left in self.leases.list_namespaced_lease(self.namespace).items:
            self.leases.delete_namespaced_lease(left.metadata.name, self.namespace)
        if has_lease:
            body = {"metadata": {"name": self.lease}, "spec": {"holderIdentity": "", "leaseDurationSeconds": 1}}
            self.leases.create_namespaced_lease(self.namespace, body)
        bench.plane.core.patch_namespaced_pod("one", NAMESPACE, {"metadata": {"labels": {LABEL: "underused"}}})
        bench.plane.core.patch_namespaced_pod_status(
            "one", NAMESPACE, {"status": {"conditions": [{"type": "gpu-exporter.io/Underused", "status": "True"}]}}
        )
        events = len(bench.events("one"))
        marker = PodMarker(self.api, POLICY, sets_condition=self.sets_condition, resources=GPU_RESOURCES)
        lease = Lease(self.api, self.namespace, self.lease, SYSTEM_CLOCK)
        try:
            code = remove_all([marker], apply=True, lease=lease, patience_s=0.1)
        except MarkError:
            code = None
        labelled = LABEL in bench.labels("one")
        return Outcome(code, labelled, bool(condition_of(bench, "one")), len(bench.events("one")) - events)


def test_the_cleanup_jobs_rights_are_sufficient_and_each_of_them_is_needed(
    plane: ControlPlane, helm_objects: list[dict[str, Any]]
) -> None:
    job = Job(plane, copy.deepcopy(helm_objects))
    job.bench.run_pod("one")
    job.grant(None)
    well = Outcome(0, is_labelled=False, has_condition=False, events=1)
    for has_lease in (True, False):
        assert job.run(has_lease=has_lease) == well
    superfluous = []
    for rule in (rule for rules in job.rules.values() for rule in rules):
        job.grant(rule)
        if all(job.run(has_lease=has_lease) == well for has_lease in (True, False)):
            superfluous.append((rule["verbs"][0], rule["resources"][0]))
    assert superfluous == [], "rights that the chart gives and the job does not need"


@pytest.fixture
def helm_objects(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return Helm(tmp_path_factory.mktemp("helm")).objects(VALUES)
