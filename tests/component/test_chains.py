"""Controllers of pods on a real API server, which checks no owner reference. A forged reference affects only its own pod."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from kubernetes import client

from gpu_exporter.reconciler.decision.policy import LABEL
from gpu_exporter.reconciler.kubernetes.client.api import Api
from gpu_exporter.reconciler.kubernetes.marker import PodMarker
from gpu_exporter.reconciler.kubernetes.owners import READS_MAX
from tests.component.test_surroundings import BUSY_S, IDLE_S, Site, in_hours, site  # noqa: F401  # a fixture
from tests.testbed.control_plane import ControlPlane
from tests.testbed.gpu_resources import GPU_RESOURCES
from tests.testbed.processes import wait_for

pytestmark = pytest.mark.kubernetes
PIPELINE = ("chains.example.org", "v1", "pipelines", "Pipeline")


@pytest.fixture(scope="module")
def pipelines(plane: ControlPlane) -> None:
    """A kind with two known versions, of which the API server serves one."""
    plane.define(PIPELINE)


@pytest.fixture
def other(plane: ControlPlane, site: Site) -> Iterator[Site]:  # noqa: F811
    """Another tenant's namespace, which the same reconciler reads."""
    made = Site(plane, f"{site.namespace[:40]}-other".strip("-"))
    yield made
    client.BatchV1Api(plane.api).delete_collection_namespaced_job(made.namespace, propagation_policy="Background")
    plane.core.delete_collection_namespaced_pod(made.namespace, grace_period_seconds=0)


def reference(kind: str, name: str, uid: str, version: str = "batch/v1") -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "name": name, "uid": uid, "controller": True}


def make_pod(site: Site, name: str, owner: dict[str, Any] | None, **labels: str) -> None:  # noqa: F811
    metadata = {"name": name, "labels": labels, "ownerReferences": [owner] if owner else []}
    site.plane.core.create_namespaced_pod(site.namespace, {**site.template(), "metadata": metadata})


def run_pod(site: Site, name: str, owner: dict[str, Any] | None, run_s: float = IDLE_S, **labels: str) -> str:  # noqa: F811
    """A running pod that any user can create. Its creator chooses the controller that it names."""
    make_pod(site, name, owner, **labels)
    site.set_running(name, 9000.0)
    site.set_run(name, run_s)
    return name


def uid_of_job(site: Site, name: str) -> str:  # noqa: F811
    job = client.BatchV1Api(site.plane.api).read_namespaced_job(name, site.namespace)
    return str(job.metadata.uid)


def make_pipeline(site: Site, name: str, **annotations: str) -> str:  # noqa: F811
    """Create an object of the other kind. Returns its UID."""
    custom = client.CustomObjectsApi(site.plane.api)
    keys = {f"gpu-exporter.io/{key.replace('_', '-')}": value for key, value in annotations.items()}
    body = {
        "apiVersion": "/".join(PIPELINE[:2]),
        "kind": PIPELINE[3],
        "metadata": {"name": name, "annotations": keys},
        "spec": {},
    }
    made = custom.create_namespaced_custom_object(*PIPELINE[:2], site.namespace, PIPELINE[2], body)
    return str(made["metadata"]["uid"])


def test_a_forged_owner_reference_changes_nothing_in_another_namespace(
    site: Site,  # noqa: F811
    other: Site,
    pipelines: None,
) -> None:
    """The reference names the UID of an owner in another namespace, so a wrong parent could be stored for that owner."""
    uid = make_pipeline(site, "pipe")
    above = reference("Pipeline", "pipe", uid, "chains.example.org/v1")
    pods = []
    for name in ("left", "right"):
        pods += site.job(name, 1)
        change = {"metadata": {"ownerReferences": [above]}}
        client.BatchV1Api(site.plane.api).patch_namespaced_job(name, site.namespace, change)
    site.set_run(pods[1], BUSY_S)
    honest = site.stages(pods)
    assert honest == ["partial", "active"], "both Jobs are of one Pipeline"
    uids = [uid_of_job(site, name) for name in ("left", "right")]
    for number, forged in enumerate(
        reference(kind, name, each) for each in (*uids, uid) for kind, name in (("Job", "none"), ("ReplicaSet", "r"))
    ):
        make_pod(other, f"forged-{number}", forged)  # pending: every look at the namespace reads its chain
    run_pod(other, "bait", None)
    marker = PodMarker(Api(ControlPlane.connect(site.plane.admin)), site.policy, site.clock, resources=GPU_RESOURCES)
    for bench in (other, site, other, site):
        bench.restart_with(marker)
        bench.run()
    assert [site.labels(pod).get(LABEL) for pod in pods] == ["partial", None]


