"""One odd object among fifty of its kind, at any position: decisions on the others are unchanged, the cycle succeeds."""

from __future__ import annotations

import copy
import functools
import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.testbed.gpu_resources import GPU_RESOURCES
from tests.testbed.memory_api import MemoryApi

from gpu_exporter.common.clock import ManualClock
from gpu_exporter.common.config.defaults import Policy
from gpu_exporter.reconciler.decision.policy import LABEL
from gpu_exporter.reconciler.decision.rulebook import Rulebook
from gpu_exporter.reconciler.evidence.records import Evidence, HolderEvidence, HolderName, UnitEvidence
from gpu_exporter.reconciler.judge import Judgement, judge_of
from gpu_exporter.reconciler.kubernetes.checks import OBSERVED
from gpu_exporter.reconciler.kubernetes.client.api import Budget, OddAnswer
from gpu_exporter.reconciler.kubernetes.client.namespace import LARGE_MAX
from gpu_exporter.reconciler.kubernetes.client.stream import OBJECT_MAX
from gpu_exporter.reconciler.kubernetes.marker import PodMarker
from gpu_exporter.reconciler.kubernetes.owners import Owners
from gpu_exporter.reconciler.kubernetes.targets import TargetReader
from gpu_exporter.reconciler.marks import MarkError, Refused, timestamp

COUNT = 50
WALL = 1_800_000_000.0
STARTED = WALL - 90_000.0
POLICY = Policy()
HUGE = "x" * (OBJECT_MAX + 1)


def pod(at: int) -> dict[str, Any]:
    status = {"name": "main", "state": {"running": {"startedAt": timestamp(STARTED)}}}
    return {
        "metadata": {
            "name": f"p{at}",
            "namespace": "ml",
            "uid": f"uid-{at}",
            "resourceVersion": "1",
            "labels": {"app": f"a{at}"},
            "ownerReferences": [
                {"apiVersion": "batch/v1", "kind": "Job", "name": f"j{at}", "uid": f"job-{at}", "controller": True}
            ],
        },
        "spec": {"containers": [{"name": "main", "resources": {"limits": {"nvidia.com/gpu": "1"}}}]},
        "status": {"phase": "Running", "startTime": timestamp(STARTED), "containerStatuses": [status]},
    }


def job(at: int) -> dict[str, Any]:
    return {
        "metadata": {"name": f"j{at}", "namespace": "ml", "uid": f"job-{at}"},
        "spec": {"parallelism": 1, "completions": 1, "template": {"spec": {"containers": [{"name": "x"}]}}},
        "status": {"active": 1},
    }


def service(at: int) -> dict[str, Any]:
    return {"metadata": {"name": f"s{at}"}, "spec": {"selector": {"app": f"none-{at}"}}}


def endpoints(at: int) -> dict[str, Any]:
    target = {"kind": "Pod", "uid": f"uid-{at}-none"}
    labels = {"kubernetes.io/service-name": f"s{at}"}
    return {"metadata": {"name": f"e{at}", "labels": labels}, "endpoints": [{"targetRef": target}]}


def scaler(at: int) -> dict[str, Any]:
    return {"metadata": {"name": f"h{at}"}, "spec": {"scaleTargetRef": {"kind": "Deployment", "name": f"none-{at}"}}}


