"""The objects around pods on a real API server: groups by controller, Services, autoscalers, and exemptions by owners.

The real controller manager makes the pods of Jobs and StatefulSets. The test writes the status that kubelets would write.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from kubernetes import client

from gpu_exporter.common.config.rules import Match, PolicyRule
from gpu_exporter.common.model.holders import RESERVATION_NAMESPACES
from gpu_exporter.reconciler.decision.outcomes import tenant_of
from gpu_exporter.reconciler.decision.policy import LABEL, Decision
from gpu_exporter.reconciler.decision.rulebook import Rulebook
from gpu_exporter.reconciler.evidence.records import HolderName
from gpu_exporter.reconciler.judge import judge_of
from gpu_exporter.reconciler.kubernetes.checks import GPUS, OWNER
from gpu_exporter.reconciler.kubernetes.client.api import Api
from gpu_exporter.reconciler.kubernetes.marker import PodMarker
from gpu_exporter.reconciler.report import explain
from tests.component.pods_bench import POLICY, Bench
from tests.testbed.control_plane import ControlPlane
from tests.testbed.gpu_resources import GPU_RESOURCES
from tests.testbed.processes import wait_for

pytestmark = pytest.mark.kubernetes
UNTIL, IDLE_AFTER, EXEMPT = (f"gpu-exporter.io/{name}" for name in ("exempt-until", "idle-after", "exempt"))
IDLE_S, BUSY_S = 7000.0, 1.0


class Site(Bench):
    """A namespace in which controllers make the pods."""

    node: str | None = None

    def restart(self) -> None:
        self.restart_with(
            PodMarker(Api(ControlPlane.connect(self.plane.admin)), self.policy, self.clock, resources=GPU_RESOURCES)
        )

    def restart_with(self, marker: PodMarker) -> None:
        """Continue as a new process with this marker."""
        self.marker = marker
        super().restart()

    def template(self, **metadata: Any) -> dict[str, Any]:
        container = {"name": "train", "image": "x", "resources": {"limits": {"nvidia.com/gpu": "1"}}}
        spec = {"containers": [container], "restartPolicy": "Never", "nodeName": self.node}
        return {"metadata": metadata, "spec": spec}

    def job(self, name: str, count: int, there: int | None = None) -> list[str]:
        """Make a Job whose pods run. Returns their names, sorted. `there`: the number of pods that the namespace has room for."""
        spec = {"parallelism": count, "completions": count, "template": self.template()}
        batch = client.BatchV1Api(self.plane.api)
        batch.create_namespaced_job(self.namespace, {"metadata": {"name": name}, "spec": spec})
        return self.run_all(f"job-name={name}", there or count)

    def stateful(self, name: str, count: int, **labels: str) -> list[str]:
        template = self.template(labels={"app": name, **labels})
        template["spec"].pop("restartPolicy")
        spec = {
            "replicas": count,
            "serviceName": name,
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": {"app": name}},
            "template": template,
        }
        apps = client.AppsV1Api(self.plane.api)
        apps.create_namespaced_stateful_set(self.namespace, {"metadata": {"name": name}, "spec": spec})
        return self.run_all(f"app={name}", count)

    def deployment(self, name: str, count: int) -> list[str]:
        template = self.template(labels={"app": name})
        template["spec"].pop("restartPolicy")
        spec = {"replicas": count, "selector": {"matchLabels": {"app": name}}, "template": template}
        apps = client.AppsV1Api(self.plane.api)
        apps.create_namespaced_deployment(self.namespace, {"metadata": {"name": name}, "spec": spec})
        return self.run_all(f"app={name}", count)

    def own(self, crd: tuple[str, str, str, str], name: str, spec: Any, pods: int, **labels: str) -> list[str]:
        """Make an object of this kind, and idle running pods that it controls."""
        group, version, plural, kind = crd
        custom = client.CustomObjectsApi(self.plane.api)
        metadata: dict[str, Any] = {"name": name, "labels": labels}
        body = {"apiVersion": f"{group}/{version}", "kind": kind, "metadata": metadata, "spec": spec}
        made = custom.create_namespaced_custom_object(group, version, self.namespace, plural, body)
        owner = {
            "apiVersion": f"{group}/{version}",
            "kind": kind,
            "name": name,
            "uid": made["metadata"]["uid"],
            "controller": True,
        }
        names = [f"{name}-{index}" for index in range(pods)]
        for pod in names:
            metadata = {"name": pod, "ownerReferences": [owner], "labels": labels}
            self.plane.core.create_namespaced_pod(self.namespace, self.template() | {"metadata": metadata})
            self.set_running(pod, 9000.0)
            self.set_run(pod, IDLE_S + 1500.0)
        return names

    def pods(self, selector: str) -> list[str]:
        found = self.plane.core.list_namespaced_pod(self.namespace, label_selector=selector).items
        return sorted(pod.metadata.name for pod in found)

    def run_all(self, selector: str, count: int) -> list[str]:
        wait_for(lambda: len(self.pods(selector)) == count, f"{count} pods of {selector}", each_s=0.1)
        for name in self.pods(selector):
            self.set_running(name, 9000.0)
            self.set_run(name, IDLE_S)
        return self.pods(selector)

    def set_run(self, name: str, run_s: float) -> None:
        self.source.pods[name] = (self.plane.pod(name, self.namespace)["metadata"]["uid"], run_s)

    def service(self, name: str, **spec: Any) -> None:
        body = {"metadata": {"name": name}, "spec": {"ports": [{"port": 80}], "selector": {"app": name}, **spec}}
        self.plane.core.create_namespaced_service(self.namespace, body)

    def annotate(self, kind: str, name: str, manager: str = "kubectl-annotate", **annotations: str | None) -> None:
        body = {
            "metadata": {"annotations": {f"gpu-exporter.io/{k.replace('_', '-')}": v for k, v in annotations.items()}}
        }
        core, batch = self.plane.core, client.BatchV1Api(self.plane.api)
        if kind == "namespace":
            core.patch_namespace(self.namespace, body, field_manager=manager)
        elif kind == "pod":
            core.patch_namespaced_pod(name, self.namespace, body, field_manager=manager)
        else:
            batch.patch_namespaced_job(name, self.namespace, body, field_manager=manager)

    def annotate_object(self, crd: tuple[str, str, str, str], name: str, **annotations: str) -> None:
        keys = {f"gpu-exporter.io/{key.replace('_', '-')}": value for key, value in annotations.items()}
        patch = client.CustomObjectsApi(self.plane.api).patch_namespaced_custom_object
        patch(*crd[:2], self.namespace, crd[2], name, {"metadata": {"annotations": keys}})

    def judge(self, *rules: PolicyRule) -> dict[str, Decision]:
        """The decisions of a reconciler that has just started, by pod."""
        surveyor = PodMarker(
            Api(ControlPlane.connect(self.plane.admin)), self.policy, self.clock, resources=GPU_RESOURCES
        )
        decisions = judge_of(self.source, [surveyor], Rulebook(self.policy, rules)).judge().decisions
        return {decision.name.name: decision for decision in decisions}

    def stages(self, names: Sequence[str]) -> list[str]:
        decisions = self.judge()
        return [decisions[name].stage for name in names]


@pytest.fixture
def site(plane: ControlPlane, request: pytest.FixtureRequest) -> Iterator[Site]:
    made = Site(plane, re.sub(r"\W|_", "-", request.node.name.removeprefix("test_"))[:50].strip("-"))
    yield made
    client.BatchV1Api(plane.api).delete_collection_namespaced_job(made.namespace, propagation_policy="Background")
    apps = client.AppsV1Api(plane.api)
    apps.delete_collection_namespaced_stateful_set(made.namespace)
    apps.delete_collection_namespaced_deployment(made.namespace)
    plane.core.delete_collection_namespaced_pod(made.namespace, grace_period_seconds=0)


def in_hours(hours: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + hours * 3600))


def test_a_job_is_marked_as_a_whole_and_one_working_pod_removes_all_marks(site: Site) -> None:
    pods = site.job("train", 4)
    site.run()
    assert [site.labels(pod).get(LABEL) for pod in pods] == ["underused"] * 4
    annotations = site.annotations(pods[0])
    assert (annotations[GPUS], annotations[OWNER]) == ("1", "batch/v1/Job/train")
    (_, note) = site.events(pods[0])[-1]
    assert "and so are the other 3 members of batch/v1/Job/train" in note
    site.set_run(pods[2], BUSY_S)
    site.run()
    assert all(site.labels(pod).get(LABEL) != "underused" for pod in pods)
    site.run()
    assert [site.labels(pod).get(LABEL) for pod in pods] == ["partial", "partial", None, "partial"]
    site.set_run(pods[2], IDLE_S)
    del site.source.pods[pods[0]]  # the exporter of its node has ended
    site.run()
    assert "underused" not in [site.labels(pod).get(LABEL) for pod in pods]
    assert site.judge()[pods[1]].stage == "unknown"


def test_namespaces_whose_label_has_one_value_are_one_tenant(site: Site) -> None:
    site.run_pod("train")
    site.set_run("train", IDLE_S)

    def tenant() -> str:
        return tenant_of(site.judge()["train"])

    label = "example.org/team"
    body = {"metadata": {"labels": {label: "Phys.ada_1", "team": "other"}}}
    site.plane.core.patch_namespace(site.namespace, body)
    assert tenant() == site.namespace, "no label is set in the policy"
    site.policy = site.policy._replace(tenant_label=label)
    assert tenant() == "Phys.ada_1"
    assert "; tenant Phys.ada_1\n" in explain(site.judge()["train"], site.policy)
    for value in ("", None):
        site.plane.core.patch_namespace(site.namespace, {"metadata": {"labels": {label: value}}})
        assert tenant() == site.namespace


def test_a_job_with_a_pending_or_missing_member_is_not_marked(site: Site) -> None:
    pods = site.job("train", 2)
    assert site.stages(pods) == ["underused"] * 2
    status = {"status": {"phase": "Pending", "containerStatuses": []}}
    site.plane.core.patch_namespaced_pod_status(pods[1], site.namespace, status)
    decisions = site.judge()
    assert decisions[pods[0]].stage == "waiting"
    assert f"{pods[1]} of batch/v1/Job/train is Pending" in decisions[pods[0]].reason
    site.set_running(pods[1], 9000.0)
    assert site.stages(pods) == ["underused"] * 2
    quota = {"metadata": {"name": "few"}, "spec": {"hard": {"pods": "4"}}}
    core = site.plane.core
    core.create_namespaced_resource_quota(site.namespace, quota)
    # A quota takes effect once the controller manager has written the used amount.
    wait_for(
        lambda: (core.read_namespaced_resource_quota("few", site.namespace).status.used or {}).get("pods") == "2",
        "the quota to count",
        each_s=0.1,
    )
    wide = site.job("wide", 3, there=2)
    decisions = site.judge()
    assert [decisions[pod].stage for pod in (*pods, *wide)] == ["underused"] * 2 + ["waiting"] * 2
    assert "batch/v1/Job/wide still waits for one member" in decisions[wide[0]].reason


def test_replicas_of_a_deployment_are_judged_one_by_one_and_members_of_a_stateful_set_together(site: Site) -> None:
    loose, bound = site.deployment("web", 2), site.stateful("db", 2)
    site.set_run(loose[0], BUSY_S)
    site.set_run(bound[0], BUSY_S)
    assert site.stages([*loose, *bound]) == ["active", "underused", "active", "partial"]


def test_pods_behind_a_service_or_autoscaler_are_serving_but_not_behind_a_headless_service(site: Site) -> None:
    site.node = "n1"  # only pods on a node have endpoints
    site.plane.core.create_node({"metadata": {"name": "n1"}})
    web, train, scaled = site.deployment("web", 1), site.stateful("train", 1), site.deployment("scaled", 1)
    site.service("web")
    site.service("train", clusterIP="None")
    target = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "scaled"}
    scaler = {"metadata": {"name": "s"}, "spec": {"scaleTargetRef": target, "minReplicas": 1, "maxReplicas": 2}}
    client.AutoscalingV2Api(site.plane.api).create_namespaced_horizontal_pod_autoscaler(site.namespace, scaler)
    for pod in (*web, *train):  # endpoints need addresses
        ip = {"status": {"podIP": "10.0.0.1", "podIPs": [{"ip": "10.0.0.1"}]}}
        site.plane.core.patch_namespaced_pod_status(pod, site.namespace, ip)
    wait_for(lambda: site.stages(web) == ["serving"], "the endpoints of the Service", each_s=0.2)
    slices = client.DiscoveryV1Api(site.plane.api).list_namespaced_endpoint_slice(site.namespace).items
    assert any(each.endpoints for each in slices if each.metadata.labels["kubernetes.io/service-name"] == "train")
    assert site.stages([*train, *scaled]) == ["underused", "serving"]
    assert "it serves requests (Service/web)" in site.judge()[web[0]].reason
    site.policy = site.policy._replace(sharing_window=3600.0)
    site.restart()
    site.source.sharing = {HolderName("kubernetes", site.namespace, web[0]): "in its busiest hour it used 3%"}
    site.set_run(web[0], BUSY_S)
    site.run()
    assert site.labels(web[0])[LABEL] == "sharing-candidate"
    assert site.annotations(web[0])["gpu-exporter.io/evidence"].endswith("and it serves requests (Service/web)")
    assert site.events(web[0])[-1][0] == "GpuSharingCandidate"
    assert "a MIG instance or a shared GPU may be enough" in site.events(web[0])[-1][1]
    site.source.sharing = {}
    site.run()
    assert LABEL not in site.labels(web[0])


def test_a_notebook_behind_its_service_has_the_longer_window(site: Site) -> None:
    site.policy = POLICY._replace(interactive_after=8000.0)
    (pod,) = site.stateful("lab", 1, **{"notebook-name": "lab"})
    site.service("lab")
    assert site.stages([pod]) == ["candidate"]
    site.set_run(pod, 8000.0)
    assert site.stages([pod]) == ["underused"]


def test_exemptions_on_pod_owner_and_namespace_remove_a_mark_until_they_end(site: Site) -> None:
    site.policy = POLICY._replace(exempt_max=3600.0, idle_after_max=9000.0)
    site.restart()
    pods = site.job("train", 2)
    site.run()
    assert site.labels(pods[0])[LABEL] == "underused"

    site.annotate("pod", pods[1], exempt_until=in_hours(0.5), exempt_reason="evaluation\nat noon")
    assert site.stages(pods) == ["exempt"] * 2, "a wish on one member holds for its gang"
    assert "evaluation\N{REPLACEMENT CHARACTER}at noon" in site.judge()[pods[1]].reason
    site.annotate("pod", pods[1], exempt_until=in_hours(-0.1))
    assert site.stages(pods) == ["underused"] * 2

    site.annotate("job", "train", exempt_until=in_hours(0.5))
    assert site.stages(pods) == ["exempt"] * 2
    site.clock.later += 61.0  # a namespace is read again after a minute
    site.run()
    assert LABEL not in site.labels(pods[0]) and OWNER not in site.annotations(pods[0])
    assert "Job/train is exempt until" in site.events(pods[0])[-1][1]
    site.annotate("job", "train", exempt_until="tomorrow")
    decision = site.judge()[pods[0]]
    assert (decision.stage, "cannot be read: 'tomorrow'; write it as 20" in decision.reason) == ("candidate", True)
    site.annotate("job", "train", exempt_until=None, exempt="true")
    assert "it is only for namespaces" in site.judge()[pods[0]].reason
    site.annotate("job", "train", exempt=None, idle_after="2h")
    assert site.stages(pods) == ["exempt"] * 2
    site.annotate("job", "train", idle_after="30h")
    for pod in pods:
        site.set_run(pod, 9100.0)
    assert site.stages(pods) == ["underused"] * 2, "a wish counts up to idle_after_max"
    site.annotate("job", "train", idle_after=None)

    site.annotate("namespace", "", exempt="true", exempt_reason="teaching")
    for pod in pods:
        site.set_run(pod, IDLE_S)
    assert site.judge()[pods[0]].reason.endswith("is exempt: teaching")
    site.annotate("namespace", "", exempt="false")
    assert site.stages(pods) == ["underused"] * 2


def test_an_exemption_ends_after_the_maximum_time_since_it_was_set(site: Site) -> None:
    """The API server records the time of the annotation. The reconciler's own writes on the pod do not renew it."""
    site.policy = POLICY._replace(exempt_max=3600.0)
    site.restart()
    (pod,) = site.job("train", 1)
    site.annotate("pod", pod, exempt_until=in_hours(24 * 365))
    assert site.stages([pod]) == ["exempt"]
    site.clock.later += 3601.0
    decision = site.judge()[pod]
    assert (decision.stage, "ended after 1h" in decision.reason) == ("candidate", True), decision.reason
    site.run()
    assert site.labels(pod)[LABEL] == "candidate"
    assert site.judge()[pod].stage == "candidate", "our own annotations were written by another manager"
    site.annotate("pod", pod, exempt_until=in_hours(24 * 300))
    site.clock.later = 0.0
    assert site.stages([pod]) == ["exempt"]


