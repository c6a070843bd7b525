"""When namespaces are read: as seldom as possible, and again when a pod is about to rise or to lose its GPUs."""

from __future__ import annotations

from typing import Any

import pytest
from kubernetes import client
from tests.testbed.gpu_resources import GPU_RESOURCES

from gpu_exporter.common.clock import ManualClock
from gpu_exporter.common.config.defaults import Policy
from gpu_exporter.reconciler.decision.surroundings import Unreadable
from gpu_exporter.reconciler.evidence.records import HolderName
from gpu_exporter.reconciler.kubernetes.around import survey
from gpu_exporter.reconciler.kubernetes.around.survey import FRESH_S, VIEW_S, PodSurveyor, _NamespaceRead, describe
from gpu_exporter.reconciler.kubernetes.client.api import Api
from gpu_exporter.reconciler.kubernetes.client.namespace import NamespaceView, PodView
from gpu_exporter.reconciler.kubernetes.client.routes import NO_ROUTE
from gpu_exporter.reconciler.kubernetes.owners import Chain
from gpu_exporter.reconciler.marks import MarkError

A, B = HolderName("kubernetes", "a", "x"), HolderName("kubernetes", "b", "x")


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ({"team": "phys"}, "phys"),
        ({"other": "phys"}, ""),
        ({}, ""),
        *(({"team": odd}, "") for odd in ("", "a b", "x" * 64, "\x1b[31m", "<b>", "ä", "a\n", "-a", "\u202ea")),
    ],
)
def test_a_namespace_names_its_tenant_only_by_a_valid_label(labels: dict[str, str], expected: str) -> None:
    pod = PodView({"name": "p", "uid": "u"}, 1, "", "")
    view = NamespaceView({"labels": labels} if labels else {}, {"p": pod}, {}, {}, {})
    for setting, found in (("team", expected), ("", "")):
        policy = Policy()._replace(tenant_label=setting)
        around = describe(HolderName("kubernetes", "ml", "p"), view, (), (), NO_ROUTE, policy, 0.0)
        assert around.tenant == found


def test_a_survey_of_one_namespace_does_not_drop_the_views_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    surveyor = PodSurveyor(Api(client.ApiClient()), Policy(), clock, resources=GPU_RESOURCES)  # nothing is asked here
    read: list[str] = []

    def note(wanted: dict[str, Any]) -> dict[str, _NamespaceRead]:
        read.extend(sorted(wanted))
        return {
            name: _NamespaceRead(NamespaceView({}, {}, {}, {}, {}), {}, dict.fromkeys(pods, Chain()), clock.monotonic())
            for name, pods in wanted.items()
        }

    monkeypatch.setattr(surveyor, "_read_all", note)
    monkeypatch.setattr(surveyor, "_surroundings", lambda name, wall: None)
    surveyor.survey([A, B], [], 0.0)
    clock.advance(FRESH_S)
    surveyor.survey([A], [A], 0.0)
    surveyor.survey([A, B], [], 0.0)
    assert read == ["a", "b", "a"]
    clock.advance(VIEW_S - FRESH_S)
    surveyor.survey([A, B], [], 0.0)
    assert read == ["a", "b", "a", "b"], "each namespace is read again only when its own view is old"


def test_a_namespace_that_is_too_large_is_read_last_while_it_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """So other namespaces do not wait for it, and its size does not count as a failure of the server."""
    clock = ManualClock()
    surveyor = PodSurveyor(Api(client.ApiClient()), Policy(), clock, resources=GPU_RESOURCES)  # nothing is asked here
    order: list[str] = []
    too_large: set[str] = set()

    def read(namespace: str, pods: Any, until: float) -> _NamespaceRead:
        order.append(namespace)
        if namespace in too_large:
            raise MarkError("size", "too long")
        return _NamespaceRead(NamespaceView({}, {}, {}, {}, {}), {}, dict.fromkeys(pods, Chain()), clock.monotonic())

    monkeypatch.setattr(surveyor, "_read", read)
    monkeypatch.setattr(survey, "WORKERS", 1)
    monkeypatch.setattr(surveyor, "_surroundings", lambda name, wall: surveyor._reads[name.namespace])
    for expected, large in ((["a", "b"], True), (["b", "a"], True), (["b", "a"], False), (["a", "b"], False)):
        order.clear()
        too_large = {"a"} if large else set()
        clock.advance(survey.VIEW_S + 1.0)
        found = surveyor.survey([A, B], [], 0.0)
        assert order == expected
        assert isinstance(found[A], Unreadable) is large
        assert not large or not found[A].is_failure
