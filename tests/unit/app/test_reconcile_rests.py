"""While a slow scheduler is left alone, nothing else asks it either."""

from __future__ import annotations

import threading

import pytest

from gpu_exporter.app import reconcile
from gpu_exporter.reconciler.telemetry import Telemetry


@pytest.mark.parametrize(("rests", "asked"), [(False, 1), (True, 0)])
def test_pending_jobs_are_not_asked_for_while_the_cycles_rest(
    monkeypatch: pytest.MonkeyPatch, rests: bool, asked: int
) -> None:
    class Demand:
        reads = 0

        def read(self) -> None:
            self.reads += 1

    demand, ticks = Demand(), []
    monkeypatch.setattr(reconcile, "repeat_aside", lambda tick, *_: tick())
    reconcile._cycle_until_signal(
        lambda: ticks.append(1),
        30.0,
        Telemetry(),
        demand,
        threading.Event(),
        rests=lambda: rests,  # type: ignore[arg-type]
    )
    assert (len(ticks), demand.reads) == (1, asked)