MAKE = {
    "Pod": pod,
    "Job": job,
    "Service": service,
    "EndpointSlice": endpoints,
    "HorizontalPodAutoscaler": scaler,
}
# Kind, path of a field, and its odd value. Without a path, the value is the text of the whole object.
ODD: list[tuple[str, str, Any]] = [
    ("Pod", "metadata/annotations", {"kueue.x-k8s.io/pod-group-total-count": "²"}),
    ("Pod", "metadata/annotations", {"kueue.x-k8s.io/pod-group-total-count": "9" * 5_000}),
    ("Pod", "metadata/annotations", {"gpu-exporter.io/idle-after": "²h", "gpu-exporter.io/exempt-until": "9" * 5_000}),
    ("Pod", "metadata/annotations", {"note": HUGE}),
    ("Pod", "metadata/annotations", {"gpu-exporter.io/exempt-reason": "y" * 250_000}),
    ("Pod", "metadata/annotations", [1]),
    ("Pod", "metadata/labels", {f"k{i}": "v" * 60 for i in range(1_000)}),
    ("Pod", "metadata/labels", "none"),
    ("Pod", "metadata/ownerReferences", [{"kind": "Pod", "name": f"x{i}", "uid": f"x{i}"} for i in range(5_000)]),
    ("Pod", "metadata/ownerReferences", [7]),
    ("Pod", "metadata/name", None),
    ("Pod", "metadata/uid", {"a": 1}),
    ("Pod", "metadata", None),
    ("Pod", "spec", None),
    ("Pod", "spec/containers", 7),
    *(
        ("Pod", "spec/containers/0/resources/limits", {"nvidia.com/gpu": q})
        for q in ("8e0", "1k", "16Gi", "x", "²", -1, {})
    ),
    ("Pod", "status/phase", {"a": 1}),
    ("Pod", "status/containerStatuses", [7]),
    ("Pod", "", '{"metadata":{"name":"p","x":' + "[" * 20_000 + "]" * 20_000 + "}}"),
    ("Pod", "", "7777777"),
    ("Job", "spec/parallelism", "²"),
    ("Job", "spec", 7),
    ("Job", "metadata/annotations", {"a": HUGE}),
    ("Job", "metadata/labels", 7),
    ("Job", "status/conditions", "x" * 300_000),
    ("Job", "status", {"conditions": [{"type": "x" * 100}] * 10_000}),
    ("Service", "spec/selector", 7),
    ("Service", "spec/selector", {f"k{i}": HUGE[:1_000] for i in range(500)}),
    ("Service", "metadata", None),
    ("Service", "metadata/annotations", {"a": HUGE}),
    ("EndpointSlice", "endpoints", 7),
    ("EndpointSlice", "endpoints", [7]),
    ("EndpointSlice", "endpoints", [{"targetRef": {"kind": "Pod", "uid": {"a": 1}}}] * 1_000),
    ("EndpointSlice", "metadata/labels", [1]),
    ("HorizontalPodAutoscaler", "spec", None),
    ("HorizontalPodAutoscaler", "spec/scaleTargetRef", {"kind": 7, "name": "x" * 5_000}),
    ("HorizontalPodAutoscaler", "metadata/name", HUGE),
]


def spoilt(kind: str, at: int, path: str, value: Any) -> Any:
    if not path:
        return value
    found = copy.deepcopy(MAKE[kind](at))
    place: Any = found
    *parents, last = path.split("/")
    for key in parents:
        place = place[int(key)] if key.isdigit() else place.setdefault(key, {})
    place[last] = value
    return found


class Idle:
    """Evidence that all pods have been idle for long, except for those in `busy`."""

    def __init__(self, *busy: int) -> None:
        self._busy = busy

    def read_evidence(self, marked: Any = ()) -> Evidence:
        return Evidence(WALL, tuple(self.holder(at) for at in range(COUNT)), allocations=100 * COUNT)

    def read_holders(self, names: Any) -> Evidence:
        return self.read_evidence()

    def holder(self, at: int) -> HolderEvidence:
        idle_s = 0.0 if at in self._busy else 80_000.0
        unit = UnitEvidence("n", str(at), f"GPU-{at}", "", STARTED, idle_s, 1.0, 1.0, 4)
        return HolderEvidence(HolderName("kubernetes", "ml", f"p{at}"), "", (unit,), 1, frozenset({f"uid-{at}"}))


def judge(objects: dict[str, list[Any]], *busy: int) -> tuple[Judgement, PodMarker]:
    clock = ManualClock(wall=WALL)
    marker = PodMarker(MemoryApi(objects), POLICY, clock, resources=GPU_RESOURCES)
    return judge_of(Idle(*busy), [marker], Rulebook(POLICY)).judge(), marker


def everything() -> dict[str, list[Any]]:
    return {kind: [make(at) for at in range(COUNT)] for kind, make in MAKE.items()}


@functools.cache
def decided_honestly() -> dict[HolderName, str]:
    judged, marker = judge(everything())
    assert judged.problems == [] and not marker.odd
    assert Counter(decision.stage for decision in judged.decisions) == {"underused": COUNT}
    return {decision.name: repr(decision) for decision in judged.decisions}


