"""A simulated day with known activity: idle holders are reported, and working holders are not.

Each run has a new seed and prints it. GPU_EXPORTER_DAY_SEED repeats a run.
"""

from __future__ import annotations

import math
import os
import secrets
from pathlib import Path
from random import Random

import pytest

from tests.rules.day import GPUS, MINUTES, NODES, simulate, stretches
from tests.rules.promtool import Case
from tests.rules.show import observe
from tests.testbed.servers import require

pytestmark = pytest.mark.servers

SEED = int(os.environ.get("GPU_EXPORTER_DAY_SEED", "0")) or secrets.randbits(32)
IDLE_S = 3600.0  # after which an owner may be notified (alerts.idle_for)
SURE_S = 5400.0  # after which an owner must have been notified: 60 min, `for: 10m`, and the coverage of 30 min


def episodes(minutes: list[int]) -> list[tuple[int, int]]:
    """The minutes in which an alert fires, as ranges."""
    found: list[tuple[int, int]] = []
    for t in sorted(minutes):
        if found and t == found[-1][1] + 1:
            found[-1] = (found[-1][0], t)
        else:
            found.append((t, t))
    return found


def test_idle_holders_are_reported_and_working_holders_are_not(tmp_path: Path) -> None:
    require("promtool")
    print(f"GPU_EXPORTER_DAY_SEED={SEED}")
    day = simulate(Random(SEED), tmp_path)
    firing = 'ALERTS{alertstate="firing",alertname="GpuHolderIdle"}'
    seen = observe(Case("day", day.world), firing, ("seam", "owners"))
    reported: dict[str, list[tuple[int, int]]] = {}
    for series, minutes in seen.items():
        name = series.partition('pod="')[2].partition('"')[0] or series.partition('job_id="')[2].partition('"')[0]
        reported.setdefault(name, []).extend(episodes(minutes))

    # Every report begins while its holder has not worked for an hour.
    idle: dict[str, list[tuple[float, float]]] = {}
    for holder, stretch, _ in stretches(day):
        idle.setdefault(holder.name, []).append(stretch)
    begun = [(name, first) for name, times in reported.items() for first, _ in times]
    wrong = [
        (name, first)
        for name, first in begun
        if not any(start + IDLE_S <= 60 * first <= end + 60 for start, end in idle.get(name, []))
    ]

    # Every idle time that was long enough, and was observed without a break for long enough, was reported once.
    found, missed, doubled = 0, [], []
    for holder, (start, end), known in stretches(day):
        reports = [first for first, last in reported.get(holder.name, []) if start < 60 * first <= end]
        if end - known > SURE_S:
            found += bool(reports)
            missed += [(holder.name, holder.kind, start, known, end)] * (not reports)
        if known == start and len(reports) > 1:
            doubled.append((holder.name, reports))
    years = NODES * GPUS * MINUTES / (365 * 24 * 60)
    most = -math.log(0.05) / years  # upper end of the 95 % interval if no false report was seen
    print(
        f"{len(day.holders)} holders, {len(begun)} reports, {len(wrong)} of them false: at most {most:.0f} per GPU-year; "
        f"{found} of {found + len(missed)} idle times reported"
    )
    assert wrong == []
    assert found + len(missed) >= 1, "a day without idle holders proves nothing"
    assert found / (found + len(missed)) >= 0.95, missed
    assert doubled == []
