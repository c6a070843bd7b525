"""What may be marked: live pods and jobs against a decision; answers of the API server; squeue's JSON of two releases."""

from __future__ import annotations

import copy
import http.server
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from gpu_exporter.reconciler import jobs, pods
from gpu_exporter.reconciler.evidence import HolderName
from gpu_exporter.reconciler.marks import MarkError, Refused
from gpu_exporter.reconciler.policy import LABEL, Decision

WALL = 1_800_000_000.0
POD = Decision(
    HolderName("kubernetes", "ml", "train"), "", "underused", "idle", (), 2, WALL - 8000, "uid-1", WALL - 9000, 7200.0
)
JOB = POD._replace(name=HolderName("slurm", "", "7"), incarnation="")
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


def test_a_pod_that_fits_its_evidence_is_taken() -> None:
    pods.object_to(LIVE, POD, WALL)


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        ("metadata/uid", "uid-2", "replaced"),
        ("metadata/deletionTimestamp", "2027-01-15T08:00:00Z", "terminating"),
        ("metadata/annotations", {pods.MIRROR: "hash"}, "static"),
        ("metadata/namespace", "kube-system", "critical"),
        ("spec/priorityClassName", "system-node-critical", "critical"),
        ("metadata/ownerReferences", [{"kind": "DaemonSet"}], "daemonset"),
        ("metadata/labels", {LABEL: "underused"}, "foreign"),
        ("spec/containers/0/resources/limits/nvidia.com~gpu", "1", "gpus"),
        ("status/phase", "Pending", "not_running"),
        ("status/containerStatuses/0/state", {"waiting": {}}, "not_running"),
        ("status/containerStatuses/0/state/running/startedAt", "2027-01-15T06:00:01Z", "restarted"),
        ("status/containerStatuses", None, "not_running"),
    ],
)
def test_a_pod_that_must_not_be_marked(path: str, value: Any, reason: str) -> None:
    pod = changed(path.replace("nvidia.com~gpu", "GPU"), value)
    limits = pod["spec"]["containers"][0]["resources"]["limits"]
    if "GPU" in limits:
        limits["nvidia.com/gpu"] = limits.pop("GPU")
    with pytest.raises(Refused) as caught:
        pods.object_to(pod, POD, WALL)
    assert caught.value.reason == reason


def test_a_pod_whose_uid_the_evidence_does_not_know_is_refused() -> None:
    with pytest.raises(Refused) as caught:
        pods.object_to(LIVE, POD._replace(incarnation=""), WALL)
    assert caught.value.reason == "identity"


def test_a_sidecar_that_holds_gpus_counts() -> None:
    pod = changed("spec/initContainers", [{"name": "s", "restartPolicy": "Always", **LIVE["spec"]["containers"][0]}])
    pod["spec"]["initContainers"][0]["name"] = "s"
    with pytest.raises(Refused, match="asks for 4 GPUs"):
        pods.object_to(pod, POD, WALL)


@pytest.mark.parametrize(
    ("status", "body", "result"),
    [
        (404, '{"message": "pods \\"a\\" not found"}', "replaced"),
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
def test_answers_of_the_api_server(status: int, body: str, result: str) -> None:
    assert pods.failure(status, body).result == result


def test_a_server_that_asks_for_patience_is_asked_once_and_costs_no_time(tmp_path: Path) -> None:
    """urllib3 would sleep as long as Retry-After says, which may be hours, while marks stand."""
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
        marker = pods.PodMarker(pods.connect(str(tmp_path / "kubeconfig")))
        with pytest.raises(MarkError) as caught:
            marker.list_marks()
    finally:
        server.shutdown()
        server.server_close()
    assert (caught.value.result, len(asked)) == ("throttled", 1)


def row_of_22_05(**fields: Any) -> dict[str, Any]:
    """As squeue 22.05.8 prints it: plain numbers."""
    row = {"job_id": 7, "array_job_id": 0, "array_task_id": None, "job_state": "RUNNING", "start_time": 1_799_991_000}
    return {**row, "restart_cnt": 1, "comment": None, **fields}


def row_of_24_11(**fields: Any) -> dict[str, Any]:
    """As squeue 24.11.5 prints it: numbers that may be unset, states as a list."""

    def number(value: int, given: bool = True) -> dict[str, Any]:
        return {"set": given, "infinite": False, "number": value}

    row = {"job_id": 7, "array_job_id": number(0), "array_task_id": number(0, False), "job_state": ["RUNNING"]}
    return {**row, "start_time": number(1_799_991_000), "restart_cnt": 1, "extra": "", **fields}


@pytest.mark.parametrize(("make", "field"), [(row_of_22_05, "comment"), (row_of_24_11, "extra")])
def test_jobs_of_two_releases_read_the_same(make: Any, field: str) -> None:
    (job,) = jobs.parse_jobs(json.dumps({"jobs": [make()]}), field)
    assert job == jobs.LiveJob("7", "7", "RUNNING", 1_799_991_000.0, 1, "")
    jobs.object_to(job, JOB)
    array = (
        {"array_job_id": 5, "array_task_id": 3}
        if field == "comment"
        else {
            "array_job_id": {"set": True, "number": 5},
            "array_task_id": {"set": True, "number": 3},
        }
    )
    (task,) = jobs.parse_jobs(json.dumps({"jobs": [make(**array)]}), field)
    assert (task.job_id, task.target) == ("7", "5_3")


@pytest.mark.parametrize("text", ["", "{}", '{"jobs": [{}]}', '{"jobs": 3}', '{"jobs": [{"job_id": "x"}]}'])
def test_what_is_no_answer_of_squeue_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not understood"):
        jobs.parse_jobs(text, "extra")


def test_a_component_of_a_heterogeneous_job_is_named_alone() -> None:
    (plain,) = jobs.parse_jobs(json.dumps({"jobs": [row_of_22_05(het_job_id=6, het_job_offset=1)]}), "comment")
    assert plain.target == "6+1"
    leader = row_of_24_11(het_job_id={"set": True, "number": 7}, het_job_offset={"set": True, "number": 0})
    (later,) = jobs.parse_jobs(json.dumps({"jobs": [leader]}), "extra")
    assert later.target == "7+0"


def test_a_row_that_is_not_understood_hides_no_other() -> None:
    text = json.dumps({"jobs": [{"job_id": None}, row_of_22_05()]})
    assert [job.job_id for job in jobs.parse_jobs(text, "comment")] == ["7"]


def test_no_jobs_with_an_error_is_no_answer() -> None:
    text = json.dumps({"jobs": [], "errors": [{"error": "Unable to contact slurm controller"}]})
    with pytest.raises(ValueError, match="Unable to contact"):
        jobs.parse_jobs(text, "comment")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"state": "RUNNING,COMPLETING"}, "not_running"),
        ({"state": "SUSPENDED"}, "not_running"),
        ({"start": WALL - 8000}, "replaced"),
        ({"start": 0.0}, "replaced"),
        ({"text": "mine"}, "foreign"),
        ({"text": f"x{LABEL}=underused"}, "foreign"),
        ({"text": f"{LABEL}=underused mine"}, "foreign"),
    ],
)
def test_a_job_that_must_not_be_marked(change: dict[str, Any], reason: str) -> None:
    job = jobs.LiveJob("7", "7", "RUNNING", WALL - 9000, 0, "")._replace(**change)
    with pytest.raises(Refused) as caught:
        jobs.object_to(job, JOB)
    assert caught.value.reason == reason
