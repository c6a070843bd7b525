"""Reads the GPU-hours of a period from a PromQL API, one day per query, so that long periods need no large queries.

The hours come from the tenant counters of the exporters. Holders and cost come from the recordings of alerts/rules. If
these have not recorded the same GPU-hours, holders and cost are missing, and the report lists them as missing.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from gpu_exporter.common.address import Address
from gpu_exporter.common.clock import SYSTEM_CLOCK, Clock
from gpu_exporter.common.config.defaults import Alerts
from gpu_exporter.common.durations import describe_duration
from gpu_exporter.common.errors import AnswerError
from gpu_exporter.common.fetch import MIB, LimitError
from gpu_exporter.common.plain import REASON_MAX, shorten
from gpu_exporter.common.promql import absence
from gpu_exporter.common.promql.client import Fetch
from gpu_exporter.common.promql.vector import TooManyRows, VectorRow, cluster_matchers, parse_vector
from gpu_exporter.common.slurm.hostlist import render_names
from gpu_exporter.common.threads import NoThread, run_ahead
from gpu_exporter.reconciler.evidence.records import ENFORCED
from gpu_exporter.reports.history.asking import History
from gpu_exporter.reports.usage.model import WHOLE, CauseHours, Covered, LongIdle, ReportSource, UsageReport, Who
from gpu_exporter.reports.usage.tenants import oversized, targets
from gpu_exporter.reports.usage.tenants.hours import HOLDERS_MAX, Hours, IdleHours, add_up
from gpu_exporter.reports.usage.tenants.parts import (
    STEP_S,
    PeriodPart,
    Segment,
    failed_share,
    first_sample,
    join,
    list_days,
    lost_growth,
    seen_seconds,
)
from gpu_exporter.reports.usage.tenants.recorded import add_capacity, query_capacity, read_hours

ANSWER_S = 120.0  # a query over a day of a large site; no mark depends on this query
WITHIN_S = 900.0  # all queries of a report: two weeks are 260, ninety days 1,600
# The largest answer is that about oversized holders. Each has more than 24 GPU-hours, so 2,000 GPUs have at most 28,000
# of them in two weeks. A row has 310 bytes, or 500 if names are long: 9 to 14 MB. The limits are twice that.
MOST_BYTES = 32 * MIB
ROWS_MAX = 60_000
FACTS = frozenset(("enforced", "nameless", "currency", "seen", "lost", "failed", "since"))  # one row or a few
WIDE = frozenset(("holders", "costs"))  # a row for each part
FACT_ROWS_MAX = 100  # of each fact; the facts of all days are in memory at once
TENANT_ROWS_MAX = 10_000  # and of nodes, and of tenants with a cause: 2,000 GPUs seldom have a thousand tenants a day
TENANTS_MAX = 20_000  # of the whole period
WORKERS = 2
REMEDY = "take a shorter --since, or the Prometheus of one part of the site"
TENANT = "cluster, scheduler, namespace, account, user"
HOLDER = "cluster, scheduler, namespace, pod, job_id"
OUTCOME = "cluster, tenant, reason"
OWNER = "user, account, team, workload, array_job_id, array_task_id, het_job_id, het_job_offset"
HELD, ENERGY = "gpu_tenant_held_gpu_seconds_total", "gpu_tenant_energy_joules_total"
SOURCE = ReportSource(
    "gpu-exporter",
    "hours of tenants from its counters; holders, money and causes from the recordings of alerts/rules",
    ("team, workload and GPU model of these hours",),
)
HOURS = ("held", "known", "busy", "idle", "stalled", "unproven")


class TenantReader:
    """Queries one PromQL API. Every method may raise AnswerError."""

    def __init__(
        self, address: Address, matcher: str, alerts: Alerts, fetch: Fetch, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        """`matcher`: selects the exporters' series. `alerts`: the settings from which the rules were generated."""
        self._address, self._matcher, self._alerts, self._fetch = address, matcher, alerts, fetch
        self._clock = clock
        self._until = 0.0  # end of the time for all queries (monotonic)

    def read(self, since_s: float, end: float) -> UsageReport:
        """Reads the report of `since_s` seconds up to `end` (Unix seconds)."""
        self._until = self._clock.monotonic() + WITHIN_S
        report = UsageReport(end - since_s, end, [SOURCE])
        found: dict[Who, Hours] = {}
        days: dict[float, Hours | None] = {}
        now, before = (list(list_days(since_s, ago)) for ago in (0.0, since_s))
        facts = self._read_facts(now, before, end)
        whole = PeriodPart(0.0, since_s)
        if facts[whole, "enforced"]:
            raise AnswerError(f"{self._address}: {ENFORCED}")
        seen = {part: facts[part, "seen"][0].value for part in (*now, *before) if facts[part, "seen"]}
        lost = {part for part in (*now, *before) if facts.get((part, "lost"))}
        report.covered = self._read_covered(now, before, seen, end)
        twice: set[str] = set()
        holders = IdleHours()
        causes: dict[tuple[Who, str], float] = {}
        long_idle: dict[tuple[str, str, str], float] = {}
        capacity: list[VectorRow] = []
        if sum(seen.get(part, 0.0) for part in before) >= WHOLE * since_s:
            segments = (self._read_segment(each, end, twice, all_of_it=False) for each in join(before, seen, lost))
            earlier = add_up(hours for each in segments for hours in _hours(each).values())
            report.before = earlier.use()
        for segment in join(now, seen, lost):  # one after the other: their rows need memory
            answers = self._read_segment(segment, end, twice, all_of_it=True)
            tenants = _hours(answers)
            for tenant, hours in tenants.items():
                found.setdefault(tenant, Hours()).add(hours)
            day = add_up(tenants.values()) if tenants and len(segment.parts) == 1 else None
            days |= {end - part.ago - part.span: day for part in segment.parts}
            holders.add(answers.get("holders", []))
            capacity += answers.get("capacity", [])
            _add_causes(causes, answers.get("causes", []))
            _add_long_idle(long_idle, answers.get("long_idle", []))
            if max(len(found), len(causes), len(long_idle)) > TENANTS_MAX:
                raise AnswerError(f"{self._address}: the period has more than {TENANTS_MAX} tenants: {REMEDY}")
        queries = oversized.queries(HOLDER, OWNER, f"{since_s:.0f}s", self._recorded())
        over = {name: rows for (_, name), rows in self._ask_each(((whole, each) for each in queries), end)}
        report.oversized = oversized.find(over)
        report.capacity = list(add_capacity(capacity))
        report.holders = holders.list()
        of_tenants = [CauseHours(tenant, cause, hours) for (tenant, cause), hours in causes.items()]
        report.causes = sorted(of_tenants, key=lambda each: (-each.hours, each.who, each.cause))
        long = [LongIdle(*key, hours) for key, hours in long_idle.items()]
        report.long_idle = sorted(long, key=lambda each: (-each.hours, each))
        if not any(hours.held for hours in found.values()):
            why = absence.explain_no_hours(lambda query: self._ask(whole, ("why", query), end)[1], self._matcher, end)
            raise AnswerError(f"{self._address}: no GPU-hours in this period: {why}")
        currencies = sorted({row.labels.get("currency", "") for row in facts[whole, "currency"]} - {""})
        has_money = len(currencies) < 2  # without a single currency there is no sum
        report.lines = {tenant: hours.use(has_money=has_money) for tenant, hours in found.items()}
        report.days = {at: hours.use(has_money=has_money) if hours else None for at, hours in days.items()}
        report.currency = currencies[0] if len(currencies) == 1 else ""
        history = History(self._address, self._fetch, clock=self._clock)
        gpus = self._select("tenant:gpu_gpus:rate5m")
        report.hours = read_hours(history, gpus, self._alerts.interval, report.start, end)
        if report.holders:
            short = describe_duration(self._alerts.idle_short)
            report.left_out.append(f"idle runs shorter than {short} (alerts.idle_short), in the list of holders only")
        report.missing += _missing(report, found, sorted(twice), has_nameless=bool(facts[whole, "nameless"]))
        report.missing += _missing_money(report, add_up(found.values()), currencies)
        return report

    def _read_facts(
        self, now: Sequence[PeriodPart], before: Sequence[PeriodPart], end: float
    ) -> dict[tuple[PeriodPart, str], list[VectorRow]]:
        """Queries the facts on which the queries for hours depend."""
        whole = PeriodPart(0.0, sum(part.span for part in now))
        asked = [(whole, ("enforced", self._count("gpu_up", 'namespace!=""', whole)))]
        asked += [(whole, ("nameless", self._count(HELD, 'node=""', whole)))]
        asked += [
            (whole, ("currency", f"group by (currency) (last_over_time(model:gpu_price:per_hour{whole.window}))"))
        ]
        asked += [(part, ("seen", seen_seconds(self._matcher, part))) for part in (*now, *before)]
        for days in (now, before):
            borders = itertools.pairwise(days)
            asked += [(older, ("lost", lost_growth(self._matcher, older, newer))) for older, newer in borders]
        return dict(self._ask_each(asked, end))

    def _read_covered(
        self,
        now: Sequence[PeriodPart],
        before: Sequence[PeriodPart],
        seen: Mapping[PeriodPart, float],
        end: float,
    ) -> Covered:
        whole = PeriodPart(0.0, sum(part.span for part in now))
        _, failed = self._ask(whole, ("failed", failed_share(self._matcher, whole)), end)
        first = next((part for part in now if seen.get(part)), None)
        since = None
        if first is not None and not any(seen.get(part) for part in before):
            _, rows = self._ask(first, ("since", first_sample(self._matcher, first)), end)
            since = next((row.value for row in rows), None)
        seconds = min(whole.span, sum(seen.get(part, 0.0) for part in now))
        return Covered(seconds, whole.span, since, next((row.value for row in failed), None))

    def _read_segment(
        self, segment: Segment, end: float, twice: set[str], *, all_of_it: bool
    ) -> dict[str, list[VectorRow]]:
        """Queries a segment. Returns the rows of each query by name. Adds to `twice` the nodes that several targets
        scraped at the same time.
        """
        part = segment.whole
        _, rows = self._ask(part, ("twice", targets.nodes_scraped_twice(self._matcher, part)), end)
        nodes = {row.labels.get("node", "") for row in rows}
        twice |= nodes
        queries = self._queries(part, all_of_it, nodes)
        return {name: rows for (_, name), rows in self._ask_each(((part, each) for each in queries), end)}

    def _recorded(self) -> str:
        """The user's matchers on labels that recordings have. Recordings lack the label `job`."""
        return ",".join(cluster_matchers(self._matcher))

    def _count(self, name: str, matcher: str, part: PeriodPart) -> str:
        matchers = ",".join(filter(None, (self._matcher, matcher)))
        return f"count(last_over_time({name}{{{matchers}}}{part.window}))"

    def _ask_each(
        self, queries: Iterable[tuple[PeriodPart, tuple[str, str]]], end: float
    ) -> Iterator[tuple[tuple[PeriodPart, str], list[VectorRow]]]:
        try:
            yield from run_ahead(lambda item: self._ask(*item, end), queries, WORKERS, "digest")
        except NoThread as exc:
            raise AnswerError(str(exc)) from exc

    def _queries(self, part: PeriodPart, all_of_it: bool, twice: Collection[str]) -> Iterator[tuple[str, str]]:
        """Yields name and PromQL of each query. `all_of_it`: false to read only hours. `twice`: nodes with several
        targets.
        """
        counters = [(name, f"gpu_tenant_{name}_gpu_seconds_total", 3600.0) for name in HOURS]
        counters += [("energy_kwh", ENERGY, 3.6e6)] if all_of_it else []
        for name, counter, unit in counters:
            yield name, f"{targets.total(counter, self._matcher, part, TENANT, twice)} / {unit:g}"
        if not all_of_it:
            return
        held, energy = (f"increase({name}{{{self._matcher}}}{part.window})" for name in (HELD, ENERGY))
        yield "unmetered", f"sum by ({TENANT}) ({held} unless {energy}) / 3600"
        hours = self._alerts.interval / 3600.0
        for name, series, by in (
            ("costs", "tenant:gpu_cost:rate", f"{TENANT}, part"),
            ("unpriced", "tenant:gpu_unpriced:rate5m", TENANT),
            ("recorded", "tenant:gpu_gpus:rate5m", TENANT),
        ):
            yield name, f"sum by ({by}) (sum_over_time({self._select(series)}{part.window})) * {hours:g}"
        shares = f"sum by ({HOLDER}, part) (sum_over_time({self._select('allocation:gpu_share:part')}{part.window}))"
        quiet = self._select("allocation:gpu_share:part", 'part=~"idle_.+|unproven"')
        most = f"topk({HOLDERS_MAX}, sum by ({HOLDER}) (sum_over_time({quiet}{part.window})))"
        owners = f"last_over_time({self._select('allocation:owner:info')}{part.window})"
        owner = f"topk by ({HOLDER}) (1, max by ({HOLDER}, {OWNER}) ({owners}))"
        causes = f"sum_over_time({self._select('tenant:gpu_cause_gpus:sum')}{part.window})"
        yield "capacity", query_capacity(self._select("namespace:gpu_gpus:sum"), part.window, self._alerts.interval)
        yield "causes", f"sum by ({TENANT}, cause) ({causes}) * {hours:g}"
        # The time between two scrapes of the reconciler is not known, and two replicas may overlap.
        taken = self._select("gpu_reconciler_idle_gpus", 'exit!="spared"')
        both = f"{self._select('gpu_reconciler_spared_gpus')} or label_replace({taken}, 'reason', '$1', 'exit', '(.+)')"
        gpus = f"max by ({OUTCOME}) ({both})"
        yield "long_idle", f"sum_over_time(({gpus}){part.steps(STEP_S)}) * {STEP_S / 3600.0:g}"
        yield "holders", f"({shares} and on ({HOLDER}) {most}) * {hours:g} * on ({HOLDER}) group_left ({OWNER}) {owner}"

    def _select(self, recording: str, matchers: str = "") -> str:
        wanted = ",".join(filter(None, (self._recorded(), matchers)))
        return f"{recording}{{{wanted}}}" if wanted else recording

    def _ask(
        self, part: PeriodPart, query: tuple[str, str], end: float
    ) -> tuple[tuple[PeriodPart, str], list[VectorRow]]:
        name, expression = query
        left_s = self._until - self._clock.monotonic()
        if left_s <= 0.0:
            raise AnswerError(f"{self._address}: the queries took longer than {WITHIN_S:.0f} s together: {REMEDY}")
        form = {"query": expression, "time": f"{end:.3f}"}
        rows_max = (
            ROWS_MAX
            if name in WIDE or name.startswith("over_")
            else FACT_ROWS_MAX
            if name in FACTS
            else TENANT_ROWS_MAX
        )
        try:
            text = self._fetch(self._address.page("/api/v1/query"), form, MOST_BYTES, min(ANSWER_S, left_s))
            return (part, name), parse_vector(text, expression, rows_max)
        except LimitError as exc:
            raise AnswerError(f"{exc}: {REMEDY}; the query was {expression}") from exc
        except TooManyRows as exc:
            raise AnswerError(f"{self._address}: {exc}: {REMEDY}") from exc


