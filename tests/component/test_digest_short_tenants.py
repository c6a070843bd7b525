"""GPU-hours of tenants that hold a GPU for a second to an hour, from the ledger through two Prometheus to the digest.

Each pod is in a namespace of its own, so each tenant's series begins with it. The ledger and the state file are real; the
exporter is killed and started again five times. The truth is the sum of the pods' times.
"""

from __future__ import annotations

import math
import random
import subprocess
import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from gpu_exporter.agent.exposition.catalog import TENANT_FAMILIES, TENANT_LABELS
from gpu_exporter.agent.ledger.accounts import ConfirmedAllocation
from gpu_exporter.agent.ledger.ledger import Ledger, LedgerRules
from gpu_exporter.agent.ledger.state import StateFile
from gpu_exporter.common.model.holders import Allocation, Holder, HolderKey
from gpu_exporter.common.model.readings import Activity, Span
from gpu_exporter.common.model.units import UnitId
from tests.component.test_digest_truth import digest
from tests.testbed.processes import Processes
from tests.testbed.servers import Prometheus, require

pytestmark = pytest.mark.servers
POLL_S, WRITE_S, MINUTE, HOUR, DAY = 5, 10, 60, 3600, 86400
DAYS, RESTARTS, GPUS = 2, 5, 2
AHEAD = 20 * MINUTE  # of history beyond the start of the test
RULES = LedgerRules(POLL_S, 3, 0.1, 0.7, 60.0)


class Pod(NamedTuple):
    """A pod in a namespace of its own, which holds one GPU between two moments (Unix seconds)."""

    name: str
    gpu: int
    start: float
    end: float


def draw_pods(draw: random.Random, begin: float, end: float) -> list[Pod]:
    pods: list[Pod] = []
    for gpu in range(GPUS):
        at = begin
        while at < end:
            at += draw.expovariate(1 / 120)
            length = math.exp(draw.uniform(0.0, math.log(HOUR)))
            pods.append(Pod(f"run-{len(pods)}", gpu, at, min(at + length, end)))
            at += length
    return pods


class Exporter:
    """What one node publishes of its tenants. A kill loses the time since the last write of the state file."""

    def __init__(self, directory: Path, pods: list[Pod]) -> None:
        self.directory, self.pods = directory, sorted(pods, key=lambda pod: pod.start)
        self.next, self.live = 0, list[Pod]()

    def start(self, now: float) -> None:
        self.ledger = Ledger(RULES, now)
        self.state = StateFile(self.directory, WRITE_S, "boot-1")
        self.state.restore(self.ledger)
        self.read = now

    def poll(self, now: float) -> None:
        while self.next < len(self.pods) and self.pods[self.next].start <= now:
            self.live.append(self.pods[self.next])
            self.next += 1
        self.live = [pod for pod in self.live if pod.end > now]
        for gpu in range(GPUS):
            unit = UnitId(f"GPU-{gpu}")
            self.ledger.record(Activity(unit, (Span(self.read, now, 0.5),), 3))
            self.ledger.record_energy(unit, now, 100.0 * now, 700.0)
        self.read = now
        held = [
            ConfirmedAllocation(
                Allocation(UnitId(f"GPU-{pod.gpu}"), Holder(HolderKey("kubernetes", f"uid-{pod.name}/main"), pod.name)),
                now,
                None,
            )
            for pod in self.live
        ]
        self.ledger.charge_poll(now, now, held)
        if now % WRITE_S == 0:
            prepared = self.state.prepare(self.ledger)
            self.state.commit(prepared)
            self.state.adopt(prepared)

    def scrape(self, now: float) -> Iterator[tuple[str, str, float]]:
        """Family, labels and value of each tenant's series."""
        for key, totals in self.ledger.tenants.totals(now):
            labels = ",".join(f'{name}="{value}"' for name, value in zip(TENANT_LABELS, key, strict=True) if value)
            for family, value in zip(TENANT_FAMILIES, self.state.bound_tenant(key, totals), strict=True):
                if value is not None:
                    yield family.name, labels, value


def write_histories(directory: Path, pods: list[Pod], begin: int, end: int, paths: Mapping[int, Path]) -> None:
    """One history for each interval of scrapes (seconds), all of the same exporter."""
    draw = random.Random(3)
    kills = sorted(draw.uniform(begin + HOUR, end - HOUR) for _ in range(RESTARTS))
    away = [(at, at + draw.uniform(2.0, 40.0)) for at in kills]
    exporter = Exporter(directory, pods)
    exporter.start(begin)
    families: dict[int, dict[str, list[str]]] = {interval: {} for interval in paths}
    target = 'job="gpu-exporter",cluster="c",node="n1",instance="n1:1"'
    is_up = True
    for now in range(begin, end + 1):
        if any(first <= now < last for first, last in away):
            is_up = False
        elif not is_up:
            exporter.start(now)
            is_up = True
        if is_up and now % POLL_S == 0:
            exporter.poll(now)
        for interval, rows in families.items():
            if now % interval != 7 % interval:
                continue
            rows.setdefault("up", []).append(f"up{{{target}}} {int(is_up)} {now}")
            if not is_up:
                continue
            rows.setdefault("gpu_exporter_build_info", []).append(f"gpu_exporter_build_info{{{target}}} 1 {now}")
            for name, labels, value in exporter.scrape(now):
                rows.setdefault(name, []).append(f"{name}{{{target},{labels}}} {value:.3f} {now}")
    for interval, path in paths.items():
        with path.open("w", encoding="utf-8") as out:
            for name in sorted(families[interval]):
                out.writelines(f"{row}\n" for row in families[interval][name])
            out.write("# EOF\n")


def true_hours(pods: list[Pod], first: float, last: float) -> float:
    return sum(max(0.0, min(pod.end, last) - max(pod.start, first)) for pod in pods) / HOUR


def test_hours_of_short_tenants_add_up_at_each_interval_of_scrapes(tmp_path: Path) -> None:
    require("prometheus", "promtool")
    end = int(time.time()) // MINUTE * MINUTE + AHEAD
    begin = end - DAYS * DAY - HOUR
    pods = draw_pods(random.Random(11), begin, end)
    assert len(pods) >= 500
    state = tmp_path / "state"
    state.mkdir()
    paths = {15: tmp_path / "every-15-s.txt", 60: tmp_path / "every-60-s.txt"}
    write_histories(state, pods, begin, end, paths)
    for interval, most in ((15, 1.005), (60, 1.01)):
        directory = tmp_path / f"every-{interval}-s"
        directory.mkdir()
        source = [str(paths[interval]), str(directory / "data")]
        subprocess.run(
            ["promtool", "tsdb", "create-blocks-from", "openmetrics", *source], check=True, capture_output=True
        )
        with Processes(directory) as processes:
            server = Prometheus(processes, directory, {}, flags=["--storage.tsdb.retention.time=60d"])
            data: dict[str, Any] = digest(server, f"--since={DAYS}d", "--format=json")
        first, last = (datetime.fromisoformat(data[name]).timestamp() for name in ("start", "end"))
        held = data["total"]["held_hours"]
        print(f"{interval} s: {held:.2f} of {true_hours(pods, first, last):.2f} GPU-hours, {len(pods)} tenants")
        assert 0.99 <= held / true_hours(pods, first, last) <= most, interval
        for number, day in enumerate(data["days"]):
            share = day["held_hours"] / true_hours(pods, first + number * DAY, first + (number + 1) * DAY)
            assert 0.99 <= share <= most, (interval, number)
