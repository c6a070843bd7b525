"""When namespaces are read: as seldom as possible, and fresh where somebody is about to rise or to lose GPUs."""

from __future__ import annotations

from typing import Any

import pytest

from gpu_exporter.clock import ManualClock
from gpu_exporter.defaults import Policy
from gpu_exporter.reconciler.evidence import HolderName
from gpu_exporter.reconciler.kubernetes.namespace import NamespaceView
from gpu_exporter.reconciler.kubernetes.owners import Chain
from gpu_exporter.reconciler.kubernetes.survey import FRESH_S, VIEW_S, PodSurveyor, _Read

A, B = HolderName("kubernetes", "a", "x"), HolderName("kubernetes", "b", "x")


def test_a_look_at_one_namespace_costs_no_other_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    surveyor = PodSurveyor(None, Policy(), clock)  # type: ignore[arg-type]  # nothing is asked here
    read: list[str] = []

    def note(wanted: dict[str, Any]) -> dict[str, _Read]:
        read.extend(sorted(wanted))
        return {
            name: _Read(NamespaceView({}, {}, {}, {}, {}), {}, dict.fromkeys(pods, Chain()), clock.monotonic())
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
    assert read == ["a", "b", "a", "b"], "each is read again when it is old, however often others were looked at"
