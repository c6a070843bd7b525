"""The queries for tenants have limits on rows, tenants, bytes and time, whose errors name the query and the remedy."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from gpu_exporter.common.address import Address, parse_address
from gpu_exporter.common.clock import ManualClock
from gpu_exporter.common.config.defaults import Alerts
from gpu_exporter.common.errors import AnswerError
from gpu_exporter.common.fetch import LimitError
from gpu_exporter.common.promql.client import Fetch
from gpu_exporter.common.promql.vector import VectorRow
from gpu_exporter.reports.history.asking import History
from gpu_exporter.reports.usage.model import (
    IDLE,
    STALLED,
    UNKNOWN,
    UNPROVEN,
    USED,
    Capacity,
    GpuHours,
    UsageReport,
    Who,
    add_up,
)
from gpu_exporter.reports.usage.tenants import hours, read
from gpu_exporter.reports.usage.tenants.hours import Hours
from gpu_exporter.reports.usage.tenants.parts import PeriodPart, join, list_days
from gpu_exporter.reports.usage.tenants.read import TenantReader
from gpu_exporter.reports.usage.tenants.recorded import add_capacity, read_hours

DAY_S = 86400.0
END = 1_700_000_000.0
HOURS = 3  # of the period, for which a recording has values
Rows = Callable[[str], list[dict[str, str]]]


class ReportSource:
    """A PromQL API with the rows that `rows` gives for a query, each of value 1."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.asked: list[tuple[str, int, float]] = []
        self.after: Callable[[], None] = lambda: None

    def __call__(self, address: Address, form: Mapping[str, str] | None, most_bytes: int, within_s: float) -> str:
        assert form is not None
        if str(address).endswith("/query_range"):
            self.asked.append((form["query"], most_bytes, within_s))
            values = [[int(form["start"]) + at * 3600, "1"] for at in range(HOURS)]
            result = [{"metric": labels, "values": values} for labels in self.rows(form["query"])]
            return json.dumps({"status": "success", "data": {"resultType": "matrix", "result": result}})
        self.asked.append((form["query"], most_bytes, within_s))
        value = f"{DAY_S}" if form["query"].startswith(SEEN) else "1"
        result = [{"metric": labels, "value": [END, value]} for labels in self.rows(form["query"])]
        self.after()
        return json.dumps({"status": "success", "data": {"resultType": "vector", "result": result}})

    def read(self, days: int = 2) -> UsageReport:
        return reader(self).read(days * DAY_S, END)


def reader(fetch: Fetch, clock: ManualClock | None = None) -> TenantReader:
    return TenantReader(parse_address("http://prometheus"), 'job="x"', Alerts(), fetch, clock or ManualClock())


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
    digest = ReportSource(one).read(days=3)
    assert [use and use.held for use in digest.days.values()] == [1.0, 1.0, 1.0]
    assert digest.before is not None
    assert (digest.total.held, digest.before.held) == (3.0, 3.0)


def test_a_day_of_which_prometheus_knows_no_holder_has_no_hours() -> None:
    """The first of two days, and the two days before: there was no exporter yet."""
    digest = ReportSource(lambda query: [] if "offset" in query else one(query)).read(days=2)
    assert [use and use.held for use in digest.days.values()] == [None, 1.0]
    assert (digest.total.held, digest.before) == (1.0, None)


def test_an_answer_with_too_many_rows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "TENANT_ROWS_MAX", 10)
    assert len(ReportSource(tenants(10)).read().lines) == 10
    with pytest.raises(AnswerError, match=r"more than 10 rows: sum by .*: take a shorter --since"):
        ReportSource(tenants(11)).read()


def test_a_fact_about_the_period_has_few_rows() -> None:
    """The answers for all days are in memory at once, so 10,000 rows each would be a gigabyte."""
    source = ReportSource(lambda query: [{"n": str(n)} for n in range(101)] if query.startswith(SEEN) else one(query))
    with pytest.raises(AnswerError, match=r"more than 100 rows: count_over_time"):
        source.read()


def test_the_tenants_of_all_answers_together_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "TENANTS_MAX", 2)
    numbers = iter(range(1000))
    source = ReportSource(lambda query: [{"namespace": f"n{next(numbers)}"}] if query[:6] == "sum by" else one(query))
    with pytest.raises(AnswerError, match="more than 2 tenants: take a shorter --since"):
        source.read(days=9)
    days = {query.partition("offset ")[2] for query, _, _ in source.asked if "tenant:gpu_cost:rate[" in query}
    assert len(days) == 3, "it ends with the third day"


