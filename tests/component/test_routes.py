"""Everything that sends requests to a pod, or shows that a pod is a server, on a real API server.

Each server has been idle for longer than the window. Beside each stands a pod that nothing reaches, which is marked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kubernetes import client

from gpu_exporter.reconciler.decision.policy import LABEL
from gpu_exporter.reconciler.decision.rulebook import Rulebook
from gpu_exporter.reconciler.evidence.records import HolderName
from gpu_exporter.reconciler.judge import judge_of
from gpu_exporter.reconciler.kubernetes.around.kinds import SERVING_STACKS
from gpu_exporter.reconciler.kubernetes.around.survey import SERVED_KEEP_S
from gpu_exporter.reconciler.kubernetes.client.api import Api
from gpu_exporter.reconciler.kubernetes.marker import PodMarker
from tests.component.test_surroundings import BUSY_S, IDLE_S, Site, site  # noqa: F401  # a fixture
from tests.testbed.control_plane import ControlPlane
from tests.testbed.gpu_resources import GPU_RESOURCES
from tests.testbed.processes import wait_for

pytestmark = pytest.mark.kubernetes
POOL = ("inference.networking.k8s.io", "v1", "inferencepools", "InferencePool")
OLD_POOL = ("inference.networking.x-k8s.io", "v1alpha2", "inferencepools", "InferencePool")
GRAPH = ("graphs.example.org", "v1", "graphs", "Graph")
RAY = ("ray.io", "v1", "rayclusters", "RayCluster")


def kind_of(group: str, kind: str) -> tuple[str, str, str, str]:
    return group, "v1", f"{kind.lower()}s", kind


STACKS = [kind_of(group, kind) for group, kinds in SERVING_STACKS.items() for kind in kinds]


@pytest.fixture(scope="module")
def kinds(plane: ControlPlane) -> None:
    plane.define(POOL, OLD_POOL, GRAPH, RAY, *STACKS)


def run(site: Site, name: str, owner: dict[str, Any] | None = None, gpus: int = 1, **spec: Any) -> dict[str, Any]:  # noqa: F811
    """An idle running pod with the label app=NAME. Returns it as the API server stores it."""
    template = site.template()
    if not gpus:
        del template["spec"]["containers"][0]["resources"]
    metadata = {"name": name, "labels": {"app": name}, "ownerReferences": [owner] if owner else []}
    site.plane.core.create_namespaced_pod(site.namespace, {"metadata": metadata, "spec": {**template["spec"], **spec}})
    site.set_running(name, 9000.0)
    if gpus:
        site.set_run(name, IDLE_S)
    return site.plane.pod(name, site.namespace)


def make(
    site: Site,  # noqa: F811
    crd: tuple[str, str, str, str],
    name: str,
    spec: Any,
    *owners: dict[str, Any],
) -> dict[str, Any]:
    """Create an object of this kind. Returns a reference to it as the controller."""
    group, version, plural, kind = crd
    metadata = {"name": name, "ownerReferences": list(owners)}
    body = {"apiVersion": f"{group}/{version}", "kind": kind, "metadata": metadata, "spec": spec}
    custom = client.CustomObjectsApi(site.plane.api)
    made = custom.create_namespaced_custom_object(group, version, site.namespace, plural, body)
    return {**{key: body[key] for key in ("apiVersion", "kind")}, **site_reference(made["metadata"])}


def site_reference(metadata: dict[str, Any]) -> dict[str, Any]:
    return {"name": metadata["name"], "uid": metadata["uid"], "controller": True}


def endpoints(site: Site, name: str, **endpoint: Any) -> None:  # noqa: F811
    """A Service without a selector, and its endpoint."""
    site.service(name, selector=None)
    metadata = {"name": name, "labels": {"kubernetes.io/service-name": name}}
    body = {"metadata": metadata, "addressType": "IPv4", "endpoints": [{"addresses": ["10.0.0.9"], **endpoint}]}
    client.DiscoveryV1Api(site.plane.api).create_namespaced_endpoint_slice(site.namespace, body)


def by_service(site: Site) -> str:  # noqa: F811
    run(site, "web")
    site.service("web")
    return "Service/web"


def by_headless_service(site: Site) -> str:  # noqa: F811
    """Clients that balance requests themselves find servers by a headless Service."""
    run(site, "grpc")
    site.service("grpc", clusterIP="None")
    return "headless Service/grpc"


def by_pool(site: Site) -> str:  # noqa: F811
    run(site, "vllm")
    make(site, POOL, "pool", {"selector": {"matchLabels": {"app": "vllm"}}})
    return "InferencePool/pool"


def by_old_pool(site: Site) -> str:  # noqa: F811
    run(site, "vllm")
    make(site, OLD_POOL, "old", {"selector": {"app": "vllm"}})
    return "InferencePool/old"


def by_endpoint(site: Site) -> str:  # noqa: F811
    uid = run(site, "mesh")["metadata"]["uid"]
    endpoints(site, "manual", targetRef={"kind": "Pod", "name": "mesh", "uid": uid})
    return "Service/manual"


def by_address(site: Site) -> str:  # noqa: F811
    run(site, "mesh")
    status = {"status": {"podIP": "10.0.0.9", "podIPs": [{"ip": "10.0.0.9"}]}}
    site.plane.core.patch_namespaced_pod_status("mesh", site.namespace, status)
    endpoints(site, "manual")
    return "Service/manual"


def by_autoscaler(site: Site) -> str:  # noqa: F811
    """The autoscaler is on the controller of one member, which works. Both controllers are below one object."""
    graph = make(site, GRAPH, "graph", {})
    run(site, "scaled", make(site, GRAPH, "g", {}, graph))
    run(site, "partner", make(site, GRAPH, "h", {}, graph))
    site.set_run("scaled", BUSY_S)
    target = {"apiVersion": "/".join(GRAPH[:2]), "kind": "Graph", "name": "g"}
    scaler = {"metadata": {"name": "s"}, "spec": {"scaleTargetRef": target, "minReplicas": 1, "maxReplicas": 2}}
    client.AutoscalingV2Api(site.plane.api).create_namespaced_horizontal_pod_autoscaler(site.namespace, scaler)
    return "HorizontalPodAutoscaler/s"


def by_member_without_gpu(site: Site) -> str:  # noqa: F811
    graph = make(site, GRAPH, "g", {})
    run(site, "worker", graph)
    run(site, "front", graph, gpus=0)
    site.service("front")
    return "Service/front of member front"


def by_pool_of_member(site: Site) -> str:  # noqa: F811
    graph = make(site, GRAPH, "g", {})
    run(site, "prefill", graph)
    run(site, "decode", graph)
    site.set_run("decode", BUSY_S)
    make(site, POOL, "pool", {"selector": {"matchLabels": {"app": "decode"}}})
    return "InferencePool/pool"


ROUTES: list[Callable[[Any], str]] = [
    by_service,
    by_headless_service,
    by_pool,
    by_old_pool,
    by_endpoint,
    by_address,
    by_autoscaler,
    by_member_without_gpu,
    by_pool_of_member,
]


@pytest.mark.parametrize("route", ROUTES, ids=lambda each: each.__name__)
def test_a_server(
    site: Site,  # noqa: F811
    kinds: None,
    route: Callable[[Site], str],
) -> None:
    """A pod that anything reaches is a server. A pod beside it is marked."""
    why = route(site)
    servers = sorted(name for name, (_, run_s) in site.source.pods.items() if run_s == IDLE_S)
    run(site, "beside")
    decisions = site.judge()
    assert {name: decisions[name].stage for name in servers} == dict.fromkeys(servers, "serving")
    assert all(why in decisions[name].reason for name in servers), [decisions[name].reason for name in servers]
    site.restart()
    site.run()
    assert {name: site.labels(name).get(LABEL) for name in (*servers, "beside")} == {
        **dict.fromkeys(servers),
        "beside": "underused",
    }


def test_pods_below_a_kind_of_each_serving_stack_are_servers(site: Site, kinds: None) -> None:  # noqa: F811
    names = [f"{crd[3].lower()}-{at}" for at, crd in enumerate(STACKS)]
    for name, crd in zip(names, STACKS, strict=True):
        run(site, name, make(site, crd, name, {}))
    idle = dict(site.source.pods)
    for some in (names[at : at + 8] for at in range(0, len(names), 8)):  # fewer than DISCOVERIES_MAX groups
        site.source.pods = {name: idle[name] for name in some}
        assert dict(zip(some, site.stages(some), strict=True)) == dict.fromkeys(some, "serving")


def test_the_site_names_further_kinds_and_labels_of_servers(site: Site, kinds: None) -> None:  # noqa: F811
    run(site, "graph", make(site, GRAPH, "g", {}))
    run(site, "labelled")
    assert site.stages(["graph", "labelled"]) == ["underused"] * 2
    site.policy = site.policy._replace(serving_kinds="graphs.example.org/Graph", serving_labels="team, app=labelled")
    assert site.stages(["graph", "labelled"]) == ["serving"] * 2
    assert "label app" in site.judge()["labelled"].reason


def test_names_of_members_are_no_route(site: Site, kinds: None) -> None:  # noqa: F811
    """A training job finds its members by a headless Service, and KubeRay makes a Service for every head."""
    run(site, "rank", subdomain="rank")
    site.service("rank", clusterIP="None")
    ray = make(site, RAY, "ray", {})
    driver = run(site, "driver", gpus=0)  # Spark: the executors belong to the driver, which has a headless Service
    site.service("driver", clusterIP="None")
    run(site, "executor", {"apiVersion": "v1", "kind": "Pod", **site_reference(driver["metadata"])})
    head = run(site, "head", ray, gpus=0)
    run(site, "worker", ray)
    labels = {"metadata": {"labels": {"ray.io/node-type": "head"}}}
    site.plane.core.patch_namespaced_pod("head", site.namespace, labels)
    body = {
        "metadata": {"name": "ray-head-svc", "ownerReferences": [ray]},
        "spec": {"ports": [{"port": 8265}], "selector": {"app": "head", "ray.io/node-type": "head"}},
    }
    site.plane.core.create_namespaced_service(site.namespace, body)
    assert head["metadata"]["name"] == "head"
    assert site.stages(["rank", "worker", "executor"]) == ["underused"] * 3
    site.plane.core.create_namespaced_service(site.namespace, {"metadata": {"name": "api"}, "spec": body["spec"]})
    assert site.stages(["rank", "worker"]) == ["underused", "serving"], "a Service that a person made for the head"


def test_a_label_alone_never_hides_a_pod_and_never_lets_it_be_underused(site: Site, kinds: None) -> None:  # noqa: F811
    run(site, "named")
    labels = {"metadata": {"labels": {"llm-d.ai/inferenceServing": "true"}}}
    site.plane.core.patch_namespaced_pod("named", site.namespace, labels)
    decision = site.judge()["named"]
    assert decision.stage == "candidate"
    assert "its label llm-d.ai/inferenceServing names a server, but no Service" in decision.reason


def test_a_server_remains_one_for_a_while_after_its_pool_is_gone(site: Site, kinds: None) -> None:  # noqa: F811
    """Also if a weaker route remains."""
    by_pool(site)
    site.service("vllm", clusterIP="None")
    site.restart()
    site.run()
    assert LABEL not in site.labels("vllm")
    client.CustomObjectsApi(site.plane.api).delete_namespaced_custom_object(*POOL[:2], site.namespace, POOL[2], "pool")
    site.clock.later += SERVED_KEEP_S - 60.0
    site.run()
    assert LABEL not in site.labels("vllm"), "a rollout replaces its pool"
    site.plane.core.delete_namespaced_service("vllm", site.namespace)
    site.clock.later += 120.0
    site.run()
    assert site.labels("vllm")[LABEL] == "underused"


def limited(site: Site, name: str, more: dict[str, list[str]]) -> PodMarker:  # noqa: F811
    """A reconciler of a user with few rights. `more`: by API group, resources that the user may get and list too."""
    rules = [
        {"apiGroups": [""], "resources": ["pods", "namespaces", "services"], "verbs": ["get", "list"]},
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list"]},
        {"apiGroups": ["autoscaling"], "resources": ["horizontalpodautoscalers"], "verbs": ["list"]},
        {"apiGroups": ["batch"], "resources": ["jobs"], "verbs": ["get"]},
        *({"apiGroups": [group], "resources": each, "verbs": ["get", "list"]} for group, each in more.items()),
    ]
    rbac = client.RbacAuthorizationV1Api(site.plane.api)
    rbac.create_cluster_role({"metadata": {"name": name}, "rules": rules})
    subject = {"kind": "User", "name": name, "apiGroup": "rbac.authorization.k8s.io"}
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name}
    rbac.create_cluster_role_binding({"metadata": {"name": name}, "roleRef": reference, "subjects": [subject]})
    reader = site.plane.authority.kubeconfig(f"{name}-{site.namespace}"[:60], site.plane.url, name)
    return PodMarker(Api(ControlPlane.connect(reader)), site.policy, site.clock, resources=GPU_RESOURCES)


def test_a_member_whose_controller_cannot_be_read_may_be_in_any_gang(site: Site, kinds: None) -> None:  # noqa: F811
    """The reconciler may read Graphs and not RayClusters, so it does not see that both pods are below one object."""
    top = make(site, GRAPH, "top", {})
    run(site, "idle", make(site, GRAPH, "a", {}, top))
    run(site, "works", make(site, RAY, "b", {}, top))
    site.set_run("works", BUSY_S)
    (trained,) = site.job("train", 1)
    names = [HolderName("kubernetes", site.namespace, name) for name in ("idle", trained)]
    rights = {"graphs.example.org": ["graphs"], "inference.networking.k8s.io": ["inferencepools"]}
    rights["inference.networking.x-k8s.io"] = ["inferencepools"]
    marker = limited(site, "no-rays", rights)
    wait_for(lambda: hasattr(marker.survey(names, names, 0.0)[names[0]], "kind"), "the role", each_s=0.2)
    decisions = judge_of(site.source, [marker], Rulebook(site.policy)).judge().decisions
    found = {decision.name.name: decision for decision in decisions}
    assert (found["idle"].stage, found[trained].stage) == ("candidate", "underused")
    assert "another pod may belong to its group: ray.io/v1/RayCluster/b cannot be read" in found["idle"].reason
    labels = {"metadata": {"labels": {LABEL: "underused"}}}
    site.plane.core.patch_namespaced_pod("idle", site.namespace, labels)
    site.clock.later += 61.0
    decisions = judge_of(site.source, [marker], Rulebook(site.policy)).judge().decisions
    stages = {decision.name.name: decision.stage for decision in decisions}
    assert stages["idle"] == "unknown", "a mark remains for a while, because the failure may be short"
    assert site.judge()["idle"].stage == "partial", "with all rights"


def test_pools_that_cannot_be_listed_keep_possible_servers_candidates(
    site: Site,  # noqa: F811
    kinds: None,
) -> None:
    """A cluster with its own roles: pods that may be behind a pool are not underused, and a Job still is."""
    by_pool(site)
    (trained,) = site.job("train", 1)
    marker = limited(site, "no-pools", {})
    name = HolderName("kubernetes", site.namespace, trained)
    wait_for(
        lambda: hasattr(marker.survey([name], [name], site.clock.wall())[name], "kind"),
        "the role to take effect",
        each_s=0.2,
    )
    decisions = judge_of(site.source, [marker], Rulebook(site.policy)).judge().decisions
    found = {decision.name.name: decision for decision in decisions}
    assert (found["vllm"].stage, found[trained].stage) == ("candidate", "underused")
    assert f"the reconciler needs `list` on inferencepools.{POOL[0]}" in found["vllm"].reason


@pytest.fixture(autouse=True)
def pods_end(site: Site) -> Iterator[None]:  # noqa: F811
    yield
    site.plane.core.delete_collection_namespaced_pod(site.namespace, grace_period_seconds=0)