def test_a_forged_reference_does_not_affect_a_true_one(site: Site, pipelines: None) -> None:  # noqa: F811
    uid = make_pipeline(site, "pipe", exempt_until=in_hours(1))
    good = reference("Pipeline", "pipe", uid, "chains.example.org/v1")
    bad = [
        {**good, "apiVersion": "chains.example.org/v9"},
        {**good, "kind": "Pipelines"},
        {**good, "name": "gone", "uid": "3a2f0c4e-0000-4000-8000-000000000000"},
        {**good, "apiVersion": "none.example.org/v1"},
    ]
    for number, each in enumerate(bad):
        run_pod(site, f"a-bad-{number}", each)
    run_pod(site, "good", good)
    decisions = site.judge()
    assert decisions["good"].stage == "exempt", "it is read after all of them"
    assert decisions["a-bad-0"].stage == "exempt", "a version that is not served is read by the one that is"
    assert [decisions[f"a-bad-{number}"].stage for number in (1, 3)] == ["unknown"] * 2
    assert decisions["a-bad-2"].stage == "underused", "the object that it names is not there"


def test_the_reconciler_finds_a_kind_that_is_installed_later(plane: ControlPlane, site: Site) -> None:  # noqa: F811
    kind = ("later.example.org", "v1", "trainings", "Training")
    owner = reference("Training", "t", "3a2f0c4e-0000-4000-8000-000000000000", "later.example.org/v1")
    run_pod(site, "early", owner)
    site.run()
    assert site.cycle.decisions[0].stage == "unknown"
    assert "serves no such namespaced kind" in site.cycle.decisions[0].reason
    assert site.cycle.unreadable == [("kind", "Training")]
    plane.define(kind)
    site.clock.later += 61.0  # a namespace is read again after a minute
    site.run()
    assert site.cycle.decisions[0].stage == "underused", "its controller is known not to be there"
    made = site.own(kind, "whole", {}, 1)
    site.annotate_object(kind, "whole", exempt_until=in_hours(1))
    site.clock.later += 61.0
    site.run()
    assert {d.name.name: d.stage for d in site.cycle.decisions}[made[0]] == "exempt"


def test_unreadable_kinds_make_only_their_own_pods_unknown(site: Site) -> None:  # noqa: F811
    pods = site.job("train", 2)
    for number in range(20):
        run_pod(site, f"odd-{number}", reference(f"Kind{number}", "x", f"uid-{number}", "none.example.org/v1"))
    decisions = site.judge()
    assert [decisions[pod].stage for pod in pods] == ["underused"] * 2
    assert {decisions[f"odd-{number}"].stage for number in range(20)} == {"unknown"}
    wanted = ("beyond the limit of 10 groups", "serves no such namespaced kind")
    assert all(any(each in decisions[f"odd-{n}"].reason for each in wanted) for n in range(20))


def test_forged_references_do_not_use_up_the_reads_for_other_pods(site: Site, pipelines: None) -> None:  # noqa: F811
    """The chains of suspected holders are read first. A pod beyond the limit of reads is itself unknown."""
    site.policy = site.policy._replace(freeze_max=1.0)  # they all became idle at the same time
    pods = site.job("train", 1)
    for number in range(READS_MAX + 20):
        uid = make_pipeline(site, f"pipe-{number}")
        make_pod(site, f"z-{number:03}", reference("Pipeline", f"pipe-{number}", uid, "chains.example.org/v1"))
    assert site.stages(pods) == ["underused"]
    for number in range(READS_MAX + 20):
        site.source.pods[f"z-{number:03}"] = (
            site.plane.pod(f"z-{number:03}", site.namespace)["metadata"]["uid"],
            IDLE_S,
        )
    decisions = site.judge()
    assert decisions[pods[0]].stage == "underused"
    told = [each for each in decisions.values() if "owners of a namespace, within a time limit" in each.reason]
    assert 15 <= sum(each.stage == "unknown" for each in told) <= 25
    assert {each.stage for each in told} == {"unknown", "candidate"}, "the others may be in a gang with them"


