"""Nodes that come and go, through a real Prometheus with a day of history: which labels change, and which stay."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterator
from typing import NamedTuple

import pytest

from gpu_exporter.common.address import parse_address
from gpu_exporter.reconciler.evidence.promql import PromQLOptions, PromQLSource
from gpu_exporter.reconciler.evidence.records import Evidence, HolderName
from tests.testbed.marker_book import POLICY, Bench, Book
from tests.testbed.processes import Processes
from tests.testbed.servers import Prometheus, require, write_history

pytestmark = pytest.mark.servers
HOUR, SCRAPE_S, CYCLE_S, GONE_S = 3600, 60, 300, 180
END = int(time.time()) // HOUR * HOUR
DAY, BEFORE = 24 * HOUR, 3 * HOUR  # the day of the cycles, and the history before it
FIRST = END - DAY - BEFORE
DIES = END - 6 * HOUR


class Pod(NamedTuple):
    """A pod with one GPU. Its node and its exporter report from `start` to `silent`; the pod exists until `end`.

    `idle`: whether it never works. `address`: how many seconds its exporter keeps one address.
    """

    name: str
    node: str
    start: int
    silent: int
    end: int
    idle: bool = False
    address_s: int = 100 * DAY

    @property
    def holder(self) -> HolderName:
        return HolderName("kubernetes", "ml", self.name)

    def lines(self) -> Iterator[str]:
        key = f'uuid="GPU-{self.node}",scheduler="kubernetes",namespace="ml",pod="{self.name}",container="c"'
        for at in range(self.start, self.silent, SCRAPE_S):
            place = f'node="{self.node}",instance="{self.node}:{at // self.address_s}"'
            held = at - self.start + 7200
            values = {
                "allocation_start_timestamp_seconds": self.start - 7200,
                "allocation_held_seconds_total": held,
                "allocation_observed_seconds_total": held,
                "allocation_idle_run_seconds": held if self.idle else 0,
                "allocation_idle_run_witnesses": 4,
                "allocation_holder_units": 1,
            }
            yield f'gpu_allocation_info{{{place},{key},pod_uid="{self.name}",source="kubelet"}} 1 {at}'
            yield from (f"gpu_{name}{{{place},{key}}} {value} {at}" for name, value in values.items())
            yield from exporter(place, at)


def exporter(place: str, at: int) -> Iterator[str]:
    yield f'gpu_exporter_build_info{{{place},version="1"}} 1 {at}'
    yield f"gpu_exporter_last_sample_timestamp_seconds{{{place}}} {at} {at}"
    yield f"gpu_exporter_sample_interval_seconds{{{place}}} 1 {at}"


def lasting(fleet: str) -> list[Pod]:
    """Ten nodes: two with idle pods, one of which gets a new address every three hours; and one whose exporter dies."""
    pods = [Pod(f"{fleet}-busy-{i}", f"{fleet}-n{i}", FIRST, END + 1, END + 1) for i in range(7)]
    return [
        *pods,
        Pod(f"{fleet}-idle", f"{fleet}-n7", FIRST, END + 1, END + 1, True),
        Pod(f"{fleet}-moved", f"{fleet}-n8", FIRST, END + 1, END + 1, True, 3 * HOUR),
        Pod(f"{fleet}-lost", f"{fleet}-n9", FIRST, DIES, END + 1, True),
    ]


def spot(fleet: str, count: int, minutes: int) -> list[Pod]:
    """Nodes that are there for some minutes of each hour. Their pods exist for some minutes more."""
    return [
        Pod(f"{fleet}-spot-{i}-{hour}", f"{fleet}-s{i}", start, start + 60 * minutes, start + 60 * minutes + GONE_S)
        for hour, start in enumerate(range(FIRST, END, HOUR))
        for i in range(count)
    ]


FLEETS = {name: [*lasting(name), *spot(name, *size)] for name, size in {"few": (3, 20), "most": (25, 40)}.items()}


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    require("prometheus", "promtool")
    directory = tmp_path_factory.mktemp("prometheus")
    lines = [
        line.replace("{", f'{{job="{name}",', 1)
        for name, pods in FLEETS.items()
        for pod in pods
        for line in pod.lines()
    ]
    write_history(directory, lines)
    with Processes(directory) as processes:
        yield Prometheus(processes, directory, {})


class Fleet(Bench):
    """Cycles over the past of one fleet."""

    def __init__(self, url: str, name: str) -> None:
        self.url, self.job, self.pods = url, name, FLEETS[name]
        self.changes: Counter[str] = Counter()
        self.frozen: Counter[str] = Counter()
        self.cycles = 0
        super().__init__(Book())

    def read_evidence(self, marked: Collection[HolderName] = ()) -> Evidence:
        options = PromQLOptions(
            parse_address(self.url),
            POLICY.candidate_after,
            POLICY.underused_after,
            f'job="{self.job}"',
            at=self.clock.wall(),
        )
        return PromQLSource(options, self.clock).read_evidence(marked)

    def pass_day(self) -> None:
        book = self.books[0]
        for at in range(END - DAY, END, CYCLE_S):
            self.clock.advance(at - self.clock.wall())
            book.gone = {(pod.holder, pod.name) for pod in self.pods if not pod.start <= at < pod.end}
            self.changes.update(call.split()[1] for call in self.run() if not call.startswith("renew"))
            self.frozen.update(
                name.name for each in self.cycle.frozen.values() for name in each.names or [HolderName("", "", "*")]
            )
            self.cycles += 1


@pytest.mark.parametrize("name", FLEETS)
def test_nodes_that_come_and_go_change_no_label_and_hold_nobody(prometheus: Prometheus, name: str) -> None:
    fleet = Fleet(prometheus.url, name)
    fleet.pass_day()
    assert fleet.changes == {f"{name}-idle": 1, f"{name}-moved": 1, f"{name}-lost": 2}, (
        "marked once; only lost is withdrawn"
    )
    assert {holder.name: stage for holder, stage in fleet.books[0].marks.items()} == {
        f"{name}-idle": "underused",
        f"{name}-moved": "underused",
    }
    assert fleet.frozen.keys() - {f"{name}-lost"} <= {pod.name for pod in spot(name, 25, 40)}, "only their own holders"
    assert fleet.frozen[f"{name}-lost"] in range(HOUR // CYCLE_S - 2, HOUR // CYCLE_S + 1), "for the hour of the memory"
