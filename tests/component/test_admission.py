"""The chart's admission policy on a real API server: the reconciler changes its own marks in pods, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client
from kubernetes.client.exceptions import ApiException

from gpu_exporter.reconciler.decision.policy import LABEL
from gpu_exporter.reconciler.kubernetes.checks import GPUS
from gpu_exporter.reconciler.kubernetes.client.api import Api
from gpu_exporter.reconciler.kubernetes.marker import PodMarker
from gpu_exporter.reconciler.kubernetes.notice import CONDITION
from tests.component.pods_bench import POLICY, Bench, condition_of
from tests.testbed.chart import Helm, find
from tests.testbed.control_plane import ControlPlane, start_control_plane
from tests.testbed.gpu_resources import GPU_RESOURCES
from tests.testbed.processes import Processes, wait_for

pytestmark = pytest.mark.kubernetes
READY = {"type": "Ready", "status": "True"}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """A pod with other metadata and another status, on an API server with the policy."""
    directory = tmp_path_factory.mktemp("control-plane")
    with Processes(directory) as processes, start_control_plane(processes, directory) as plane:
        made = Bench(plane, "admission")
        uid = made.run_pod("train", labels={"app": "a"}, annotations={"note": "a"}, finalizers=["example.com/keep"])
        plane.core.patch_namespaced_pod_status("train", made.namespace, {"status": {"conditions": [READY]}})
        made.source.pods["train"] = (uid, 130.0)
        yield made


@pytest.fixture(scope="module")
def reconciler(bench: Bench, tmp_path_factory: pytest.TempPathFactory) -> Api:
    """A client with the chart's account. RBAC allows everything, so only the policy can refuse."""
    values = {"reconciler": {"apply": True, "condition": True, "admissionPolicy": True}}
    objects = Helm(tmp_path_factory.mktemp("helm")).objects(values)
    account = find(objects, "ServiceAccount", "-reconciler")["metadata"]
    user = f"system:serviceaccount:{account['namespace']}:{account['name']}"
    kubeconfig = bench.plane.authority.kubeconfig("reconciler", bench.plane.url, user, "system:masters")
    made = Api(ControlPlane.connect(kubeconfig))
    registration = client.AdmissionregistrationV1Api(bench.plane.api)
    registration.create_validating_admission_policy(find(objects, "ValidatingAdmissionPolicy"))
    registration.create_validating_admission_policy_binding(find(objects, "ValidatingAdmissionPolicyBinding"))
    change = {"metadata": {"labels": {"app": "mine"}}}
    wait_for(lambda: refusal(made, bench.namespace, change) or None, "the policy to count", each_s=0.2)
    return made


def refusal(api: Api, namespace: str, change: dict[str, Any]) -> str:
    """The API server's message when it refuses a change of the pod in a dry run, "" if it allows the change."""
    core = api.core
    patch = core.patch_namespaced_pod_status if "status" in change else core.patch_namespaced_pod
    try:
        patch("train", namespace, change, dry_run="All", _content_type="application/strategic-merge-patch+json")
    except ApiException as exc:
        return str(exc.body)
    return ""


