"""While the reconciler does not ask a slow scheduler, no other part of it asks either."""

from __future__ import annotations

import threading

import pytest

from gpu_exporter.common.tasks import Task
from gpu_exporter.reconciler.runtime import loops
from gpu_exporter.reconciler.telemetry import Telemetry


@pytest.mark.parametrize(("rests", "asked"), [(False, 1), (True, 0)])
def test_pending_jobs_are_not_requested_while_the_cycles_rest(
    monkeypatch: pytest.MonkeyPatch, rests: bool, asked: int
) -> None:
    class Demand:
        reads = 0

        def read(self) -> None:
            self.reads += 1

    demand, ticks = Demand(), []
    monkeypatch.setattr(loops, "repeat_aside", lambda tick, *_: tick())
    parts = loops.Reconciler(None, None, (), Telemetry(), None, demand, 30.0)  # type: ignore[arg-type]
    loops._cycle_until_signal(lambda: ticks.append(1), Task("cycle"), parts, threading.Event(), rests=lambda: rests)
    assert (len(ticks), demand.reads) == (1, asked)
