"""One odd object among fifty of its kind, at any place: the others are decided on as before, and the cycle succeeds."""

from __future__ import annotations

import copy
import functools
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.testbed.memory_api import MemoryApi

from gpu_exporter.clock import ManualClock
from gpu_exporter.defaults import Policy
from gpu_exporter.reconciler.evidence import Evidence, HolderEvidence, HolderName, UnitEvidence
from gpu_exporter.reconciler.judge import Judgement, judge_of
from gpu_exporter.reconciler.kubernetes.marker import PodMarker
from gpu_exporter.reconciler.kubernetes.stream import OBJECT_MAX
from gpu_exporter.reconciler.marks import timestamp
from gpu_exporter.reconciler.policy import LABEL
from gpu_exporter.reconciler.rulebook import Rulebook

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
# A field of the object, by path, and what stands there; without a path the text of the whole object.
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
    """Evidence that every pod has been idle for long."""

    def read_evidence(self, marked: Any = ()) -> Evidence:
        return Evidence(WALL, tuple(self.holder(at) for at in range(COUNT)), allocations=100 * COUNT)

    def read_holders(self, names: Any) -> Evidence:
        return self.read_evidence()

    @staticmethod
    def holder(at: int) -> HolderEvidence:
        unit = UnitEvidence("n", str(at), f"GPU-{at}", "", STARTED, 80_000.0, 1.0, 1.0, 4)
        return HolderEvidence(HolderName("kubernetes", "ml", f"p{at}"), "", (unit,), 1, frozenset({f"uid-{at}"}))


def judge(objects: dict[str, list[Any]]) -> tuple[Judgement, PodMarker]:
    clock = ManualClock(wall=WALL)
    marker = PodMarker(MemoryApi(objects), POLICY, clock)
    return judge_of(Idle(), [marker], Rulebook(POLICY), clock).judge(), marker


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
def test_an_odd_object_costs_itself(number: int, position: int) -> None:
    kind, path, value = ODD[number]
    honest = decided_honestly()
    objects = everything()
    objects[kind][position] = spoilt(kind, position, path, value)
    judged, _ = judge(objects)
    found = {decision.name: repr(decision) for decision in judged.decisions}
    changed = {name.name for name in honest if found.get(name) != honest[name]}
    assert changed <= {f"p{position}"}
    assert judged.problems == [], "the cycle succeeds"
    # What is not understood is never idle by that: at most its owner's part of it is not there.
    if changed and kind == "Pod":
        (stage,) = [d.stage for d in judged.decisions if d.name.name == f"p{position}"]
        assert stage != "underused" or path == "metadata/annotations"


def test_what_is_left_out_is_counted_and_named(caplog: pytest.LogCaptureFixture) -> None:
    objects = everything()
    objects["Pod"][3] = spoilt("Pod", 3, "metadata/annotations", {"a": HUGE})
    objects["Service"][4] = spoilt("Service", 4, "spec/selector", 7)
    judged, marker = judge(objects)
    assert marker.odd["Pod", "size"] >= 1 and marker.odd["Service", "malformed"] >= 1
    assert "Pod ml/p3 is left out: it is longer than 2 MiB" in caplog.text
    assert ("size", "Pod") in judged.unreadable
    (decision,) = [each for each in judged.decisions if each.name.name == "p3"]
    assert "pod ml/p3 is not understood" in decision.reason


@pytest.mark.parametrize(
    ("phase", "limits", "foreign"),
    [
        ("Pending", {"nvidia.com/gpu": "1"}, True),
        ("Running", {"cpu": "1"}, True),
        ("Running", {"nvidia.com/gpu": "1"}, False),
        ("Running", {"example.com/other": "1"}, False),  # of a resource that the site has named before, perhaps
        ("Failed", {"nvidia.com/gpu": "1"}, False),
    ],
)
def test_our_label_where_we_set_none_is_counted_and_left_alone(
    phase: str, limits: dict[str, str], foreign: bool
) -> None:
    rows = [pod(at) for at in range(COUNT)]
    for row in rows:
        row["metadata"]["labels"] = {LABEL: "underused"}
        row["spec"]["containers"][0]["resources"]["limits"] = limits
        row["status"] |= {"phase": phase, "startTime": None if phase == "Pending" else timestamp(STARTED)}
    marker = PodMarker(MemoryApi({"Pod": rows}), POLICY, ManualClock(wall=WALL))
    assert len(marker.list_marks()) == (0 if foreign else COUNT)
    assert marker.foreign == (COUNT if foreign else 0)
