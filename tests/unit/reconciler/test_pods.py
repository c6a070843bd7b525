"""Which pods may be marked: live pods against a decision, times on objects, and answers of the API server."""

from __future__ import annotations

import copy
import http.server
import json
import math
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kubernetes import client
from tests.testbed.gpu_resources import GPU_RESOURCES

from gpu_exporter.common.config.defaults import Policy
from gpu_exporter.common.outside import parse_timestamp
from gpu_exporter.common.vendor import NVIDIA
from gpu_exporter.reconciler.decision.policy import LABEL, Decision
from gpu_exporter.reconciler.decision.surroundings import Surroundings
from gpu_exporter.reconciler.evidence.records import HolderName, UnitEvidence
from gpu_exporter.reconciler.kubernetes import checks
from gpu_exporter.reconciler.kubernetes import marker as pods
from gpu_exporter.reconciler.kubernetes.client import api
from gpu_exporter.reconciler.kubernetes.client.lean import trim_pod
from gpu_exporter.reconciler.marks import MarkError, Refused, timestamp

WALL = 1_800_000_000.0
SYSTEM = ("kube-system", "gpu-operator")
DAEMON = Surroundings(is_daemon=True)
POD = Decision(
    HolderName("kubernetes", "ml", "train"), "", "underused", "idle", (), 2, WALL - 8000, "uid-1", WALL - 9000, 7200.0
)
LIVE: dict[str, Any] = {
    "metadata": {"name": "train", "namespace": "ml", "uid": "uid-1", "resourceVersion": "5"},
    "spec": {
        "containers": [
            {"name": "main", "resources": {"limits": {"nvidia.com/gpu": "2", "cpu": "4"}}},
            {"name": "side"},
        ]
    },
    "status": {
        "phase": "Running",
        "containerStatuses": [
            {"name": "main", "state": {"running": {"startedAt": "2027-01-15T05:00:00Z"}}},
            {"name": "side", "state": {"terminated": {}}},
        ],
    },
}


def changed(path: str, value: Any) -> dict[str, Any]:
    pod = copy.deepcopy(LIVE)
    *parents, last = path.split("/")
    place: Any = pod
    for key in parents:
        place = place[int(key)] if key.isdigit() else place.setdefault(key, {})
    place[last] = value
    return pod