def test_all_queries_share_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    monkeypatch.setattr(read, "WORKERS", 1)
    source = ReportSource(one)
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
    source = ReportSource(
        lambda query: [{}] if query.startswith("count((last") and "offset 172800s" not in query else one(query)
    )
    digest = source.read(days=3)
    assert [use and use.held for use in digest.days.values()] == [1.0, None, None]
    assert digest.total.held == 2.0
    assert any('gpu_tenant_held_gpu_seconds_total{job="x"}[172800s]))' in query for query, _, _ in source.asked)


def test_a_period_before_that_was_not_seen_as_a_whole_is_not_compared() -> None:
    gap = "[86400s:60s] offset 259200s"  # one of its two days
    digest = ReportSource(lambda query: [] if query.startswith(SEEN) and gap in query else one(query)).read(days=2)
    assert digest.before is None


def test_nodes_with_several_targets_count_as_one_exporter_each() -> None:
    source = ReportSource(lambda query: [{"node": "n.1"}] if query.startswith("avg_over_time((count") else one(query))
    digest = source.read(days=1)
    (query, *_) = (query for query, _, _ in source.asked if "gpu_tenant_idle_gpu_seconds_total" in query)
    once = 'increase(gpu_tenant_idle_gpu_seconds_total{job="x",node!~"n\\\\.1"}[86400s])'
    dense = '(gpu_tenant_idle_gpu_seconds_total{job="x",node=~"n\\\\.1"}))[86400s:60s] offset 86400s'
    assert once.replace("[86400s]", "[86400s] offset 86400s") in query and dense in query, query
    assert any(text.startswith("possibly some hours of n.1: ") for text in digest.missing)


def test_recordings_are_read_only_of_the_clusters_that_are_selected() -> None:
    source = ReportSource(one)
    TenantReader(parse_address("http://p"), 'job="x",cluster=~"a|b"', Alerts(), source, ManualClock()).read(DAY_S, END)
    names = ("tenant:gpu_", "allocation:gpu_share:part", "namespace:gpu_gpus:sum")
    recorded = [query for query, _, _ in source.asked if any(name in query for name in names)]
    assert len(recorded) == 8
    assert all('{cluster=~"a|b"' in query and "job=" not in query for query in recorded)


def priced(held: float, **values: Any) -> GpuHours:
    return Hours(held, held, held / 2, held / 5, costs={"idle": 60.0, "used": 240.0}, **values).use()


@pytest.mark.parametrize(
    ("recorded", "unpriced", "is_priced"),
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
    recorded: float, unpriced: float, is_priced: bool
) -> None:
    use = priced(100.0, recorded=recorded, unpriced=unpriced)
    assert (use.cost, use.cost_of(IDLE)) == ((300.0, 60.0) if is_priced else (None, None))
    assert (use.held, use.parts[USED], use.share(IDLE)) == (100.0, 80.0, 0.2)


def test_a_sum_has_money_if_99_percent_of_its_hours_have_a_price() -> None:
    """One short pod without a price is no reason to hide the money of a site."""
    without = Hours(1.0, 1.0, 0.0, 1.0).use()
    assert without.cost is None
    assert add_up([priced(99.5, recorded=99.5), without]).cost == 300.0
    assert add_up([without, priced(99.5, recorded=99.5)]).cost_of(IDLE) == 60.0
    assert add_up([priced(50.0, recorded=50.0), without]).cost is None
    both = add_up([priced(99.5, recorded=99.5), without])
    assert add_up([both, without]).cost is None, "the sum of a sum"
    plain = GpuHours(1.0)
    plain.add(priced(20.0, recorded=20.0))
    assert plain.cost is None, "hours without a price to which others are added"


def test_money_of_a_part_that_one_tenant_cannot_tell_stays_in_the_whole() -> None:
    no_counter = Hours(100.0, None, None, None, costs={"used": 100.0}, stalled=None, recorded=100.0).use()
    total = add_up([priced(100.0, recorded=100.0), no_counter])
    assert (total.cost, total.cost_of(IDLE), total.parts[IDLE], total.apart) == (400.0, None, None, 200.0)


