"""Reads the GPU-hours of a period from a PromQL API, one day per query, so that long periods need no large queries.

The hours come from the tenant counters of the exporters. Holders and cost come from the recordings of alerts/rules. If
these have not recorded the same GPU-hours, holders and cost are missing, and the digest lists them as missing.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gpu_exporter.common.address import Address
from gpu_exporter.common.clock import SYSTEM_CLOCK, Clock
from gpu_exporter.common.config.defaults import Alerts
from gpu_exporter.common.errors import AnswerError
from gpu_exporter.common.fetch import MIB, LimitError
from gpu_exporter.common.plain import REASON_MAX, shorten
from gpu_exporter.common.promql import absence
from gpu_exporter.common.promql.client import Fetch
from gpu_exporter.common.promql.vector import TooManyRows, VectorRow, cluster_matchers, parse_vector
from gpu_exporter.common.slurm.hostlist import render_names
from gpu_exporter.common.threads import NoThread, run_ahead
from gpu_exporter.reconciler.evidence.records import ENFORCED
from gpu_exporter.reports.digest import oversized, targets
from gpu_exporter.reports.digest.hours import HOLDERS_MAX, Hours, IdleHolder, IdleHours, TenantName, add_up, owner_of
from gpu_exporter.reports.digest.oversized import Oversized
from gpu_exporter.reports.digest.parts import (
    WHOLE,
    PeriodPart,
    Seen,
    Segment,
    failed_share,
    first_sample,
    join,
    list_days,
    lost_growth,
    seen_seconds,
)

ANSWER_S = 120.0  # a query over a day of a large site; no mark depends on this query
WITHIN_S = 900.0  # all queries of a digest: two weeks are 240, ninety days 1,500
# The largest answer is that about oversized holders. Each has more than 24 GPU-hours, so 2,000 GPUs have at most 28,000
# of them in two weeks. A row has 310 bytes, or 500 if names are long: 9 to 14 MB. The limits are twice that.
MOST_BYTES = 32 * MIB
ROWS_MAX = 60_000
FACTS = frozenset(("enforced", "nameless", "currency", "seen", "lost", "failed", "since"))  # one row or a few
FACT_ROWS_MAX = 100  # of each of them; those of all days are in memory at once
TENANT_ROWS_MAX = 10_000  # and of nodes, and of tenants with a cause: 2,000 GPUs seldom have a thousand tenants a day
TENANTS_MAX = 20_000  # of the whole period
WORKERS = 2
REMEDY = "take a shorter --since, or the Prometheus of one part of the site"
TENANT = "cluster, scheduler, namespace, account, user"
HOLDER = "cluster, scheduler, namespace, pod, job_id"
OWNER = "user, account, team, workload, array_job_id, array_task_id, het_job_id, het_job_offset"
HELD, ENERGY = "gpu_tenant_held_gpu_seconds_total", "gpu_tenant_energy_joules_total"
HOURS = ("held", "known", "busy", "idle", "stalled", "unproven")


class TenantCause(NamedTuple):
    """GPU-hours of a tenant with this cause of low utilization. A GPU with two causes counts for both."""

    tenant: TenantName
    cause: str
    hours: float


@dataclass
class Digest:
    """The content of a digest.

    `days`: start and hours per day, oldest first, None for a day with unknown hours. `before`: the hours of the
    previous period of the same length, None if Prometheus has not seen all of that period. `seen`: how much of the
    period Prometheus has seen. `holders`, `oversized`: None if the rules have not recorded the whole period.

    `missing`: values that are missing or may be wrong, each with its reason. `currency`: the currency of the site's
    prices, "" if it is unknown. `idle_short_s`: idle runs of `holders` are at least this long.
    """

    start: float
    end: float
    tenants: dict[TenantName, Hours] = field(default_factory=dict)
    days: list[tuple[float, Hours | None]] = field(default_factory=list)
    before: Hours | None = None
    holders: list[IdleHolder] | None = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    oversized: list[Oversized] | None = field(default_factory=list)
    causes: list[TenantCause] = field(default_factory=list)
    seen: Seen | None = None
    currency: str = ""
    idle_short_s: float = 0.0

    @property
    def total(self) -> Hours:
        return add_up(self.tenants.values())

    def by_group(self) -> dict[TenantName, dict[TenantName, Hours]]:
        """The tenants by namespace or account. Each key is the namespace or account as a tenant without a user."""
        groups: dict[TenantName, dict[TenantName, Hours]] = {}
        for tenant, hours in self.tenants.items():
            groups.setdefault(tenant._replace(user=""), {})[tenant] = hours
        return groups


class DigestReader:
    """Queries one PromQL API. Every method may raise AnswerError."""

    def __init__(
        self, address: Address, matcher: str, alerts: Alerts, fetch: Fetch, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        """`matcher`: selects the exporters' series. `alerts`: the settings that the rules were made with."""
        self._address, self._matcher, self._alerts, self._fetch = address, matcher, alerts, fetch
        self._clock = clock
        self._until = 0.0  # end of the time for all queries (monotonic)

    def read(self, since_s: float, end: float) -> Digest:
        """The digest of `since_s` seconds up to `end` (Unix seconds)."""
        self._until = self._clock.monotonic() + WITHIN_S
        digest = Digest(end - since_s, end, idle_short_s=self._alerts.idle_short)
        now, before = (list(list_days(since_s, ago)) for ago in (0.0, since_s))
        facts = self._read_facts(now, before, end)
        whole = PeriodPart(0.0, since_s)
        if facts[whole, "enforced"]:
            raise AnswerError(f"{self._address}: {ENFORCED}")
        seen = {part: facts[part, "seen"][0].value for part in (*now, *before) if facts[part, "seen"]}
        lost = {part for part in (*now, *before) if facts.get((part, "lost"))}
        digest.seen = self._read_seen(digest, now, before, seen, end)
        twice: set[str] = set()
        holders = IdleHours()
        causes: dict[tuple[TenantName, str], float] = {}
        if sum(seen.get(part, 0.0) for part in before) >= WHOLE * since_s:
            for segment in join(before, seen, lost):
                answers = self._read_segment(segment, end, twice, all_of_it=False)
                digest.before = add_up([*filter(None, [digest.before]), *_hours(answers).values()])
        for segment in join(now, seen, lost):  # one after the other: their rows need memory
            answers = self._read_segment(segment, end, twice, all_of_it=True)
            tenants = _hours(answers)
            for tenant, hours in tenants.items():
                digest.tenants.setdefault(tenant, Hours()).add(hours)
            day = add_up(tenants.values()) if tenants and len(segment.parts) == 1 else None
            digest.days += [(end - part.ago - part.span, day) for part in segment.parts]
            holders.add(answers.get("holders", []))
            _add_causes(causes, answers.get("causes", []))
            if max(len(digest.tenants), len(causes)) > TENANTS_MAX:
                raise AnswerError(f"{self._address}: the period has more than {TENANTS_MAX} tenants: {REMEDY}")
        queries = oversized.queries(HOLDER, OWNER, f"{since_s:.0f}s", self._recorded())
        over = {name: rows for (_, name), rows in self._ask_each(((whole, each) for each in queries), end)}
        digest.oversized = oversized.find(over, owner_of)
        found = [TenantCause(tenant, cause, hours) for (tenant, cause), hours in causes.items()]
        digest.causes = sorted(found, key=lambda each: (-each.hours, each.tenant, each.cause))
        digest.holders = holders.list()
        if not digest.total.held:
            why = absence.explain_no_hours(lambda query: self._ask(whole, ("why", query), end)[1], self._matcher, end)
            raise AnswerError(f"{self._address}: no GPU-hours in this period: {why}")
        currencies = sorted({row.labels.get("currency", "") for row in facts[whole, "currency"]} - {""})
        digest.missing = list(_missing(digest, sorted(twice), currencies, has_nameless=bool(facts[whole, "nameless"])))
        return digest

    def _read_facts(
        self, now: Sequence[PeriodPart], before: Sequence[PeriodPart], end: float
    ) -> dict[tuple[PeriodPart, str], list[VectorRow]]:
        """Queries the facts on which the queries of the hours depend."""
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

    def _read_seen(
        self,
        digest: Digest,
        now: Sequence[PeriodPart],
        before: Sequence[PeriodPart],
        seen: Mapping[PeriodPart, float],
        end: float,
    ) -> Seen:
        whole = PeriodPart(0.0, sum(part.span for part in now))
        _, failed = self._ask(whole, ("failed", failed_share(self._matcher, whole)), end)
        first = next((part for part in now if seen.get(part)), None)
        since = None
        if first is not None and not any(seen.get(part) for part in before):
            _, rows = self._ask(first, ("since", first_sample(self._matcher, first)), end)
            since = next((row.value for row in rows), None)
        seconds = min(whole.span, sum(seen.get(part, 0.0) for part in now))
        return Seen(seconds, whole.span, since, next((row.value for row in failed), None))

    def _read_segment(
        self, segment: Segment, end: float, twice: set[str], *, all_of_it: bool
    ) -> dict[str, list[VectorRow]]:
        """The rows of all queries for a segment, by name. Adds to `twice` the nodes that several targets scraped at
        once.
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
        for name, series, matchers in (
            ("cost", "tenant:gpu_cost:rate", ""),
            ("cost_idle", "tenant:gpu_cost:rate", 'part="idle"'),
            ("cost_stalled", "tenant:gpu_cost:rate", 'part="stalled"'),
            ("unpriced", "tenant:gpu_unpriced:rate5m", ""),
            ("recorded", "tenant:gpu_gpus:rate5m", ""),
        ):
            yield name, f"sum by ({TENANT}) (sum_over_time({self._select(series, matchers)}{part.window})) * {hours:g}"
        shares = self._select("allocation:gpu_share:part", 'part=~"idle_.+"')
        idle = f"sum by ({HOLDER}) (sum_over_time({shares}{part.window})) * {hours:g}"
        owners = f"last_over_time({self._select('allocation:owner:info')}{part.window})"
        owner = f"topk by ({HOLDER}) (1, max by ({HOLDER}, {OWNER}) ({owners}))"
        causes = f"sum_over_time({self._select('tenant:gpu_cause_gpus:sum')}{part.window})"
        yield "causes", f"sum by ({TENANT}, cause) ({causes}) * {hours:g}"
        yield "holders", f"topk({HOLDERS_MAX}, {idle}) * on ({HOLDER}) group_left ({OWNER}) {owner}"

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
        rows_max = ROWS_MAX if name.startswith("over_") else FACT_ROWS_MAX if name in FACTS else TENANT_ROWS_MAX
        try:
            text = self._fetch(self._address.page("/api/v1/query"), form, MOST_BYTES, min(ANSWER_S, left_s))
            return (part, name), parse_vector(text, expression, rows_max)
        except LimitError as exc:
            raise AnswerError(f"{exc}: {REMEDY}; the query was {expression}") from exc
        except TooManyRows as exc:
            raise AnswerError(f"{self._address}: {exc}: {REMEDY}") from exc


def _hours(answers: Mapping[str, list[VectorRow]]) -> dict[TenantName, Hours]:
    """The hours of the tenants that held GPUs. A counter that no exporter has is None."""
    found: dict[TenantName, Hours] = {}
    for row in answers.get("held", []):
        hours = found.setdefault(_tenant_of(row.labels), Hours(known=None, busy=None, idle=None, stalled=None))
        hours.held += row.value
    for name in vars(Hours()).keys() - {"held"}:
        for row in answers.get(name, []):
            of_it = found.get(_tenant_of(row.labels))
            if of_it is not None:
                setattr(of_it, name, (getattr(of_it, name) or 0.0) + row.value)
    return found


def _missing(digest: Digest, twice: list[str], currencies: list[str], *, has_nameless: bool) -> Iterator[str]:
    """Yields a text for each value that is missing or may be wrong, and removes the wrong values from the digest.

    `twice`: nodes that several targets scraped. `currencies`: of the prices.
    """
    tenants, total = digest.tenants, digest.total
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
    if without := sum(hours.figures()["energy_kwh"] is None for hours in tenants.values()):
        yield f"energy of {without} of {len(tenants)} tenants: their GPUs have no energy counter"
    recorded = f"the rules recorded {total.recorded:,.1f} of the {total.held:,.1f} GPU-hours"
    if not digest.holders and (not total.recorded or (total.idle or 0.0) > 1.0):
        yield "holders: allocation:gpu_share:part is not recorded; load alerts/rules"
        digest.holders = None
    elif digest.holders and not total.is_recorded:
        yield f"holders, and those that could use less: {recorded}"
        digest.holders = digest.oversized = None
    yield from _missing_money(digest, currencies, recorded)


def _missing_money(digest: Digest, currencies: list[str], recorded: str) -> Iterator[str]:
    tenants, total = digest.tenants, digest.total
    if not total.cost and not total.unpriced:
        yield "money: tenant:gpu_cost:rate is not recorded; load alerts/rules"
    elif not total.is_recorded:
        yield f"money: {recorded}"
    elif total.unpriced:
        yield f"money: {total.unpriced:.0f} GPU-hours have no price (alerts/prices.example.yaml)"
    elif without := sum(not hours.is_priced for hours in tenants.values()):
        yield f"money of {without} of {len(tenants)} tenants: the rules have not recorded all of their GPU-hours"
    if len(currencies) > 1:
        yield f"money: the prices have {len(currencies)} currencies: {', '.join(currencies)}"
        for hours in (*tenants.values(), *(day for _, day in digest.days if day is not None)):
            hours.unpriced = hours.held  # without a single price
    elif currencies:
        digest.currency = currencies[0]
    elif total.is_priced and total.cost:
        yield "the currency: set the label `currency` on model:gpu_price:per_hour (docs/interfaces.md)"


def _tenant_of(labels: Mapping[str, str]) -> TenantName:
    return TenantName(*(labels.get(label, "") for label in TenantName._fields))


def _add_causes(causes: dict[tuple[TenantName, str], float], rows: list[VectorRow]) -> None:
    for row in rows:
        key = (_tenant_of(row.labels), row.labels.get("cause", ""))
        causes[key] = causes.get(key, 0.0) + row.value