def test_a_pod_that_fits_its_evidence_may_be_marked() -> None:
    checks.check_markable(LIVE, POD, WALL, GPU_RESOURCES, SYSTEM)


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        ("metadata/uid", "uid-2", "replaced"),
        ("metadata/deletionTimestamp", "2027-01-15T08:00:00Z", "terminating"),
        ("metadata/annotations", {checks.MIRROR: "hash"}, "static"),
        ("metadata/namespace", "kube-system", "critical"),
        ("spec/priorityClassName", "system-node-critical", "critical"),
        ("metadata/labels", {LABEL: "keep"}, "foreign"),
        ("spec/containers/0/resources/limits/nvidia.com~gpu", "1", "gpus"),
        ("status/phase", "Pending", "not_running"),
        ("status/containerStatuses/0/state", {"waiting": {}}, "not_running"),
        ("status/containerStatuses/0/state/running/startedAt", "2027-01-15T06:00:01Z", "restarted"),
        ("status/containerStatuses", None, "not_running"),
    ],
)
def test_a_pod_that_does_not_fit_its_decision_is_refused(path: str, value: Any, reason: str) -> None:
    pod = changed(path.replace("nvidia.com~gpu", "GPU"), value)
    limits = pod["spec"]["containers"][0]["resources"]["limits"]
    if "GPU" in limits:
        limits["nvidia.com/gpu"] = limits.pop("GPU")
    with pytest.raises(Refused) as caught:
        checks.check_markable(pod, POD, WALL, GPU_RESOURCES, SYSTEM)
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    ("namespace", "priority", "around", "reason"),
    [
        ("ml", "", DAEMON, "daemonset"),
        ("ml", "system-cluster-critical", DAEMON, "critical"),
        ("ml", "team-critical", Surroundings(), ""),
        ("gpu-operator", "", DAEMON, "system"),
        ("gpu-operator", "system-cluster-critical", Surroundings(), "system"),
        ("gpu-operator", "", Surroundings(), "critical"),
    ],
)
def test_only_in_the_namespaces_of_the_site_a_pod_belongs_to_the_cluster(
    namespace: str, priority: str, around: Surroundings, reason: str
) -> None:
    pod = changed("spec/priorityClassName", priority)
    pod["metadata"]["namespace"] = namespace
    # What a tenant writes counts only if it was confirmed.
    pod["metadata"]["ownerReferences"] = [{"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "mine", "uid": "u"}]
    try:
        checks.check_markable(pod, POD._replace(around=around), WALL, GPU_RESOURCES, SYSTEM)
        found = ""
    except Refused as refused:
        found = refused.reason
    assert found == reason


def test_a_pod_whose_container_has_run_for_just_long_enough_may_be_marked() -> None:
    started = changed("status/containerStatuses/0/state/running/startedAt", "2027-01-15T06:00:00Z")
    checks.check_markable(started, POD, WALL, GPU_RESOURCES, SYSTEM)


def test_a_pod_is_refused_if_the_evidence_names_no_uid() -> None:
    with pytest.raises(Refused) as caught:
        checks.check_markable(LIVE, POD._replace(incarnation=""), WALL, GPU_RESOURCES, SYSTEM)
    assert caught.value.reason == "identity"


@pytest.mark.parametrize(
    ("node", "hosts", "refused"),
    [
        ("n1", ["n1", "n1"], ""),
        ("n1", [""], ""),  # read from the exporters themselves, which do not know the node's name
        ("n1", ["n1", "n2"], "the pod runs on n1, but the evidence is from n2"),
        ("n1", ["n3", "n2"], "the pod runs on n1, but the evidence is from n2, n3"),
        ("", ["n1"], "the pod runs on no node, but the evidence is from n1"),
    ],
)
def test_a_pod_is_refused_if_the_evidence_is_from_another_node(node: str, hosts: list[str], refused: str) -> None:
    pod = changed("spec/nodeName", node)
    units = tuple(UnitEvidence(host, "0", "GPU-0", "", 0.0, 9000.0, 1.0, 1.0, 4, host=host) for host in hosts)
    decision = POD._replace(units=units)
    if not refused:
        checks.check_markable(pod, decision, WALL, GPU_RESOURCES, SYSTEM)
        return
    with pytest.raises(Refused, match=f"^{refused}$") as caught:
        checks.check_markable(pod, decision, WALL, GPU_RESOURCES, SYSTEM)
    assert caught.value.reason == "node"


def test_the_gpus_of_a_sidecar_count() -> None:
    pod = changed("spec/initContainers", [{"name": "s", "restartPolicy": "Always", **LIVE["spec"]["containers"][0]}])
    pod["spec"]["initContainers"][0]["name"] = "s"
    with pytest.raises(Refused, match="requests 4 GPUs"):
        checks.check_markable(pod, POD, WALL, GPU_RESOURCES, SYSTEM)


@pytest.mark.parametrize("resource", ["nvidia.com/gpu", "nvidia.com/gpu.shared", "nvidia.com/mig-1g.10gb"])
def test_only_gpus_count_as_gpus(resource: str) -> None:
    limits = {resource: "2", "nvidia.com/hostdev": "1", "nvidia.com/rdma_shared": "1", "nvidia.com/gpumem": "8000"}
    checks.check_markable(changed("spec/containers/0/resources/limits", limits), POD, WALL, GPU_RESOURCES, SYSTEM)


SITE = NVIDIA.resources([r"example\.com/h100(-.+)?", "cpu|memory|.*gpumem"])


def site_pod(limits: dict[str, str]) -> dict[str, Any]:
    """A pod whose GPUs are a resource with the site's own name."""
    return changed("spec/containers/0/resources/limits", limits)


@pytest.mark.parametrize(
    ("limits", "asked"),
    [
        ({"example.com/h100": "2", "cpu": "500m", "memory": "4Gi"}, 2),
        ({"example.com/h100-80gb": "1", "nvidia.com/gpu": "1", "xexample.com/h100": "4"}, 2),
        ({"example.com/h100": "3"}, 3),
        ({"nvidia.com/gpu": "2", "example.com/h100": "2"}, 4),
        ({"nvidia.com/gpu": "2"}, 2),
    ],
)
def test_gpus_of_a_resource_with_the_sites_own_name_are_counted(limits: dict[str, str], asked: int) -> None:
    pod = site_pod(limits)
    if asked == 2:
        return checks.check_markable(pod, POD, WALL, SITE, SYSTEM)
    with pytest.raises(Refused) as caught:
        checks.check_markable(pod, POD, WALL, SITE, SYSTEM)
    assert str(caught.value) == f"the pod requests {asked} GPUs, but exporters report 2 for it"


def test_a_pod_whose_gpus_have_an_unknown_resource_is_refused_with_the_remedy() -> None:
    """The kubelet shows the UUIDs of the devices, but the number of GPUs in the pod's spec is then unknown."""
    for limits in ({"example.com/h100": "1"}, {}):
        with pytest.raises(Refused) as caught:
            checks.check_markable(site_pod(limits), POD, WALL, GPU_RESOURCES, SYSTEM)
        assert (caught.value.reason, str(caught.value)) == (
            "gpus",
            "the pod requests 0 GPUs, but exporters report 2 for it; if its GPUs have another resource name, set "
            "--attribution.resource",
        )


def test_only_containers_that_hold_gpus_of_a_named_resource_have_to_run() -> None:
    checks.object_to_containers(site_pod({"example.com/h100": "2"}), 7200.0, WALL, SITE)
    with pytest.raises(Refused, match="container side does not run"):
        checks.object_to_containers(site_pod({"example.com/h100": "2"}), 7200.0, WALL, resources=GPU_RESOURCES)


class OnePod(api.Api):
    """An API server with one pod, whose GPUs are a resource with the site's own name."""

    def call(self, function: Any, *arguments: Any, **options: Any) -> dict[str, Any]:
        return site_pod({"example.com/h100": "2"})

    send = call  # type: ignore[assignment]


def test_every_check_of_the_marker_counts_resources_with_the_sites_own_name() -> None:
    server = OnePod(client.ApiClient(client.Configuration()))
    mark = pods.read_mark({**LIVE, "metadata": {**LIVE["metadata"], "labels": {LABEL: "underused"}}})
    mark = mark._replace(live=site_pod({"example.com/h100": "2"}))
    for marker, refuses in (
        (pods.PodMarker(server, Policy(), resources=SITE), False),
        (pods.PodMarker(server, Policy(), resources=GPU_RESOURCES), True),
    ):
        for call in (
            lambda marker=marker: marker.inspect(POD, WALL),
            lambda marker=marker: marker.write(POD, WALL),
            lambda marker=marker: marker.check(mark, POD, WALL),
            lambda marker=marker: marker.check_alone(mark, None, 7200.0, WALL),
        ):
            if refuses:
                with pytest.raises(Refused):
                    call()
            else:
                call()


@pytest.mark.parametrize(
    ("metadata", "foreign"),
    [
        ({}, False),
        ({"labels": {LABEL: "underused"}}, False),  # its owner removed the annotations
        ({"labels": {LABEL: "keep"}}, True),
        ({"labels": {LABEL: "keep"}, "annotations": {"other": "x"}}, True),
        (
            {"labels": {LABEL: "keep"}, "annotations": {checks.GPUS: "1"}},
            False,
        ),  # set by the reconciler, edited by its owner
    ],
)
def test_a_mark_is_recognized_by_its_stage_or_by_an_annotation(metadata: dict[str, Any], foreign: bool) -> None:
    pod = {**LIVE, "metadata": {**LIVE["metadata"], **metadata}}
    assert checks.is_foreign(pod) == foreign
    if not foreign and metadata:
        assert pods.read_mark(pod).observed_wall is None


ALONE = POD._replace(stage="unknown", incarnation="", held=None)


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        ("metadata/deletionTimestamp", "2027-01-15T08:00:00Z", "terminating"),
        ("status/phase", "Pending", "not_running"),
        ("status/containerStatuses/0/state", {"waiting": {}}, "not_running"),
        ("status/containerStatuses/0/state/running/startedAt", "2027-01-15T06:00:01Z", "restarted"),
        ("status/containerStatuses/0/state/running/startedAt", "soon", "restarted"),
        ("metadata/uid", "uid-2", "replaced"),
    ],
)
def test_a_marked_pod_without_evidence_is_checked_by_its_own_state(path: str, value: Any, reason: str) -> None:
    marker = pods.PodMarker(api.Api(client.ApiClient(client.Configuration())), Policy(), resources=GPU_RESOURCES)
    labelled = changed("metadata/labels", {LABEL: "underused"})
    for decision in (None, ALONE):
        marker.check_alone(pods.read_mark(labelled), decision, 7200.0, WALL)
    pod = changed(path, value)
    pod["metadata"]["labels"] = {LABEL: "underused"}
    with pytest.raises(Refused) as caught:
        marker.check_alone(pods.read_mark(pod), ALONE._replace(incarnation="uid-1"), 7200.0, WALL)
    assert caught.value.reason == reason
    if reason != "replaced":
        with pytest.raises(Refused):
            marker.check_alone(pods.read_mark(pod), None, 7200.0, WALL)