def test_a_pod_behind_a_service_without_endpoints_counts_as_serving(site: Site) -> None:  # noqa: F811
    (pod,) = site.deployment("web", 1)
    site.service("web")
    assert site.stages([pod]) == ["serving"], "before there is any endpoint: it has no address yet"
    assert "it serves requests (Service/web)" in site.judge()[pod].reason
    core = site.plane.core
    core.delete_namespaced_service("web", site.namespace)
    wait_for(lambda: not core.list_namespaced_service(site.namespace).items, "the Service to go")
    assert site.stages([pod]) == ["underused"]


def test_a_pod_that_lost_its_endpoints_counts_as_serving_for_some_minutes(site: Site) -> None:  # noqa: F811
    """A Service without a selector: only its endpoints name its pods."""
    (pod,) = site.deployment("web", 1)
    uid = site.plane.pod(pod, site.namespace)["metadata"]["uid"]
    discovery = client.DiscoveryV1Api(site.plane.api)
    target = {"kind": "Pod", "name": pod, "namespace": site.namespace, "uid": uid}
    body = {
        "metadata": {"name": "by-hand", "labels": {"kubernetes.io/service-name": "web"}},
        "addressType": "IPv4",
        "endpoints": [{"addresses": ["10.0.0.1"], "targetRef": target}],
        "ports": [],
    }
    discovery.create_namespaced_endpoint_slice(site.namespace, body)
    site.run()
    assert site.cycle.decisions[0].stage == "serving"
    discovery.patch_namespaced_endpoint_slice("by-hand", site.namespace, {"endpoints": None})
    for later_s, stage in ((120.0, "serving"), (600.0, "serving"), (301.0, "underused")):
        site.clock.later += later_s
        site.run()
        assert site.cycle.decisions[0].stage == stage, later_s


def test_the_serving_label_without_a_service_is_an_exemption_with_an_end(site: Site) -> None:  # noqa: F811
    run_pod(site, "server", None, **{"gpu-exporter.io/class": "serving"})
    decision = site.judge()["server"]
    assert (decision.stage, decision.exempt_by) == ("exempt", "pod")
    site.clock.later += site.policy.exempt_max + 1.0
    decision = site.judge()["server"]
    assert (decision.stage, "the label alone counts for 1d" in decision.reason) == ("candidate", True), decision.reason
    core = site.plane.core
    core.patch_namespaced_pod("server", site.namespace, {"metadata": {"labels": {"app": "server"}}})
    site.service("server")
    assert site.stages(["server"]) == ["serving"]


def test_a_future_time_in_managed_fields_is_ignored(site: Site) -> None:  # noqa: F811
    """A user who may write a pod may also write the time at which each field was set."""
    site.policy = site.policy._replace(exempt_max=3600.0)
    site.restart()
    run_pod(site, "greedy", None)
    site.annotate("pod", "greedy", exempt_until=in_hours(24 * 365))
    core = site.plane.core
    pod = site.plane.pod("greedy", site.namespace)
    for entry in pod["metadata"]["managedFields"]:
        entry["time"] = in_hours(24 * 300)
    pod["metadata"]["labels"] = {"a": "b"}  # the API server would undo a change of the times alone
    core.replace_namespaced_pod("greedy", site.namespace, pod)
    times = [entry["time"] for entry in site.plane.pod("greedy", site.namespace)["metadata"]["managedFields"]]
    assert any(time > in_hours(24 * 299) for time in times), "the API server keeps what it is given"
    site.clock.later += 3601.0
    assert site.stages(["greedy"]) == ["candidate"]