def test_the_policy_lets_the_reconciler_set_renew_and_remove_marks(bench: Bench, reconciler: Api) -> None:
    bench.marker = PodMarker(reconciler, POLICY, instance="test", sets_condition=True, resources=GPU_RESOURCES)
    bench.restart()
    uid, _ = bench.source.pods["train"]
    assert bench.run() == (["written"], [])
    assert condition_of(bench, "train")["status"] == "True"
    bench.clock.ahead = 300.0
    bench.source.pods["train"] = (uid, 430.0)
    assert bench.run() == (["renewed"], [])
    bench.source.pods["train"] = (uid, 0.0)
    assert bench.run() == (["withdrawn"], [])
    assert LABEL not in bench.labels("train") and condition_of(bench, "train") == {}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"metadata": {"labels": {"app": None}}}, "only changes gpu-exporter.io/utilization"),
        ({"metadata": {"labels": {"gpu-exporter.io/class": "batch"}}}, "only changes gpu-exporter.io/utilization"),
        ({"metadata": {"annotations": {"note": "b"}}}, "only changes those under gpu-exporter.io/"),
        ({"metadata": {"annotations": {"note": None}}}, "only changes those under gpu-exporter.io/"),
        ({"metadata": {"annotations": {"new": "b"}}}, "only changes those under gpu-exporter.io/"),
        (
            {"metadata": {"$deleteFromPrimitiveList/finalizers": ["example.com/keep"]}},
            "neither the spec nor finalizers",
        ),
        ({"spec": {"containers": [{"name": "train", "image": "other"}]}}, "neither the spec nor finalizers"),
        ({"spec": {"activeDeadlineSeconds": 1}}, "neither the spec nor finalizers"),
        ({"status": {"conditions": [{"type": "Ready", "status": "False"}]}}, "only changes the condition"),
        ({"status": {"phase": "Failed"}}, "only changes the condition"),
        ({"status": {"reason": "Evicted"}}, "only changes the condition"),
        ({"status": {"message": "gone"}}, "only changes the condition"),
        ({"status": {"podIP": "10.0.0.9", "podIPs": [{"ip": "10.0.0.9"}]}}, "only changes the condition"),
        ({"status": {"hostIP": "10.0.0.9"}}, "only changes the condition"),
        ({"status": {"startTime": "2001-01-01T00:00:00Z"}}, "only changes the condition"),
        ({"status": {"nominatedNodeName": "other"}}, "only changes the condition"),
        ({"status": {"ephemeralContainerStatuses": [{"name": "x", "image": "x", "imageID": "x"}]}}, "only changes the"),
    ],
)
def test_the_policy_refuses_any_other_change_by_the_reconciler_only(
    bench: Bench, reconciler: Api, change: dict[str, Any], message: str
) -> None:
    assert message in refusal(reconciler, bench.namespace, change)
    assert refusal(Api(ControlPlane.connect(bench.plane.admin)), bench.namespace, change) == ""


def test_the_reconciler_may_change_its_own_marks_but_neither_delete_nor_evict_pods(
    bench: Bench, reconciler: Api
) -> None:
    own = {"metadata": {"labels": {LABEL: "candidate"}, "annotations": {GPUS: "1"}}}
    condition = {"status": {"conditions": [{"type": CONDITION, "status": "True"}]}}
    assert (refusal(reconciler, bench.namespace, own), refusal(reconciler, bench.namespace, condition)) == ("", "")
    with pytest.raises(ApiException, match="only changes pods and their status"):
        reconciler.core.delete_namespaced_pod("train", bench.namespace, dry_run="All")
    with pytest.raises(ApiException, match="only changes pods and their status"):
        reconciler.core.create_namespaced_pod_eviction(
            "train", bench.namespace, {"metadata": {"name": "train"}}, dry_run="All"
        )


def test_the_policy_confines_the_account_of_the_cleanup_job_too(bench: Bench, reconciler: Api, tmp_path: Path) -> None:
    """With Argo CD its rights exist as long as the release."""
    assert refusal(reconciler, bench.namespace, {"metadata": {"labels": {"app": "mine"}}}), "the policy counts"
    objects = Helm(tmp_path).objects({"reconciler": {"apply": True}})
    account = find(objects, "ServiceAccount", "-cleanup")["metadata"]
    user = f"system:serviceaccount:{account['namespace']}:{account['name']}"
    kubeconfig = bench.plane.authority.kubeconfig("cleanup", bench.plane.url, user, "system:masters")
    cleanup = Api(ControlPlane.connect(kubeconfig))
    assert "only changes gpu-exporter.io/utilization" in refusal(
        cleanup, bench.namespace, {"metadata": {"labels": {"app": "mine"}}}
    )
    assert refusal(cleanup, bench.namespace, {"metadata": {"labels": {LABEL: None}}}) == ""
