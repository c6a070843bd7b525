"""The digest's queries have limits on rows, tenants, bytes and time, whose errors name the query and the remedy."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

import pytest

from gpu_exporter.common.address import Address, parse_address
from gpu_exporter.common.clock import ManualClock
from gpu_exporter.common.config.defaults import Alerts
from gpu_exporter.common.errors import AnswerError
from gpu_exporter.common.fetch import LimitError
from gpu_exporter.common.promql.client import Fetch
from gpu_exporter.common.promql.vector import VectorRow
from gpu_exporter.reports.digest import hours, read
from gpu_exporter.reports.digest.hours import Hours
from gpu_exporter.reports.digest.parts import PeriodPart, join, list_days
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
        value = f"{DAY_S}" if form["query"].startswith(SEEN) else "1"
        result = [{"metric": labels, "value": [END, value]} for labels in self.rows(form["query"])]
        self.after()
        return json.dumps({"status": "success", "data": {"resultType": "vector", "result": result}})

    def read(self, days: int = 2) -> read.Digest:
        return reader(self).read(days * DAY_S, END)


def reader(fetch: Fetch, clock: ManualClock | None = None) -> DigestReader:
    return DigestReader(parse_address("http://prometheus"), 'job="x"', Alerts(), fetch, clock or ManualClock())


SEEN = "count_over_time((count(gpu_exporter_build_info"


def one(query: str) -> list[dict[str, str]]:
    """One tenant, and nothing that stops a digest."""
    if query.startswith(SEEN):
        return [{}]
    return [{"namespace": "ml"}] if query.startswith("sum by (") else []


def tenants(count: int) -> Rows:
    return lambda query: (
        [{"namespace": f"n{number}"} for number in range(count)] if query[:6] == "sum by" else one(query)
    )


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
    with pytest.raises(AnswerError, match=r"more than 10 rows: sum by .*: take a shorter --since"):
        Source(tenants(11)).read()


def test_a_fact_about_the_period_has_few_rows() -> None:
    """The answers for all days are in memory at once, so 10,000 rows each would be a gigabyte."""
    source = Source(lambda query: [{"n": str(n)} for n in range(101)] if query.startswith(SEEN) else one(query))
    with pytest.raises(AnswerError, match=r"more than 100 rows: count_over_time"):
        source.read()


def test_the_tenants_of_all_answers_together_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "TENANTS_MAX", 2)
    numbers = iter(range(1000))
    source = Source(lambda query: [{"namespace": f"n{next(numbers)}"}] if query[:6] == "sum by" else one(query))
    with pytest.raises(AnswerError, match="more than 2 tenants: take a shorter --since"):
        source.read(days=9)
    days = {query.partition("offset ")[2] for query, _, _ in source.asked if "tenant:gpu_cost:rate[" in query}
    assert len(days) == 3, "it ends with the third day"


def test_all_queries_share_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    monkeypatch.setattr(read, "WORKERS", 1)
    source = Source(one)
    source.after = lambda: clock.advance(100.0)
    with pytest.raises(AnswerError, match="took longer than 900 s together: take a shorter --since"):
        reader(source, clock).read(DAY_S, END)
    assert [within_s for _, _, within_s in source.asked] == [read.ANSWER_S] * 8 + [100.0]


def test_an_answer_beyond_a_limit_names_its_query_and_the_remedy() -> None:
    def fetch(*_: object) -> str:
        raise LimitError("http://prometheus/api/v1/query: the answer is longer than 32 MiB")

    with pytest.raises(
        AnswerError, match=r"longer than 32 MiB: take a shorter --since.*; the query was count\("
    ) as caught:
        reader(fetch).read(DAY_S, END)
    assert not isinstance(caught.value, LimitError)


def test_the_limits_hold_two_weeks_of_2000_gpus() -> None:
    """Holders of more than 24 GPU-hours, each with the longest labels that are common."""
    holders = int(2000 * 14 * 24 / 24)
    labels = {"cluster": "c" * 12, "scheduler": "kubernetes", "namespace": "n" * 63, "pod": "p" * 100, "team": "t" * 40}
    labels |= {"workload": "w" * 63, "user": "u" * 30, "account": "a" * 30}
    row = json.dumps({"metric": labels, "value": [1795845805.123, "123.45678901234"]}, separators=(",", ":"))
    assert 2 * holders * len(row) < read.MOST_BYTES
    assert 2 * holders < read.ROWS_MAX


def test_a_gap_at_the_end_of_a_day_joins_it_to_the_next_one() -> None:
    """The growth of a counter over the gap is in no query that ends there."""
    days = list(list_days(3.5 * DAY_S, 0.0))
    assert [(part.ago / DAY_S, part.span / DAY_S) for part in days] == [(3.0, 0.5), (2.0, 1.0), (1.0, 1.0), (0.0, 1.0)]
    seen = dict.fromkeys(days, 1.0)
    alone = [(day,) for day in days]
    assert [segment.parts for segment in join(days, seen, ())] == alone
    first, joined, last = join(days, seen, [days[1]])
    assert (first.parts, joined.parts, last.parts) == (alone[0], tuple(days[1:3]), alone[3])
    assert joined.whole == PeriodPart(DAY_S, 2 * DAY_S)
    # A day that Prometheus has not seen is a gap only between days that it has seen.
    assert [len(segment.parts) for segment in join(days, {**seen, days[1]: 0.0}, ())] == [3, 1]
    assert [segment.parts for segment in join(days, {days[3]: 1.0}, ())] == alone
    assert [segment.parts for segment in join(days, {}, ())] == alone


def test_a_joined_day_has_no_hours_of_its_own_and_its_growth_is_asked_for_at_once() -> None:
    source = Source(
        lambda query: [{}] if query.startswith("count((last") and "offset 172800s" not in query else one(query)
    )
    digest = source.read(days=3)
    assert [hours and hours.held for _, hours in digest.days] == [1.0, None, None]
    assert digest.total.held == 2.0
    assert any('gpu_tenant_held_gpu_seconds_total{job="x"}[172800s]))' in query for query, _, _ in source.asked)


def test_a_period_before_that_was_not_seen_as_a_whole_is_not_compared() -> None:
    gap = "[86400s:60s] offset 259200s"  # one of its two days
    digest = Source(lambda query: [] if query.startswith(SEEN) and gap in query else one(query)).read(days=2)
    assert digest.before is None


def test_nodes_with_several_targets_count_as_one_exporter_each() -> None:
    source = Source(lambda query: [{"node": "n.1"}] if query.startswith("avg_over_time((count") else one(query))
    digest = source.read(days=1)
    (query, *_) = (query for query, _, _ in source.asked if "gpu_tenant_idle_gpu_seconds_total" in query)
    once = 'increase(gpu_tenant_idle_gpu_seconds_total{job="x",node!~"n\\\\.1"}[86400s])'
    dense = '(gpu_tenant_idle_gpu_seconds_total{job="x",node=~"n\\\\.1"}))[86400s:60s] offset 86400s'
    assert once.replace("[86400s]", "[86400s] offset 86400s") in query and dense in query, query
    assert any(text.startswith("possibly some hours of n.1: ") for text in digest.missing)


def test_recordings_are_read_only_of_the_clusters_that_are_selected() -> None:
    source = Source(one)
    DigestReader(parse_address("http://p"), 'job="x",cluster=~"a|b"', Alerts(), source, ManualClock()).read(DAY_S, END)
    recorded = [query for query, _, _ in source.asked if "tenant:gpu_" in query or "allocation:gpu_share:part" in query]
    assert len(recorded) == 7
    assert all('{cluster=~"a|b"' in query and "job=" not in query for query in recorded)


@pytest.mark.parametrize(
    ("recorded", "unpriced", "priced"),
    [
        (100.0, 0.0, True),
        (99.1, 0.0, True),
        (98.9, 0.0, False),
        (101.1, 0.0, False),
        (100.0, 0.9, True),
        (100.0, 1.1, False),
    ],
)
def test_money_is_shown_only_if_the_rules_recorded_the_same_hours_at_a_price(
    recorded: float, unpriced: float, priced: bool
) -> None:
    shown = Hours(100.0, 100.0, 50.0, 20.0, cost=300.0, cost_idle=60.0, recorded=recorded, unpriced=unpriced).figures()
    assert (shown["cost"], shown["cost_idle"]) == ((300.0, 60.0) if priced else (None, None))
    assert (shown["held_hours"], shown["used_hours"], shown["idle_ratio"]) == (100.0, 80.0, 0.2)


def test_energy_is_shown_only_if_all_gpus_count_it() -> None:
    assert Hours(100.0, energy_kwh=30.0, unmetered=0.9).figures()["energy_kwh"] == 30.0
    assert Hours(100.0, energy_kwh=30.0, unmetered=1.1).figures()["energy_kwh"] is None
    both = hours.add_up([Hours(100.0, energy_kwh=30.0), Hours(100.0, unmetered=100.0)])
    assert both.figures()["energy_kwh"] is None and both.energy_kwh == 30.0


def test_no_share_is_above_one_and_a_part_larger_than_its_whole_is_no_share() -> None:
    assert Hours(100.0, 100.0, 100.4, 100.5).figures()["idle_ratio"] == 1.0
    assert Hours(100.0, 100.0, 102.0, 102.0).figures()["idle_ratio"] is None
    assert Hours(100.0, 100.0, 102.0, 102.0).figures()["busy_ratio"] is None
    assert Hours(100.0, 0.0, 0.0, 0.0).figures()["busy_ratio"] is None


def test_a_counter_that_no_exporter_has_is_unknown_also_in_the_sum() -> None:
    with_all = Hours(10.0, 10.0, 5.0, 5.0)
    without = read._hours({"held": [VectorRow({"namespace": "a"}, 7.0)], "known": [VectorRow({"namespace": "b"}, 7.0)]})
    (found,) = without.values()
    assert (found.held, found.known, found.idle) == (7.0, None, None)
    total = hours.add_up([with_all, found]).figures()
    assert (total["held_hours"], total["idle_hours"], total["used_hours"], total["idle_ratio"]) == (
        17.0,
        None,
        None,
        None,
    )


def idle_rows(number: int, value: float, **labels: str) -> list[VectorRow]:
    return [VectorRow({"namespace": "ml", "pod": f"p{at}", **labels}, value) for at in range(number)]


def test_pods_of_one_name_in_two_clusters_are_two_holders() -> None:
    holders = hours.IdleHours()
    holders.add(idle_rows(1, 3.0, cluster="a"))
    holders.add([*idle_rows(1, 5.0, cluster="b"), *idle_rows(1, 4.0, cluster="a")])
    found = [(each.title, each.idle, each.cluster) for each in holders.list()]
    assert found == [("a: ml/p0", 7.0, "a"), ("b: ml/p0", 5.0, "b")]


def test_a_holder_whose_idle_hours_of_a_day_may_be_cut_off_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hours, "HOLDERS_MAX", 3)
    holders = hours.IdleHours()
    holders.add(
        [VectorRow({"namespace": "ml", "pod": "large"}, 50.0), VectorRow({"namespace": "ml", "pod": "small"}, 2.0)]
    )
    holders.add(idle_rows(3, 0.1))
    assert [each.name.name for each in holders.list()] == ["large", "p0", "p1", "p2"]


def test_prices_in_two_currencies_are_no_money() -> None:
    def rows(query: str) -> list[dict[str, str]]:
        currencies = [{"currency": "EUR"}, {"currency": "USD"}]
        return currencies if query.startswith("group by (currency)") else one(query)

    digest = Source(rows).read(days=1)
    assert "money: the prices have 2 currencies: EUR, USD" in digest.missing
    assert {hours.figures()["cost"] for hours in (digest.total, *digest.tenants.values())} == {None}
    one_currency = Source(lambda query: rows(query)[:1]).read(days=1)
    assert (one_currency.currency, one_currency.total.figures()["cost"]) == ("EUR", None), "1 hour is unpriced"


@pytest.mark.parametrize(("recorded", "idle", "is_said"), [(0.0, 0.2, True), (2.0, 0.2, False), (2.0, 1.1, True)])
def test_holders_without_a_recording_are_missing_and_no_empty_list(recorded: float, idle: float, is_said: bool) -> None:
    """Rules that are not loaded record nothing at all. Few idle hours may also be of runs too short for the list."""
    tenants = {hours.TenantName("", "kubernetes", "ml", "", ""): Hours(2.0, 2.0, 1.0, idle, recorded=recorded)}
    digest = read.Digest(END - DAY_S, END, tenants)
    said = list(read._missing(digest, [], [], has_nameless=False))
    assert any("allocation:gpu_share:part is not recorded" in each for each in said) == is_said
    assert digest.holders == (None if is_said else [])
