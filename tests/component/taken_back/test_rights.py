"""The rights and the admission policy of the chart, compared with what each action needs."""

from __future__ import annotations

from typing import Any

import pytest
from kubernetes import client
from kubernetes.client.exceptions import ApiException

from gpu_exporter.reconciler.actor import ENDING
from gpu_exporter.reconciler.kubernetes.actor import PodActor
from gpu_exporter.reconciler.kubernetes.client.api import Api
from gpu_exporter.reconciler.kubernetes.shapes import STOPPED
from gpu_exporter.reconciler.kubernetes.targets import ACTED
from tests.component.taken_back.team import ACCOUNT, ACT, NOTEBOOK, WORKLOAD, Team
from tests.testbed.chart import find
from tests.testbed.control_plane import ControlPlane
from tests.testbed.gpu_resources import GPU_RESOURCES
from tests.testbed.operators import OBJECTS
from tests.testbed.processes import wait_for

pytestmark = pytest.mark.kubernetes


class Account:
    """The chart's account with some of its rights."""

    def __init__(self, plane: ControlPlane, rules: list[dict[str, Any]]) -> None:
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

        wait_for(lambda: all(may(rule) == (rule is not missing) for rule in self.own), f"all but {missing}")


@pytest.fixture(scope="module")
def account(plane: ControlPlane, chart: list[dict[str, Any]]) -> Account:
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
        _, held = team.begin()
        assert team.results()[-1] == ENDING, f"{resource}: {held}"
        if resource not in ("notebooks", "workloads"):  # whose controllers do not run here
            wait_for(
                lambda: team.acts._confirm() or team.results()[-1] == "done", f"{resource}: the end of its pods", 60.0
            )
        assert is_told(team, resource, f"well-{resource}")
        team.source.pods.clear()
    for rule in account.own:
        account.grant(rule)
        (resource,), (verb,) = rule["resources"], rule["verbs"]
        make(team, resource, f"{verb}-{resource}")
        team.begin()
        assert not is_told(team, resource, f"{verb}-{resource}"), f"nothing needs {verb} on {resource}"
        team.source.pods.clear()


def is_told(team: Team, resource: str, name: str) -> bool:
    """Whether an Event has notified the owner of the suspension."""
    return bool(team.told({"notebooks": "Notebook", "workloads": "MPIJob"}.get(resource) or KIND_OF[resource], name))


@pytest.fixture(scope="module")
def confined(plane: ControlPlane, kinds: None, chart: list[dict[str, Any]]) -> Api:
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
    wait_for(lambda: refusal(confined, team, *("jobs", "a-jobs"), FORBIDDEN[0][1]) or None, "the policy to count")
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
        _, held = team.begin()
        verb = {"notebooks": "stop", "workloads": "deactivate"}.get(resource, "suspend")
        assert (team.acts.entries[-1].verb, team.results()[-1]) == (verb, ENDING), (resource, held)
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