@pytest.mark.parametrize("number", range(len(ODD)), ids=[f"{kind} {path}" for kind, path, _ in ODD])
@settings(max_examples=4, deadline=None)
@given(position=st.integers(0, COUNT - 1))
def test_an_odd_object_affects_only_its_own_pod(number: int, position: int) -> None:
    kind, path, value = ODD[number]
    honest = decided_honestly()
    objects = everything()
    objects[kind][position] = spoilt(kind, position, path, value)
    judged, _ = judge(objects)
    found = {decision.name: repr(decision) for decision in judged.decisions}
    changed = {name.name for name in honest if found.get(name) != honest[name]}
    assert changed <= {f"p{position}"}
    assert judged.problems == [], "the cycle succeeds"
    # An odd pod never becomes underused, unless only an annotation is odd.
    if changed and kind == "Pod":
        (stage,) = [d.stage for d in judged.decisions if d.name.name == f"p{position}"]
        assert stage != "underused" or path == "metadata/annotations"


def test_objects_that_are_left_out_are_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    objects = everything()
    objects["Pod"][3] = spoilt("Pod", 3, "metadata/annotations", {"a": HUGE})
    objects["Service"][4] = spoilt("Service", 4, "spec/selector", 7)
    judged, marker = judge(objects)
    assert marker.odd["Pod", "size"] >= 1 and marker.odd["Service", "malformed"] >= 1
    assert "the reconciler ignores Pod ml/p3: it is longer than 2 MiB" in caplog.text
    assert ("size", "Pod") in judged.unreadable
    (decision,) = [each for each in judged.decisions if each.name.name == "p3"]
    assert "pod ml/p3 cannot be read" in decision.reason


@pytest.mark.parametrize(
    ("phase", "limits", "foreign"),
    [
        ("Pending", {"nvidia.com/gpu": "1"}, True),
        ("Running", {"cpu": "1"}, True),
        ("Running", {"nvidia.com/gpu": "1"}, False),
        ("Running", {"example.com/other": "1"}, False),  # perhaps a resource that the site has named before
        ("Failed", {"nvidia.com/gpu": "1"}, False),
    ],
)
def test_a_mark_label_that_the_reconciler_did_not_set_is_counted_and_ignored(
    phase: str, limits: dict[str, str], foreign: bool
) -> None:
    rows = [pod(at) for at in range(COUNT)]
    for row in rows:
        row["metadata"]["labels"] = {LABEL: "underused"}
        row["spec"]["containers"][0]["resources"]["limits"] = limits
        row["status"] |= {"phase": phase, "startTime": None if phase == "Pending" else timestamp(STARTED)}
    marker = PodMarker(MemoryApi({"Pod": rows}), POLICY, ManualClock(wall=WALL), resources=GPU_RESOURCES)
    assert len(marker.list_marks()) == (0 if foreign else COUNT)
    assert marker.foreign == (COUNT if foreign else 0)


def member(at: int) -> dict[str, Any]:
    """A pod that belongs to a gang only by a label."""
    made = pod(at)
    del made["metadata"]["ownerReferences"]
    made["metadata"]["labels"]["training.kubeflow.org/job-name"] = "big"
    return made


def large(at: int) -> str:
    """The same pod with arguments that JSON escapes: 0.4 MB in etcd, 2.4 MB in the answer."""
    made = member(at)
    made["spec"]["containers"][0]["args"] = ["<" * 400_000]
    return json.dumps(made).replace("<", "\\u003c")


@pytest.mark.parametrize(
    "other",
    [
        large,
        lambda at: {**member(at), "spec": 7},
        lambda at: {**member(at), "status": 7},
        lambda at: {**member(at), "metadata": {**member(at)["metadata"], "ownerReferences": [7]}},
        lambda at: {**member(at), "metadata": {**member(at)["metadata"], "annotations": {"a": 7}}},
        lambda at: {**member(at), "metadata": {**member(at)["metadata"], "managedFields": [7]}},
        lambda at: json.dumps(
            {**member(at), "metadata": {**member(at)["metadata"], "managedFields": [{"time": "x", "fieldsV1": "DEEP"}]}}
        ).replace('"DEEP"', "[" * 5_000 + "]" * 5_000),
    ],
    ids=["too large", "spec", "status", "references", "annotations", "managed fields", "deep"],
)
def test_an_odd_pod_remains_a_member_of_its_gang(other: Callable[[int], Any]) -> None:
    """The odd pod works, so members that wait for it are not idle."""
    for second in (member, other):
        judged, _ = judge({"Pod": [member(0), second(1), *(pod(at) for at in range(2, COUNT))]}, 1)
        stages = {decision.name.name: decision.stage for decision in judged.decisions}
        assert stages["p0"] != "underused", second
        assert judged.problems == []
        assert [stages[f"p{at}"] for at in range(2, COUNT)] == ["underused"] * (COUNT - 2)