def test_the_annotations_of_a_mark_contain_the_time_of_its_evidence() -> None:
    decision = POD._replace(observed_wall=WALL)
    annotations = pods.annotate(decision)
    assert annotations[checks.OBSERVED] == "2027-01-15T08:00:00Z"
    pod = {**LIVE, "metadata": {**LIVE["metadata"], "labels": {LABEL: "candidate"}, "annotations": annotations}}
    assert (pods.read_mark(pod).observed_wall, pods.read_mark(pod).stage) == (WALL, "candidate")


@given(st.text())
def test_any_text_is_parsed_to_a_finite_time_or_to_no_time(text: str) -> None:
    seconds = parse_timestamp(text)
    assert seconds is None or math.isfinite(seconds)


@pytest.mark.parametrize("text", [None, "", "soon", "2027-01-15T08:00:00", "2027-13-15T08:00:00Z", "9" * 400])
def test_a_malformed_time_is_parsed_to_no_time(text: str | None) -> None:
    assert parse_timestamp(text) is None


@given(st.integers(0, 253_402_300_799))
def test_a_time_is_parsed_as_it_was_written(seconds: int) -> None:
    assert parse_timestamp(timestamp(seconds)) == seconds


@pytest.mark.parametrize(
    ("status", "body", "result"),
    [
        (404, '{"message": "pods \\"a\\" not found", "details": {"name": "a", "kind": "pods"}}', "replaced"),
        (404, "404 page not found", "error"),
        (404, '{"message": "the server could not find the requested resource", "details": {}}', "error"),
        (409, '{"message": "the object has been modified"}', "conflict"),
        (422, '{"message": "x", "details": {"causes": [{"field": "metadata.uid"}]}}', "replaced"),
        (422, '{"message": "x", "details": {"causes": [{"field": "metadata.labels"}]}}', "error"),
        (422, '{"message": "x", "details": null}', "error"),
        (429, "Too many requests, please try again later.", "throttled"),
        (403, '{"message": "forbidden"}', "error"),
        (500, "", "error"),
        (500, "[]", "error"),
    ],
)
def test_the_result_of_an_error_depends_on_status_and_body(status: int, body: str, result: str) -> None:
    assert api.failure(status, body).result == result