def test_energy_is_shown_only_if_all_gpus_count_it() -> None:
    assert Hours(100.0, energy_kwh=30.0, unmetered=0.9).use().energy == 30.0
    assert Hours(100.0, energy_kwh=30.0, unmetered=1.1).use().energy is None
    both = hours.add_up([Hours(100.0, energy_kwh=30.0), Hours(100.0, unmetered=100.0)])
    assert both.use().energy is None and both.energy_kwh == 30.0
    of_uses = add_up([Hours(100.0, energy_kwh=30.0).use(), Hours(100.0).use()])
    assert of_uses.energy is None and of_uses.energy_kwh == 30.0
    unmetered = Hours(100.0).use()
    unmetered.add(Hours(100.0, energy_kwh=30.0).use())
    assert unmetered.energy is None


def test_no_share_is_above_one_and_a_part_larger_than_its_whole_is_no_share() -> None:
    assert Hours(100.0, 100.0, 100.4, 100.5).use().share(IDLE) == 1.0
    assert Hours(100.0, 100.0, 102.0, 102.0).use().share(IDLE) is None
    assert Hours(100.0, 100.0, 102.0, 102.0).use().utilization is None
    assert Hours(100.0, 0.0, 0.0, 0.0).use().utilization is None


def test_a_counter_that_no_exporter_has_is_unknown_also_in_the_sum() -> None:
    with_all = Hours(10.0, 10.0, 5.0, 5.0)
    without = read._hours({"held": [VectorRow({"namespace": "a"}, 7.0)], "known": [VectorRow({"namespace": "b"}, 7.0)]})
    (found,) = without.values()
    assert (found.held, found.known, found.idle) == (7.0, None, None)
    for total in (hours.add_up([with_all, found]).use(), add_up([with_all.use(), found.use()])):
        assert (total.held, total.parts[IDLE], total.parts[USED], total.share(IDLE)) == (17.0, None, None, None)


def test_hours_by_one_witness_are_neither_used_nor_idle() -> None:
    parts = Hours(10.0, 9.0, 1.0, 2.0, stalled=0.5, unproven=5.0).use().parts
    found = [parts[part] for part in (UNPROVEN, USED, IDLE, STALLED, UNKNOWN)]
    assert found == [5.0, 1.5, 2.0, 0.5, 1.0]


def idle_rows(number: int, value: float, **labels: str) -> list[VectorRow]:
    named = {"namespace": "ml", "part": "idle_long", **labels}
    return [VectorRow({**named, "pod": f"p{at}"}, value) for at in range(number)]


def test_pods_of_one_name_in_two_clusters_are_two_holders() -> None:
    holders = hours.IdleHours()
    holders.add(idle_rows(1, 3.0, cluster="a"))
    holders.add([*idle_rows(1, 5.0, cluster="b"), *idle_rows(1, 4.0, cluster="a")])
    found = [(each.who.holder, each.use.parts[IDLE], each.who.cluster) for each in holders.list()]
    assert found == [("ml/p0", 7.0, "a"), ("ml/p0", 5.0, "b")]


def test_the_hours_of_a_holder_add_up_and_short_idle_runs_are_not_called_used() -> None:
    """The recording counts an idle run of less than alerts.idle_short as used."""
    holders = hours.IdleHours()
    parts = {"idle_long": 8.0, "idle_short": 1.0, "unproven": 4.0, "stalled": 0.5, "used": 10.0, "unknown": 2.0}
    for part, value in parts.items():
        holders.add([VectorRow({"namespace": "ml", "pod": "p", "part": part, "team": "vision"}, value)])
    (holder,) = holders.list()
    assert (holder.use.held, holder.use.known, holder.who.team) == (25.5, 23.5, "vision")
    assert [holder.use.parts[part] for part in (IDLE, UNPROVEN, USED, UNKNOWN)] == [9.0, 4.0, None, 2.0]
    assert holder.use.apart == 10.0


def test_a_holder_whose_idle_hours_of_a_day_may_be_cut_off_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hours, "HOLDERS_MAX", 3)
    holders = hours.IdleHours()
    for pod, value, part in (("large", 50.0, "idle_long"), ("small", 2.0, "unproven"), ("small", 90.0, "used")):
        holders.add([VectorRow({"namespace": "ml", "pod": pod, "part": part}, value)])
    holders.add([*idle_rows(3, 0.1), *idle_rows(3, 7.0, part="used")])
    assert [each.who.holder for each in holders.list()] == ["ml/large", "ml/p0", "ml/p1", "ml/p2"]


