"""Renewals of every kind of mark: the stage does not change, and the limit of new marks counts for every rise."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

import pytest
from kubernetes import client
from tests.testbed.gpu_resources import GPU_RESOURCES
from tests.testbed.marker_book import POLICY, UNDERUSED, WALL, Book
from tests.testbed.memory_slurm import MemorySlurm

from gpu_exporter.common.clock import ManualClock
from gpu_exporter.reconciler.cycle import ReconcileCycle
from gpu_exporter.reconciler.decision.policy import LABEL
from gpu_exporter.reconciler.decision.rulebook import Rulebook
from gpu_exporter.reconciler.evidence.records import Evidence, HolderEvidence, HolderName, UnitEvidence
from gpu_exporter.reconciler.judge import judge_of
from gpu_exporter.reconciler.kubernetes.checks import OBSERVED
from gpu_exporter.reconciler.kubernetes.client.api import Api
from gpu_exporter.reconciler.kubernetes.marker import PodMarker
from gpu_exporter.reconciler.marks import MarkError, timestamp

COUNT = 50
START = WALL - 90_000


class MemoryPods(Api):
    """An API server with pods in memory. It refuses a patch with an old resourceVersion."""

    def __init__(self) -> None:
        super().__init__(client.ApiClient(client.Configuration()))
        self.pods = [self.make(str(i)) for i in range(1, COUNT + 1)]

    @staticmethod
    def make(name: str) -> dict[str, Any]:
        container = {"name": "main", "resources": {"limits": {"nvidia.com/gpu": "1"}}}
        status = {"name": "main", "state": {"running": {"startedAt": timestamp(START)}}}
        return {
            "metadata": {
                "name": name,
                "namespace": "ml",
                "uid": "uid",
                "resourceVersion": "1",
                "labels": {LABEL: "candidate"},
                "annotations": {OBSERVED: timestamp(WALL - POLICY.unsupported_max / 2)},
            },
            "spec": {"containers": [container]},
            "status": {"phase": "Running", "containerStatuses": [status]},
        }

    def find(self, name: str) -> dict[str, Any]:
        return next(pod for pod in self.pods if pod["metadata"]["name"] == name)

    def call(self, function: Any, *arguments: Any, **options: Any) -> dict[str, Any]:
        if function == self.core.read_namespaced_pod:
            return copy.deepcopy(self.find(arguments[0]))
        if function == self.core.patch_namespaced_pod:
            metadata, change = self.find(arguments[0])["metadata"], arguments[2]["metadata"]
            if change.get("resourceVersion", metadata["resourceVersion"]) != metadata["resourceVersion"]:
                raise MarkError("conflict", "the object has been modified")
            for key in ("labels", "annotations"):
                metadata[key].update(change.get(key, {}))
            metadata["resourceVersion"] += "1"
        return {"metadata": {"name": "ml"}}

    send = call  # type: ignore[assignment]

    def pages(self, function: Any, *arguments: Any, kind: str, keep: Callable[[Any], Any], **options: Any) -> Any:
        is_pending = options.get("field_selector") == "status.phase=Pending"
        return [keep(copy.deepcopy(pod)) for pod in self.pods] if kind == "Pod" and not is_pending else []


class Node:
    """A source whose holders have all been idle for long. It is also the observer of the cycle."""

    def __init__(self, scheduler: str) -> None:
        self.scheduler = scheduler
        self.writes: Counter[str] = Counter()
        self.skips: Counter[str] = Counter()
        self.on_read: Callable[[], None] = lambda: None

    def read_evidence(self, marked: Collection[HolderName] = ()) -> Evidence:
        self.on_read()
        unit = UnitEvidence("n", "0", "GPU-0", "", START, UNDERUSED, 1.0, 1.0, 2)
        is_job = self.scheduler == "slurm"
        namespace, clusters = ("", {"lab"}) if is_job else ("ml", set[str]())
        return Evidence(
            WALL,
            tuple(
                HolderEvidence(
                    HolderName(self.scheduler, namespace, str(i)),
                    "",
                    (unit,),
                    1,
                    frozenset() if is_job else frozenset({"uid"}),
                    clusters=frozenset(clusters),
                )
                for i in range(1, COUNT + 1)
            ),
            allocations=100 * COUNT,
        )

    def read_holders(self, names: Collection[HolderName]) -> Evidence:
        return self.read_evidence(names)

    def count_write(self, result: str) -> None:
        self.writes[result] += 1

    def count_skip(self, reason: str) -> None:
        self.skips[reason] += 1


def book() -> Book:
    made = Book()
    for i in range(1, COUNT + 1):
        name = HolderName("kubernetes", "ml", str(i))
        made.marks[name], made.observed[name] = "candidate", WALL - POLICY.unsupported_max / 2
    return made


def slurm(release: str) -> MemorySlurm:
    old = timestamp(WALL - POLICY.unsupported_max / 2)
    made = MemorySlurm(release, text=f"{LABEL}=candidate;since=x;gpus=1;observed-until={old}")
    for row in made.rows:
        row["start_time"] = {"set": True, "number": int(START)} if made.own == "Extra" else int(START)
    return made


MARKERS: dict[str, Callable[[], Any]] = {
    "book": book,
    "pods": lambda: PodMarker(MemoryPods(), POLICY, resources=GPU_RESOURCES),
    "jobs of 22.05": lambda: slurm("22.05.8"),
    "jobs of 24.11": lambda: slurm("24.11.5"),
}


@pytest.mark.parametrize("name", MARKERS)
def test_marks_beyond_the_limit_are_renewed_and_do_not_rise(name: str) -> None:
    marker = MARKERS[name]()
    policy = POLICY._replace(new_marks_namespace_max=COUNT)
    node, limit = Node(marker.scheduler), policy.new_marks_max
    assert limit < COUNT
    clock = ManualClock(wall=WALL)
    assert ReconcileCycle(judge_of(node, [marker], Rulebook(policy)), [marker], policy, node, clock).run() == ""
    assert node.writes == {"written": limit, "renewed": COUNT - limit}
    assert node.skips == {"limit": COUNT - limit}
    marks = marker.list_marks()
    assert Counter(mark.stage for mark in marks) == {"underused": limit, "candidate": COUNT - limit}
    assert {mark.observed_wall for mark in marks} == {WALL}


def test_a_renewal_does_not_overwrite_what_an_owner_wrote_after_the_list() -> None:
    api = MemoryPods()
    marker = PodMarker(api, POLICY, resources=GPU_RESOURCES)
    node = Node("kubernetes")

    def edit() -> None:
        for pod in api.pods:
            pod["metadata"] |= {"labels": {}, "annotations": {"mine": "x"}, "resourceVersion": "2"}

    node.on_read = edit
    policy = POLICY._replace(new_marks_max=0)
    assert (
        ReconcileCycle(
            judge_of(node, [marker], Rulebook(POLICY)),
            [marker],
            policy,
            node,
            ManualClock(wall=WALL),
        ).run()
        == ""
    )
    assert node.writes == {"conflict": COUNT}
    assert all(pod["metadata"]["annotations"] == {"mine": "x"} for pod in api.pods)