@pytest.mark.parametrize(
    ("status", "after", "patience_s"),
    [
        (429, "30", 30.0),
        (429, "999999", 600.0),
        (429, "", 0.0),
        (429, "-1", 0.0),
        (429, "Fri, 31 Dec 1999 23:59:59 GMT", 0.0),
        (429, "²", 0.0),
        (503, "30", 0.0),
    ],
)
def test_the_pause_after_throttling_is_that_of_retry_after_within_a_limit(
    status: int, after: str, patience_s: float
) -> None:
    assert api.failure(status, "x", after).patience_s == patience_s


def test_a_throttled_request_is_not_retried_at_once_and_does_not_wait(tmp_path: Path) -> None:
    """urllib3 would sleep for the whole Retry-After, which may be hours, and marks would remain meanwhile."""
    asked: list[str] = []

    class Busy(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(429)
            self.send_header("Retry-After", "1")
            self.end_headers()

        def log_message(self, format: str, *arguments: Any) -> None:
            return

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Busy)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.server_address[1]}"}}],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    (tmp_path / "kubeconfig").write_text(json.dumps(config))
    try:
        marker = pods.PodMarker(api.connect(str(tmp_path / "kubeconfig")), Policy(), resources=GPU_RESOURCES)
        with pytest.raises(MarkError) as caught:
            marker.list_marks()
    finally:
        server.shutdown()
        server.server_close()
    assert (caught.value.result, caught.value.patience_s, len(asked)) == ("throttled", 1.0, 1)