def test_a_long_list_of_failed_indexes_is_read_completely() -> None:
    indexes = ",".join(str(i) for i in range(0, 4_000, 2))
    gang = {"spec": {"parallelism": 4, "completions": 5_000, "template": {}}, "status": {"failedIndexes": indexes}}
    pods = [pod(at) for at in range(COUNT)]
    jobs = [{**job(at), **(gang if at == 0 else {})} for at in range(COUNT)]
    judged, _ = judge({"Pod": pods, "Job": jobs})
    (decision,) = [each for each in judged.decisions if each.name.name == "p0"]
    assert decision.stage != "underused" and "waits for" in decision.reason


@pytest.mark.parametrize("rows", [[7], [{"name": "x"}], [{"kind": {}, "name": "x", "namespaced": True}], 7])
def test_an_odd_row_of_discovery_affects_only_its_kind(rows: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = everything()
    objects["Pod"][3]["metadata"]["ownerReferences"][0] |= {"apiVersion": "other.io/v1", "kind": "Odd"}
    answer = MemoryApi._answer

    def with_odd(self: MemoryApi, name: str, arguments: Any, options: Any) -> str:
        if name == "get_api_resources" and arguments[0] == "other.io":
            return json.dumps({"resources": rows})
        return answer(self, name, arguments, options)

    monkeypatch.setattr(MemoryApi, "_answer", with_odd)
    judged, _ = judge(objects)
    assert {d.name.name: d.stage for d in judged.decisions if d.stage != "underused"} == {"p3": "unknown"}
    assert judged.problems == []


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"status": {"phase": "Failed", "reason": "OutOfnvidia.com/gpu"}}, False),
        ({"spec": 7}, True),
        ({"status": 7}, True),
    ],
)
def test_a_mark_on_an_odd_pod_can_be_withdrawn(change: dict[str, Any], text: bool) -> None:
    rows = [pod(at) for at in range(3)]
    for row in rows:
        row["metadata"] |= {"labels": {LABEL: "underused"}, "annotations": {OBSERVED: timestamp(WALL)}}
    rows[1] |= change
    marker = PodMarker(MemoryApi({"Pod": rows}), POLICY, ManualClock(wall=WALL), resources=GPU_RESOURCES)
    marks = {mark.name.name: mark for mark in marker.list_marks()}
    assert sorted(marks) == ["p0", "p1", "p2"]
    assert marks["p1"].incarnation == "uid-1"
    if text:
        with pytest.raises(Refused, match="so only its metadata can be read"):
            marker.check_alone(marks["p1"], None, 60.0, WALL)
    else:
        assert marks["p1"].ended and marker.read_fate(marks["p1"].name, "uid-1") == "lost"


def test_a_marked_pod_that_is_pending_again_loses_its_mark() -> None:
    rows = [pod(at) for at in range(3)]
    for row in rows:
        row["metadata"] |= {"labels": {LABEL: "underused"}, "annotations": {OBSERVED: timestamp(WALL)}}
    marker = PodMarker(MemoryApi({"Pod": rows}), POLICY, ManualClock(wall=WALL), resources=GPU_RESOURCES)
    assert len(marker.list_marks()) == 3
    rows[1]["status"] |= {"phase": "Pending"}  # its node has restarted
    rows[2]["status"] |= {"phase": "Pending"}
    del rows[2]["metadata"]["annotations"]  # so the reconciler has not set the label
    marker = PodMarker(
        MemoryApi({"Pod": rows}), POLICY, ManualClock(wall=WALL), resources=GPU_RESOURCES
    )  # another process
    assert [mark.name.name for mark in marker.list_marks()] == ["p0", "p1"] and marker.foreign == 1
    (mark,) = [mark for mark in marker.list_marks() if mark.name.name == "p1"]
    with pytest.raises(Refused, match="has not started, or is starting again"):
        marker.check_alone(mark, None, 60.0, WALL)


