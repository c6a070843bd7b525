"""The digest's queries have limits on rows, tenants, bytes and time, whose errors name the query and the remedy."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

import pytest

from gpu_exporter.common.address import Address, parse_address
from gpu_exporter.common.clock import ManualClock
from gpu_exporter.common.errors import AnswerError
from gpu_exporter.common.fetch import LimitError
from gpu_exporter.reports.digest import read
from gpu_exporter.reports.digest.read import DigestReader

DAY_S = 86400.0
END = 1_700_000_000.0
Rows = Callable[[str], list[dict[str, str]]]


class Source:
    """A PromQL API with the rows that `rows` gives for a query, each of value 1."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.asked: list[tuple[str, int, float]] = []
        self.after: Callable[[], None] = lambda: None

    def __call__(self, address: Address, form: Mapping[str, str] | None, most_bytes: int, within_s: float) -> str:
        assert form is not None
        self.asked.append((form["query"], most_bytes, within_s))
        result = [{"metric": labels, "value": [END, "1"]} for labels in self.rows(form["query"])]
        self.after()
        return json.dumps({"status": "success", "data": {"resultType": "vector", "result": result}})

    def read(self, days: int = 2) -> read.Digest:
        return DigestReader(parse_address("http://prometheus"), 'job="x"', 30.0, self).read(days * DAY_S, END)


def one(query: str) -> list[dict[str, str]]:
    """One tenant, and nothing that stops a digest."""
    return [] if query.startswith(("count(", "avg_over_time(", "topk(", "(")) else [{"namespace": "ml"}]


def tenants(count: int) -> Rows:
    return lambda query: [{"namespace": f"n{number}"} for number in range(count)] if one(query) else []


def test_each_part_of_the_period_counts_once() -> None:
    digest = Source(one).read(days=3)
    assert [hours and hours.held for _, hours in digest.days] == [1.0, 1.0, 1.0]
    assert digest.before is not None
    assert (digest.total.held, digest.before.held) == (3.0, 3.0)


def test_a_day_of_which_prometheus_knows_no_holder_has_no_hours() -> None:
    """The first of two days, and the two days before: there was no exporter yet."""
    digest = Source(lambda query: [] if "offset" in query else one(query)).read(days=2)
    assert [hours and hours.held for _, hours in digest.days] == [None, 1.0]
    assert (digest.total.held, digest.before) == (1.0, None)


def test_an_answer_with_too_many_rows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "TENANT_ROWS_MAX", 10)
    assert len(Source(tenants(10)).read().tenants) == 10
    with pytest.raises(AnswerError, match=r"more than 10 rows: sum by .*: use a shorter --since"):
        Source(tenants(11)).read()


def test_the_tenants_of_all_answers_together_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "TENANTS_MAX", 5)
    numbers = iter(range(1000))
    source = Source(lambda query: [{"namespace": f"n{next(numbers)}"}] if one(query) else [])
    with pytest.raises(AnswerError, match="more than 5 tenants: use a shorter --since"):
        source.read()
    assert len(source.asked) < 30, "it ends with the first day"


def test_all_queries_share_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    monkeypatch.setattr(read, "WORKERS", 1)
    source = Source(one)
    source.after = lambda: clock.advance(100.0)
    with pytest.raises(AnswerError, match="took longer than 900 s together: use a shorter --since"):
        DigestReader(parse_address("http://prometheus"), "", 30.0, source, clock).read(DAY_S, END)
    assert [within_s for _, _, within_s in source.asked] == [read.ANSWER_S] * 8 + [100.0]


def test_an_answer_beyond_a_limit_names_its_query_and_the_remedy() -> None:
    def fetch(*_: object) -> str:
        raise LimitError("http://prometheus/api/v1/query: the answer is longer than 32 MiB")

    with pytest.raises(
        AnswerError, match=r"longer than 32 MiB: use a shorter --since.*; the query was count\("
    ) as caught:
        DigestReader(parse_address("http://prometheus"), "", 30.0, fetch).read(DAY_S, END)
    assert not isinstance(caught.value, LimitError)


def test_the_limits_hold_two_weeks_of_2000_gpus() -> None:
    """Holders of more than 24 GPU-hours, each with the longest labels that are common."""
    holders = int(2000 * 14 * 24 / 24)
    labels = {"cluster": "c" * 12, "scheduler": "kubernetes", "namespace": "n" * 63, "pod": "p" * 100, "team": "t" * 40}
    labels |= {"workload": "w" * 63, "user": "u" * 30, "account": "a" * 30}
    row = json.dumps({"metric": labels, "value": [1795845805.123, "123.45678901234"]}, separators=(",", ":"))
    assert 2 * holders * len(row) < read.MOST_BYTES
    assert 2 * holders < read.ROWS_MAX
