"""Pauses by an expression: their queries, and their effect on marks."""

from __future__ import annotations

import pytest
from tests.testbed.marker_book import UNDERUSED, WALL, A, Bench, Book

from gpu_exporter.common.config.defaults import Policy
from gpu_exporter.common.promql.vector import VectorRow
from gpu_exporter.reconciler.decision.brakes import FREEZES, PAUSED, Brakes, Freeze
from gpu_exporter.reconciler.decision.rulebook import Rulebook
from gpu_exporter.reconciler.evidence.pause_expression import Pause, Pauses
from gpu_exporter.reconciler.evidence.records import Evidence

POLICY = Policy()._replace(pause_when="storage_up == 0")


class Prometheus:
    """Answers with the rows that a test sets, and remembers the queries."""

    def __init__(self) -> None:
        self.now: list[VectorRow] = []
        self.before: list[VectorRow] = []
        self.queries: list[str] = []

    def query(self, text: str) -> list[VectorRow]:
        self.queries.append(text)
        return self.before if "timestamp" in text else self.now


def test_the_whole_longest_window_is_asked_for_once_and_then_only_new_time() -> None:
    server, pauses = Prometheus(), Pauses(POLICY.pause_when, Rulebook(POLICY).longest_s)
    past = "max_over_time(timestamp(count(storage_up == 0))[{}s:60s])"
    for wall, seconds in ((WALL, 25 * 3600), (WALL + 30, 630), (WALL + 3630, 4200), (WALL + 1e6, 25 * 3600)):
        pauses.read(server.query, wall)
        assert server.queries[-2:] == ["count(storage_up == 0)", past.format(seconds)]


def test_without_a_pause_expression_no_query_is_sent() -> None:
    server = Prometheus()
    assert Pauses("", Rulebook(Policy()).longest_s).read(server.query, WALL) == Pause()
    assert server.queries == []


@pytest.mark.parametrize(("ended_s_ago", "until"), [(900.0, WALL - 840.0), (10.0, WALL)])
def test_the_end_of_a_pause_is_remembered_after_its_time_is_no_longer_asked_for(
    ended_s_ago: float, until: float
) -> None:
    server, pauses = Prometheus(), Pauses(POLICY.pause_when, Rulebook(POLICY).longest_s)
    server.before = [VectorRow({}, WALL - ended_s_ago)]
    assert pauses.read(server.query, WALL) == Pause("", until)
    server.before = []
    assert pauses.read(server.query, WALL + 30.0) == Pause("", until)
    server.now = [VectorRow({}, 3.0)]
    assert pauses.read(server.query, WALL + 60.0) == Pause("policy.pause_when has 3 series", WALL + 60.0)
    server.now = []
    assert pauses.read(server.query, WALL + 90.0) == Pause("", WALL + 60.0)


def test_a_pause_is_a_brake_with_its_reason() -> None:
    evidence = Evidence(WALL, (), paused="policy.pause_when has 3 series")
    assert Brakes(POLICY).check(evidence, ()) == {PAUSED: Freeze("policy.pause_when has 3 series")}
    assert PAUSED in FREEZES


def test_marks_remain_in_a_short_pause_and_are_withdrawn_in_a_long_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    book = Book()
    bench = Bench(book)
    bench.runs = {A: [UNDERUSED]}
    bench.run()
    assert book.marks == {A: "underused"}
    read = bench.read_evidence
    monkeypatch.setattr(bench, "read_evidence", lambda marked=(): read(marked)._replace(paused="storage"))
    bench.clock.advance(bench.policy.unsupported_max - 1)
    bench.run()
    assert (book.marks, list(bench.cycle.frozen)) == ({A: "underused"}, [PAUSED])
    bench.clock.advance(1)
    assert bench.run() == ["withdraw a"]
    bench.run()
    assert book.marks == {}