def test_prices_in_two_currencies_are_no_money() -> None:
    def rows(query: str) -> list[dict[str, str]]:
        currencies = [{"currency": "EUR"}, {"currency": "USD"}]
        if "gpu_unpriced" in query:
            return []
        return currencies if query.startswith("group by (currency)") else one(query)

    digest = ReportSource(rows).read(days=1)
    assert "money: the prices have 2 currencies: EUR, USD" in digest.missing
    assert {use.cost for use in (digest.total, *digest.lines.values(), *digest.days.values()) if use} == {None}
    assert digest.currency == ""
    one_currency = ReportSource(lambda query: rows(query)[:1]).read(days=1)
    assert (one_currency.currency, one_currency.total.cost) == ("EUR", 1.0)
    unpriced = ReportSource(lambda query: (rows(query) or one(query))[:1]).read(days=1)
    assert (unpriced.currency, unpriced.total.cost) == ("EUR", None)


@pytest.mark.parametrize(("recorded", "idle", "is_said"), [(0.0, 0.2, True), (2.0, 0.2, False), (2.0, 1.1, True)])
def test_holders_without_a_recording_are_missing_and_no_empty_list(recorded: float, idle: float, is_said: bool) -> None:
    """Rules that are not loaded record nothing at all. Few idle hours may also be of runs too short for the list."""
    tenants = {Who(scheduler="kubernetes", namespace="ml"): Hours(2.0, 2.0, 1.0, idle, recorded=recorded)}
    report = UsageReport(END - DAY_S, END, lines={who: each.use() for who, each in tenants.items()})
    said = list(read._missing(report, tenants, [], has_nameless=False))
    assert any("allocation:gpu_share:part is not recorded" in each for each in said) == is_said
    assert report.holders == (None if is_said else [])


def read_hours_of(
    answers: dict[str, list[tuple[dict[str, str], list[float | None]]]], end: float
) -> dict[float, GpuHours | None]:
    """Answers by the start of their query: labels, and a value for each hour of the period."""

    def fetch(address: Address, form: Mapping[str, str] | None, most_bytes: int, within_s: float) -> str:
        assert form is not None
        (rows,) = (rows for begin, rows in answers.items() if form["query"].startswith(begin))
        first = int(form["start"])
        result = [
            {
                "metric": labels,
                "values": [[first + 3600 * at, f"{value}"] for at, value in enumerate(values) if value is not None],
            }
            for labels, values in rows
        ]
        return json.dumps({"status": "success", "data": {"resultType": "matrix", "result": result}})

    history = History(parse_address("http://p"), fetch)
    return read_hours(history, "tenant:gpu_gpus:rate5m", 60.0, 1000.0, end)


def test_an_hour_that_the_rules_did_not_record_has_no_hours_and_not_zero() -> None:
    """The period begins and ends within an hour: these two hours are not compared with whole ones."""
    parts: list[tuple[dict[str, str], list[float | None]]] = [
        ({"part": "idle"}, [2.0, 1.0, None, 2.0]),
        ({"part": "used"}, [3.0, 1.0, None, 0.0]),
        ({"part": "unknown"}, [None, 1.0, None, 1.0]),
    ]
    found = read_hours_of({"sum by (part)": parts, "max(count": [({}, [1.0, 0.9, None, 1.0])]}, 5 * 3600.0 + 10)
    assert list(found) == [3600.0, 7200.0, 10800.0, 14400.0]
    assert [use and (use.held, use.parts[IDLE], use.parts[UNKNOWN]) for use in found.values()] == [
        (5.0, 2.0, 0.0),
        None,
        None,
        (3.0, 2.0, 1.0),
    ]
    assert read_hours_of({"sum by (part)": [], "max(count": []}, 5 * 3600.0) == dict.fromkeys(found)
    assert read_hours_of({}, 4000.0) == {}, "no whole hour"


def test_capacity_is_present_held_and_free_by_model() -> None:
    def row(part: str, value: float, name: str = "H100", cluster: str = "") -> VectorRow:
        return VectorRow({"part": part, "name": name, **({"cluster": cluster} if cluster else {})}, value)

    rows = [row("used", 60.0), row("idle_long", 20.0), row("free", 10.0), row("outside", 6.0), row("no_data", 4.0)]
    rows += [row("free", 5.0), row("used", 7.0, "A30"), row("used", 1.0, "A30", "east")]
    assert list(add_capacity(rows)) == [
        Capacity("", "A30", 7.0, 7.0, 0.0),
        Capacity("", "H100", 105.0, 80.0, 15.0),
        Capacity("east", "A30", 1.0, 1.0, 0.0),
    ]