def test_annotations_of_other_programs_keep_a_pod_a_candidate(site: Site) -> None:
    for key, value, stage in (
        ("karpenter.sh/do-not-disrupt", "true", "candidate"),
        ("cluster-autoscaler.kubernetes.io/safe-to-evict", "false", "candidate"),
        ("cluster-autoscaler.kubernetes.io/safe-to-evict", "true", "underused"),
        ("descheduler.alpha.kubernetes.io/prefer-no-eviction", "", "candidate"),
        ("descheduler.alpha.kubernetes.io/evict", "false", "underused"),
    ):
        name = f"pod-{len(site.source.pods)}"
        site.run_pod(name, annotations={key: value})
        site.set_run(name, IDLE_S)
        assert site.stages([name]) == [stage], key


def test_an_unreadable_controller_makes_its_pods_unknown_and_the_remedy_is_named(site: Site) -> None:
    (pod,) = site.job("train", 1)
    reader = site.plane.authority.kubeconfig(f"half-{site.namespace}", site.plane.url, "half")
    rbac = client.RbacAuthorizationV1Api(site.plane.api)
    rules = [
        {"apiGroups": [""], "resources": ["pods", "namespaces", "services"], "verbs": ["get", "list"]},
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list"]},
        {"apiGroups": ["autoscaling"], "resources": ["horizontalpodautoscalers"], "verbs": ["list"]},
    ]
    rbac.create_cluster_role({"metadata": {"name": "half"}, "rules": rules})
    subject = {"kind": "User", "name": "half", "apiGroup": "rbac.authorization.k8s.io"}
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "half"}
    rbac.create_cluster_role_binding({"metadata": {"name": "half"}, "roleRef": reference, "subjects": [subject]})
    marker = PodMarker(Api(ControlPlane.connect(reader)), site.policy, site.clock, resources=GPU_RESOURCES)
    name = HolderName("kubernetes", site.namespace, pod)
    wanted = "batch/v1/Job/train cannot be read"
    wait_for(
        lambda: wanted in getattr(marker.survey([name], [name], site.clock.wall())[name], "why", ""),
        "the refusal to name the controller",
        each_s=0.2,
    )
    judgement = judge_of(site.source, [marker], Rulebook(site.policy)).judge()
    assert judgement.decisions[0].stage == "unknown"
    assert "the reconciler needs `get` on it" in judgement.decisions[0].reason
    assert (judgement.problems, judgement.surveyed) == ([], 1), "it costs itself, and not the cycle"
    assert judgement.unreadable == [("forbidden", "Job")]