def _hours(answers: Mapping[str, list[VectorRow]]) -> dict[Who, Hours]:
    """The hours of the tenants that held GPUs. A counter that no exporter has is None."""
    found: dict[Who, Hours] = {}
    for row in answers.get("held", []):
        hours = found.setdefault(_tenant_of(row.labels), Hours(known=None, busy=None, idle=None, stalled=None))
        hours.held += row.value
    for name in vars(Hours()).keys() - {"held", "costs"}:
        for row in answers.get(name, []):
            of_it = found.get(_tenant_of(row.labels))
            if of_it is not None:
                setattr(of_it, name, (getattr(of_it, name) or 0.0) + row.value)
    for row in answers.get("costs", []):
        part = row.labels.get("part", "")
        if (tenant := _tenant_of(row.labels)) in found:
            costs = found[tenant].costs
            costs[part] = costs.get(part, 0.0) + row.value
    return found


def _missing(report: UsageReport, found: Mapping[Who, Hours], twice: list[str], *, has_nameless: bool) -> Iterator[str]:
    """Yields a text for each value that is missing or may be wrong, and removes the wrong values from the report.

    `twice`: nodes that several targets scraped.
    """
    total = add_up(found.values())
    if twice:
        nodes = shorten(render_names(twice), REASON_MAX)
        yield (
            f"possibly some hours of {nodes}: several targets count as one exporter there; scrape each exporter once, "
            "and set the label cluster if several clusters have a node of this name"
        )
    if has_nameless:
        yield (
            "whether an exporter was scraped twice, so that its hours count twice: some series lack the label node; "
            "set it in Prometheus (alerts/prometheus.example.yaml)"
        )
    if without := sum(use.energy is None for use in report.lines.values()):
        yield f"energy of {without} of {len(found)} tenants: their GPUs have no energy counter"
    if not report.holders and (not total.recorded or (total.idle or 0.0) > 1.0):
        yield "holders: allocation:gpu_share:part is not recorded; load alerts/rules"
        report.holders = None
    elif report.holders and not total.is_recorded:
        yield f"holders, and those that could use less: {_recorded(total)}"
        report.holders = report.oversized = None
    if report.capacity and not total.is_recorded:
        yield f"capacity: {_recorded(total)}"
        report.capacity = []