def with_claim(limits: dict[str, str] | None = None) -> dict[str, Any]:
    pod = copy.deepcopy(LIVE)
    pod["spec"]["resourceClaims"] = [{"name": "gpus", "resourceClaimName": "own"}]
    pod["spec"]["containers"][0]["resources"] = {"claims": [{"name": "gpus"}], "limits": limits or {}}
    return pod


def test_the_gpus_of_a_pod_with_a_claim_are_counted_by_the_evidence() -> None:
    for pod in (with_claim(), with_claim({"nvidia.com/gpu": "1"})):
        checks.check_markable(pod, POD, WALL, GPU_RESOURCES, SYSTEM)
        checks.check_markable(trim_pod(pod), POD, WALL, GPU_RESOURCES, SYSTEM)


@pytest.mark.parametrize(
    ("limits", "held", "started", "reason"),
    [
        ({"nvidia.com/gpu": "3"}, 2, "2027-01-15T05:00:00Z", "gpus"),  # more than in the evidence
        ({"nvidia.com/gpu": "x"}, 2, "2027-01-15T05:00:00Z", "gpus"),
        ({}, None, "2027-01-15T05:00:00Z", "gpus"),
        ({}, 2, "2027-01-15T07:59:00Z", "restarted"),  # the container with the claim; the other container holds no GPU
    ],
)
def test_a_pod_with_a_claim_that_does_not_fit_its_decision_is_refused(
    limits: dict[str, str], held: int | None, started: str, reason: str
) -> None:
    pod = with_claim(limits)
    pod["status"]["containerStatuses"][0]["state"]["running"]["startedAt"] = started
    for live in (pod, trim_pod(pod)):
        with pytest.raises(Refused) as caught:
            checks.check_markable(live, POD._replace(held=held), WALL, GPU_RESOURCES, SYSTEM)
        assert caught.value.reason == reason


def test_several_replicas_may_be_one_gpu() -> None:
    """With time slicing, a container that requests four replicas gets them from one GPU or from several GPUs."""
    pod = copy.deepcopy(LIVE)
    for container in pod["spec"]["containers"]:
        container.pop("resources", None)
    pod["spec"]["containers"][0]["resources"] = {"limits": {"nvidia.com/gpu": "4"}}
    unit = UnitEvidence("n", "0", "GPU-0", "", WALL - 9000, 8000.0, 1.0, 1.0, 3)
    for shared, held, is_markable in ((True, 1, True), (True, 2, True), (True, 5, False), (False, 1, False)):
        decision = POD._replace(held=held, units=(unit._replace(is_shared=shared),) * held)
        if is_markable:
            checks.check_markable(pod, decision, WALL, GPU_RESOURCES, SYSTEM)
        else:
            with pytest.raises(Refused, match=f"requests 4 GPUs, but exporters report {held} for it"):
                checks.check_markable(pod, decision, WALL, GPU_RESOURCES, SYSTEM)
    mixed = POD._replace(held=2, units=(unit, unit._replace(is_shared=True)))
    assert not mixed.holds(4), "a whole GPU counts as one"