def test_an_unreadable_workload_is_not_taken_for_no_workload() -> None:
    """Otherwise the reconciler would suspend the Job although Kueue manages it."""
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": "j", "uid": "job-1", "controller": True}
    workload = {"metadata": {"name": "w", "uid": "w", "ownerReferences": [owner]}, "spec": {"x": ["y" * 100] * 5_000}}
    small = {**workload, "spec": {"active": True}}
    for rows, found in (([small], 1), ([], 0)):
        api = MemoryApi({"Workload": rows})
        reader = TargetReader(api, POLICY, ManualClock(), Owners(api, ManualClock()), GPU_RESOURCES)
        assert len(reader._workloads("v1beta1", "ml", "job-1")) == found
    api = MemoryApi({"Workload": [workload]})
    reader = TargetReader(api, POLICY, ManualClock(), Owners(api, ManualClock()), GPU_RESOURCES)
    with pytest.raises(OddAnswer, match="Workload w: its spec and status are larger than 256 KiB"):
        reader._workloads("v1beta1", "ml", "job-1")


def test_large_pods_that_have_ended_do_not_make_their_namespace_unknown() -> None:
    ended = [large(100 + at).replace('"Running"', '"Succeeded"') for at in range(30)]
    judged, _ = judge({"Pod": [*(pod(at) for at in range(COUNT)), *map(json.loads, ended)]})
    assert {decision.stage for decision in judged.decisions} == {"underused"}


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        (
            [large(at) for at in range(LARGE_MAX + 1)],
            "namespace ml has 21 pods that are malformed or too large; the reconciler reads the metadata of at most 20",
        ),
        (
            ['{"metadata": {"annotations": {"x": "' + HUGE + '"}, "name": "p0"}}'],
            "cannot read the name of a pod in namespace ml: the pod is too large",
        ),
    ],
    ids=["too many", "without a name"],
)
def test_the_reason_for_an_unreadable_namespace_says_how_many_pods_are_odd(rows: list[Any], why: str) -> None:
    judged, _ = judge({**everything(), "Pod": [*rows, *(pod(at) for at in range(len(rows), COUNT))]})
    assert {decision.stage for decision in judged.decisions} == {"unknown"}
    assert all(why in decision.reason for decision in judged.decisions), judged.decisions[0].reason


@pytest.mark.parametrize(("length", "is_failure"), [(1_000, True), (70 * 2**20, False)])
def test_a_short_list_that_takes_too_long_means_a_slow_server(length: int, is_failure: bool) -> None:
    clock = ManualClock()
    most = Budget(2**30, clock.monotonic() + 10.0, clock)
    most.spend(length)
    clock.advance(11.0)
    with pytest.raises(MarkError, match="not read within its time limit") as caught:
        most.spend(1)
    assert (caught.value.result == "error") is is_failure


def test_a_controller_that_is_nested_too_deeply_affects_only_its_pod() -> None:
    objects = everything()
    deep = json.dumps({**job(3), "spec": "DEEP"}).replace('"DEEP"', '{"x":' + "[" * 5_000 + "]" * 5_000 + "}")
    objects["Job"][3] = deep
    judged, _ = judge(objects)
    assert {d.name.name: d.stage for d in judged.decisions if d.stage != "underused"} == {"p3": "unknown"}
    assert judged.problems == []


def test_a_foreign_label_on_a_large_pod_is_ignored() -> None:
    rows = [json.loads(large(at)) for at in range(2)]
    rows[0]["metadata"]["labels"] = {LABEL: "my-own-value"}
    rows[1]["metadata"] |= {"labels": {LABEL: "underused"}, "annotations": {OBSERVED: timestamp(WALL)}}
    marker = PodMarker(
        MemoryApi({"Pod": [json.dumps(row).replace("<", "\\u003c") for row in rows]}),
        POLICY,
        ManualClock(),
        resources=GPU_RESOURCES,
    )
    assert [mark.name.name for mark in marker.list_marks()] == ["p1"] and marker.foreign == 1


@pytest.mark.parametrize(("status", "names_the_right"), [(403, True), (500, False), (0, False)])
def test_only_a_refused_condition_asks_for_the_missing_right(
    status: int, names_the_right: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = MemoryApi({})

    def fail(*arguments: Any, **options: Any) -> None:
        raise MarkError("error", f"API server: {status}", status=status)

    monkeypatch.setattr(api, "send", fail)
    marker = PodMarker(api, POLICY, ManualClock(), resources=GPU_RESOURCES)
    marker._patch_condition(HolderName("kubernetes", "ml", "p0"), "uid-0", {})
    (line,) = caplog.messages
    assert f"was not updated: API server: {status}; the label, which is the mark, is not affected" in line
    assert ("give the reconciler `patch` on pods/status" in line) is names_the_right