def _missing_money(report: UsageReport, total: Hours, currencies: list[str]) -> Iterator[str]:
    if not any(total.costs.values()) and not total.unpriced:
        yield "money: tenant:gpu_cost:rate is not recorded; load alerts/rules"
    elif not total.is_recorded:
        yield f"money: {_recorded(total)}"
    elif total.unpriced:
        yield f"money: {total.unpriced:.0f} GPU-hours have no price (alerts/prices.example.yaml)"
    elif without := sum(not use.is_priced for use in report.lines.values()):
        yield f"money of {without} of {len(report.lines)} tenants: the rules have not recorded all of their GPU-hours"
    if len(currencies) > 1:
        yield f"money: the prices have {len(currencies)} currencies: {', '.join(currencies)}"
    elif not currencies and report.total.cost:
        yield "the currency: set the label `currency` on model:gpu_price:per_hour (docs/interfaces.md)"


def _recorded(total: Hours) -> str:
    return f"the rules recorded {total.recorded:,.1f} of the {total.held:,.1f} GPU-hours"


def _tenant_of(labels: Mapping[str, str]) -> Who:
    return Who(*(labels.get(label, "") for label in ("cluster", "scheduler", "namespace", "account", "user")))


def _add_causes(causes: dict[tuple[Who, str], float], rows: list[VectorRow]) -> None:
    for row in rows:
        key = (_tenant_of(row.labels), row.labels.get("cause", ""))
        causes[key] = causes.get(key, 0.0) + row.value


def _add_long_idle(long_idle: dict[tuple[str, str, str], float], rows: list[VectorRow]) -> None:
    for row in rows:
        cluster, tenant, reason = (row.labels.get(label, "") for label in ("cluster", "tenant", "reason"))
        long_idle[cluster, tenant, reason] = long_idle.get((cluster, tenant, reason), 0.0) + row.value
