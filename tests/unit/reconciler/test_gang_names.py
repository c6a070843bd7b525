"""Gangs of every scheduler: a working pod and an idle pod without a common owner are judged together."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from tests.unit.reconciler.test_odd_objects import judge, large, pod

from gpu_exporter.reconciler.kubernetes.client.keys import GROUPS
from gpu_exporter.reconciler.kubernetes.client.lean import LIST_MAX
from gpu_exporter.reconciler.kubernetes.gangs import unnamed_gang
from gpu_exporter.reconciler.kubernetes.owners import Link, pods_wanted

# Keys as different sites write them, and as Armada does.
MORE = (
    *("batch.example.com/pod-group", "example.com/gang-name", "gang.example/id", "example.com/gangName", "gangId"),
    *("pod_group_name", "x/pod_group", "x/podGroup", "x/myGangKey", "x/GANG", "gang_name", "podGroup.x/uid"),
)
SPECS = {
    "Kubernetes 1.35": {"workloadRef": {"name": "w", "podGroup": "workers", "podGroupReplicaKey": "1"}},
    "Kubernetes 1.36": {"schedulingGroup": {"podGroupName": "w-workers"}},
}


def bare(at: int, **metadata: Any) -> dict[str, Any]:
    made = pod(at)
    del made["metadata"]["ownerReferences"]
    made["metadata"] |= metadata
    return made


def stages(*pods: Any, busy: int = 0) -> dict[str, str]:
    judged, _ = judge({"Pod": list(pods)}, busy)
    return {each.name.name: each.stage for each in judged.decisions if each.name.name in {"p0", "p1", "p2"}}


def test_pods_that_name_no_group_are_judged_separately() -> None:
    assert stages(bare(0), bare(1))["p1"] == "underused"


@pytest.mark.parametrize("place", ["labels", "annotations"])
@pytest.mark.parametrize("key", [*GROUPS, *MORE])
def test_pods_that_name_a_group_by_any_key_are_one_gang(key: str, place: str) -> None:
    pods = [bare(at, **{place: {key: "g"}}) for at in range(2)]
    assert stages(*pods)["p1"] == "partial"
    apart = [bare(at, **{place: {key: f"g{at}"}}) for at in range(2)]
    assert stages(*apart)["p1"] == "underused"


K8S, KOORDINATOR = "pod-group.scheduling.sigs.k8s.io", "gang.scheduling.koordinator.sh"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"applicationId": "a"}, {"yunikorn.apache.org/app-id": "a"}),
        ({"scheduling.x-k8s.io/pod-group": "a"}, {K8S: "a"}),
        ({"scheduling.k8s.io/group-name": "a"}, {"scheduling.volcano.sh/group-name": "a"}),
        *(
            ({f"{name}/name": "ps", f"{name}/groups": groups}, {f"{name}/name": "w", f"{name}/groups": groups})
            for name in (K8S, KOORDINATOR)
            for groups in ('["ml/ps","ml/w"]', "ml/w, ml/ps")
        ),
        ({f"{KOORDINATOR}/name": "ps", f"{KOORDINATOR}/groups": '["ml/w"]'}, {f"{KOORDINATOR}/name": "w"}),
        ({"applicationId": "yunikorn-1"}, {"applicationId": "yunikorn-1"}),
    ],
)
def test_pods_that_name_a_group_by_two_keys_or_in_a_list_of_groups_are_one_gang(one: Any, other: Any) -> None:
    assert stages(bare(0, annotations=one), bare(1, annotations=other))["p1"] == "partial"


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_pods_that_name_a_group_in_their_spec_are_one_gang(spec: dict[str, Any]) -> None:
    pods = [bare(at) for at in range(2)]
    for each in pods:
        each["spec"] |= copy.deepcopy(spec)
    assert stages(*pods)["p1"] == "partial"
    (field,) = pods[1]["spec"].keys() - {"containers"}
    name = "podGroupName" if field == "schedulingGroup" else "podGroup"
    pods[1]["spec"][field][name] = "others"
    assert stages(*pods)["p1"] == "underused"
    too_large = large(0).replace("training.kubeflow.org/job-name", "app.kubernetes.io/name")
    assert stages(too_large, pods[1])["p1"] == "unknown", "only the metadata of the other pod was read"


@pytest.mark.parametrize(
    "metadata",
    [
        {"annotations": {"yunikorn.apache.org/task-group-name": "workers"}},
        {
            "annotations": {"yunikorn.apache.org/task-group-name": "w"},
            "labels": {"applicationId": "yunikorn-ml-autogen"},
        },
        {"annotations": {"gang.scheduling.koordinator.sh/min-available": "2"}},
        {"labels": {"example.com/gang-size": "2"}},
        {"annotations": {"example.com/gang-size": "2"}, "labels": {"applicationId": "mine"}},
        {"annotations": {"example.com/gangCardinality": "2", "volcano.sh/job-name": "mine"}},
    ],
)
def test_a_pod_without_a_controller_in_an_unnamed_gang_is_unknown(metadata: dict[str, Any]) -> None:
    judged, _ = judge({"Pod": [bare(0), bare(1, **metadata)]}, 0)
    (decision,) = [each for each in judged.decisions if each.name.name == "p1"]
    assert decision.stage == "unknown" and "no known label names the gang" in decision.reason
    assert judged.problems == []
    controlled = pod(1)
    controlled["metadata"] |= copy.deepcopy(metadata)
    job = {"metadata": {"name": "j1", "uid": "job-1"}, "spec": {"parallelism": 1, "completions": 1}, "status": {}}
    judged, _ = judge({"Pod": [bare(0), controlled], "Job": [job]}, 0)
    assert {each.stage for each in judged.decisions if each.name.name == "p1"} == {"underused"}, (
        "the pods of its Job are its gang"
    )


@pytest.mark.parametrize("count", [30, 250, 2000])
def test_no_group_of_a_long_list_of_groups_is_lost(count: int) -> None:
    names = [f"role-{number:04d}-of-a-training-with-a-long-name" for number in range(count)]
    groups = json.dumps([f"ml/{name}" for name in names])
    ends = [{f"{KOORDINATOR}/name": name, f"{KOORDINATOR}/groups": groups} for name in (names[-1], names[0])]
    assert stages(*(bare(at, annotations=each) for at, each in enumerate(ends)))["p1"] == "partial"
    if len(groups) < LIST_MAX:
        ends[0] = {f"{KOORDINATOR}/name": names[-1]}
        assert stages(*(bare(at, annotations=each) for at, each in enumerate(ends)))["p1"] == "partial"


def test_pods_with_two_lists_of_groups_are_two_gangs() -> None:
    ends = [{f"{KOORDINATOR}/name": f"g{at}", f"{KOORDINATOR}/groups": f'["ml/g{at}"]'} for at in range(2)]
    assert stages(*(bare(at, annotations=each) for at, each in enumerate(ends)))["p1"] == "underused"


def test_a_pod_with_too_many_labels_remains_a_member_of_its_gang() -> None:
    """Only some of its labels are kept, and the pod itself is `unknown`. It may be the member that works."""
    many = {f"x/{number}": "y" * 60 for number in range(300)} | {"example.com/gang-name": "g"}
    pods = [bare(0, labels=many), bare(1, labels={"example.com/gang-name": "g"})]
    assert stages(*pods)["p1"] in ("partial", "unknown")


def test_a_controller_above_a_set_of_replicas_defines_no_gang() -> None:
    """A pod below a Deployment that an operator's object controls counts as a pod without a gang's controller."""
    made = bare(1, annotations={"example.com/gang-size": "2"})
    links = [Link("apps/v1", "ReplicaSet", "r", "u1"), Link("example.com/v1", "Train", "t", "u2")]
    assert unnamed_gang(made["metadata"], links) == "example.com/gang-size"
    assert unnamed_gang(made["metadata"], links[1:]) == ""


def test_a_further_key_of_the_scheduler_that_names_the_gang_makes_no_second_gang() -> None:
    for named in (
        {"applicationId": "a", "yunikorn.apache.org/task-group-name": "w"},
        {"scheduling.x-k8s.io/pod-group": "a", f"{K8S}/min-available": "2"},
        {f"{KOORDINATOR}/name": "a", f"{KOORDINATOR}/min-available": "2"},
    ):
        assert stages(*(bare(at, annotations=named) for at in range(2)))["p1"] == "partial"


@pytest.mark.parametrize(
    "key", ["example.com/megangle", "engangement", "x/gangster", "x/Gangster", "yunikorn.apache.org/queue"]
)
def test_a_key_that_only_resembles_gang_makes_no_gang(key: str) -> None:
    assert stages(bare(0), bare(1, labels={key: "x"}))["p1"] == "underused"


INDEXED = {"parallelism": 8, "completions": 8}
QUEUE = {"parallelism": 8}
ENDS: list[tuple[dict[str, Any], dict[str, Any], int | None]] = [
    (INDEXED, {}, 8),
    (INDEXED, {"succeeded": 3}, 5),
    (INDEXED, {"succeeded": 3, "failedIndexes": "1,4-5"}, 2),
    (QUEUE, {}, 8),
    (QUEUE, {"succeeded": 1, "active": 2}, 2),  # a work queue starts no further pod
    (QUEUE, {"succeeded": 1}, 0),
    ({"completions": 4}, {}, None),
    *(
        ({**spec}, {"active": 1, "conditions": [{"type": kind, "status": "True"}]}, 0)
        for spec in (INDEXED, QUEUE)
        for kind in ("Complete", "Failed", "SuccessCriteriaMet", "FailureTarget")
    ),
    (INDEXED, {"conditions": [{"type": "Failed", "status": "False"}, {"type": "Suspended", "status": "True"}]}, 8),
]


@pytest.mark.parametrize(("spec", "status", "wanted"), ENDS)
def test_a_job_wants_only_the_pods_that_it_can_still_start(
    spec: dict[str, Any], status: dict[str, Any], wanted: int | None
) -> None:
    assert pods_wanted("Job", {"spec": spec, "status": status}) == wanted
