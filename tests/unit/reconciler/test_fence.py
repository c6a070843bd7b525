"""A reconciler that has lost its Lease to another replica writes nothing more, and publishes no marks."""

from __future__ import annotations

import pytest
from tests.testbed.marker_book import POLICY, UNDERUSED, WALL, A, Bench, Book

from gpu_exporter.reconciler.apply import ApplyRuns
from gpu_exporter.reconciler.evidence.records import HolderName
from gpu_exporter.reconciler.telemetry import Telemetry

C = HolderName("kubernetes", "ml", "c")


def lost_after(writes: int) -> object:
    """A `may_write` that allows a number of writes."""
    left = iter([True] * writes)
    return lambda: next(left, False)


@pytest.mark.parametrize("allowed", [0, 1])
def test_no_mark_is_set_after_the_lease_is_lost(allowed: int) -> None:
    book = Book()
    bench = Bench(book)
    bench.runs = {A: [UNDERUSED], C: [UNDERUSED]}
    bench.may_write = lost_after(allowed)  # type: ignore[assignment]
    bench.run()
    assert bench.writes == ["written"] * allowed + ["fenced"]
    assert len(book.marks) == allowed


def test_no_mark_is_withdrawn_after_the_lease_is_lost_and_this_is_a_problem_of_the_cycle() -> None:
    book = Book()
    book.marks = {A: "underused"}
    bench = Bench(book)
    bench.runs = {A: [0.0]}
    bench.may_write = lambda: False
    assert "withdraw a" not in bench.run()
    assert (bench.writes, bench.problem) == (["fenced"], "1 marks could not be withdrawn")
    assert book.marks == bench.cycle.standing == {A: "underused"}
    bench.may_write = lambda: True
    assert "withdraw a" in bench.run()


def test_no_mark_is_renewed_after_the_lease_is_lost() -> None:
    book = Book()
    book.marks, book.observed = {A: "underused"}, {A: WALL - POLICY.unsupported_max / 2}
    bench = Bench(book)
    bench.runs = {A: [UNDERUSED]}
    bench.may_write = lambda: False
    assert "renew a" not in bench.run()
    bench.may_write = lambda: True
    assert "renew a" in bench.run()


class Standby:
    """A leadership that the test switches on and off."""

    def __init__(self) -> None:
        self.leads = False
        self.waited: list[float] = []

    def may_write(self) -> bool:
        return self.leads

    def wait(self, seconds: float) -> bool:
        self.waited.append(seconds)
        return self.leads


def test_a_replica_that_waits_is_healthy_runs_no_cycle_and_publishes_no_mark() -> None:
    book, standby = Book(), Standby()
    book.marks = {A: "underused"}
    bench = Bench(book)
    bench.runs = {A: [UNDERUSED]}
    telemetry = Telemetry(bench.clock)
    runs = ApplyRuns(bench.cycle, telemetry, bench.clock, standby, 30.0)

    def value(name: str, **labels: str) -> float | None:
        return telemetry.registry.get_sample_value(name, labels)

    standby.leads = True
    runs.run()
    marked = {"stage": "underused"}
    holder = {"scheduler": "kubernetes", "namespace": "ml", "pod": "a", "job_id": ""}
    assert value("gpu_reconciler_leader") == value("gpu_reconciler_labelled", **marked) == 1
    assert value("gpu_reconciler_allocation_stage", **holder, **marked) == 1
    standby.leads = False
    bench.clock.advance(1000.0)
    reads = bench.reads
    assert runs.run() == ""
    assert (bench.reads, standby.waited) == (reads, [30.0])
    assert value("gpu_reconciler_leader") == value("gpu_reconciler_labelled", **marked) == 0
    assert value("gpu_reconciler_allocation_stage", **holder, **marked) is None
    assert value("gpu_reconciler_cycles_total") == 1
    assert telemetry.since_last_cycle_s() == 0, "its liveness probe succeeds"
