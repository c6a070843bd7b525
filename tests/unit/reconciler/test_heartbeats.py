"""The parts of an object on which an action depends, and the heartbeats that may change meanwhile."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from gpu_exporter.reconciler.kubernetes.targets import depends_on

UNTIL = "gpu-exporter.io/exempt-until"
JOB: dict[str, Any] = {
    "metadata": {
        "name": "train",
        "uid": "u",
        "resourceVersion": "1",
        "labels": {"app": "a", "gpu-exporter.io/class": "batch"},
        "ownerReferences": [],
        "managedFields": [{"time": "2026-01-01T00:00:00Z"}],
    },
    "spec": {"runPolicy": {"suspend": False}},
    "status": {
        "lastReconcileTime": "2026-01-01T00:00:00Z",
        "replicaStatuses": {"Worker": {"active": 2, "selector": "x"}},
        "conditions": [{"type": "Running", "status": "True", "lastUpdateTime": "2026-01-01T00:00:00Z"}],
    },
}


def changed(path: str, value: Any, base: dict[str, Any] = JOB) -> dict[str, Any]:
    found = copy.deepcopy(base)
    *parents, last = path.split("#")
    place: Any = found
    for key in parents:
        place = place[int(key)] if key.isdigit() else place.setdefault(key, {})
    place[last] = value
    return found


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("metadata#resourceVersion", "2"),
        ("metadata#labels#app", "b"),
        ("metadata#managedFields#0#time", "2026-01-02T00:00:00Z"),
        ("status#lastReconcileTime", "2026-01-02T00:00:00Z"),
        ("status#message", "step 7 of 9"),
        ("status#conditions#0#lastUpdateTime", "2026-01-02T00:00:00Z"),
    ],
)
def test_a_heartbeat_changes_nothing_on_which_an_action_depends(path: str, value: Any) -> None:
    assert depends_on(changed(path, value)) == depends_on(JOB)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("metadata#uid", "v"),
        ("metadata#deletionTimestamp", "2026-01-02T00:00:00Z"),
        ("metadata#ownerReferences", [{"kind": "CronJob"}]),
        ("metadata#labels#gpu-exporter.io/class", "serving"),
        ("metadata#labels#kueue.x-k8s.io/queue-name", "q"),
        ("metadata#annotations#gpu-exporter.io/exempt-until", "2099-01-01T00:00:00Z"),
        ("metadata#annotations#gpu-exporter.io/acted", "note"),
        ("spec#runPolicy#suspend", True),
        ("spec#replicas", 3),
        ("status#replicaStatuses#Worker#active", 3),
        ("status#conditions#0#status", "False"),
        ("status#conditions#0#type", "Succeeded"),
    ],
)
def test_a_change_on_which_an_action_depends_is_seen(path: str, value: Any) -> None:
    assert depends_on(changed(path, value)) != depends_on(JOB)


def test_an_expired_wish_that_its_owner_set_again_is_a_change() -> None:
    """The text stays the same, but the wish counts from its last write."""
    wished = changed(f"metadata#annotations#{UNTIL}", "2026-01-01T00:00:00Z")
    assert depends_on(changed("metadata#managedFields#0#time", "2026-01-02T00:00:00Z", wished)) != depends_on(wished)


def test_an_object_without_labels_or_status_depends_on_what_it_has() -> None:
    assert depends_on({"metadata": {"uid": "u"}, "status": {"conditions": "?"}})["conditions"] == []