def test_policies_choose_pods_by_their_labels_and_controllers(site: Site) -> None:
    trained, kept = site.job("train", 1), site.deployment("notes", 1)
    by_kind = PolicyRule("jobs", Match(owner_kinds=("batch/Job",)), ceiling="candidate")
    by_label = PolicyRule("notes", Match(labels=(("app", "not*"),)), exempt="kept for the course")
    bare = PolicyRule("bare", Match(owner_kinds=("Pod",)), exempt="by hand")
    decisions = site.judge(bare, by_kind, by_label)
    assert [(decisions[name].stage, decisions[name].exempt_by) for name in (*trained, *kept)] == [
        ("candidate", ""),
        ("exempt", "policy"),
    ]
    decisions = site.judge(PolicyRule("sets", Match(owner_kinds=("ReplicaSet", "Job")), exempt="both"))
    assert [decisions[name].stage for name in (*trained, *kept)] == ["exempt", "exempt"]


def test_a_reservation_pod_is_exempt_by_its_namespace_and_not_by_its_labels(plane: ControlPlane, site: Site) -> None:
    """An older exporter reports such a pod as an idle holder."""
    reserved = Site(plane, RESERVATION_NAMESPACES[0])
    found = {}
    for bench in (reserved, site):
        body = {**bench.template(), "metadata": {"name": "gpu-reservation-1a", "labels": {"runai-gpu-group": "g"}}}
        plane.core.create_namespaced_pod(bench.namespace, body)
        bench.set_running("gpu-reservation-1a", 9000.0)
        bench.set_run("gpu-reservation-1a", IDLE_S)
        found[bench.namespace] = bench.judge()["gpu-reservation-1a"]
    plane.core.delete_collection_namespaced_pod(reserved.namespace, grace_period_seconds=0)
    decision = found[reserved.namespace]
    assert (decision.stage, decision.exempt_by, decision.label) == ("exempt", "namespace", "")
    assert "but the pods of namespace kai-resource-reservation only reserve GPUs for other pods" in decision.reason
    assert found[site.namespace].stage == "underused"
