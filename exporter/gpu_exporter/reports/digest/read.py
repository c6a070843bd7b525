"""Reads the GPU-hours of a period from a PromQL API, one day per query, so that long periods need no large queries.

The hours come from the tenant counters of the exporters. Holders and cost come from the recordings of alerts/rules. If
the recordings are not loaded, both are missing, and the digest lists them as missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from gpu_exporter.common.address import Address
from gpu_exporter.common.clock import SYSTEM_CLOCK, Clock
from gpu_exporter.common.errors import AnswerError
from gpu_exporter.common.fetch import MIB, LimitError
from gpu_exporter.common.plain import REASON_MAX, shorten
from gpu_exporter.common.promql.client import Fetch
from gpu_exporter.common.promql.vector import TooManyRows, VectorRow, parse_vector
from gpu_exporter.common.slurm.hostlist import render_names
from gpu_exporter.common.threads import NoThread, run_ahead
from gpu_exporter.reconciler.evidence.records import ENFORCED, HolderName, holder_name, title, users_id_of
from gpu_exporter.reports.digest import oversized, targets
from gpu_exporter.reports.digest.oversized import Oversized

DAY_S = 86400.0
ANSWER_S = 120.0  # a query over a day of a large site; no mark depends on this query
WITHIN_S = 900.0  # all queries of a digest: two weeks are 240, ninety days 1,500
# The largest answer is that about oversized holders. Each has more than 24 GPU-hours, so 2,000 GPUs have at most 28,000
# of them in two weeks. A row has 310 bytes, or 500 if names are long: 9 to 14 MB. The limits are twice that.
MOST_BYTES = 32 * MIB
ROWS_MAX = 60_000
TENANT_ROWS_MAX = 10_000  # and of nodes, and of tenants with a cause: 2,000 GPUs seldom have a thousand tenants a day
TENANTS_MAX = 20_000  # of the whole period
WORKERS = 2
REMEDY = "use a shorter --since, or query the Prometheus of a part of the site"
HOLDERS_MAX = 200  # per day: includes the largest of the whole period, unless they are small on every day
TENANT = "cluster, scheduler, namespace, account, user"
HOLDER = "cluster, scheduler, namespace, pod, job_id"
OWNER = "user, account, team, workload, array_job_id, array_task_id, het_job_id, het_job_offset"
HOURS = ("held", "known", "busy", "idle", "stalled")


class TenantName(NamedTuple):
    """A namespace, or an account and a user of Slurm. `cluster`: "" unless Prometheus has several clusters."""

    cluster: str
    scheduler: str
    namespace: str
    account: str
    user: str

    def __str__(self) -> str:
        name = self.namespace or "/".join(filter(None, (self.account, self.user))) or "(not named)"
        return f"{self.cluster}: {name}" if self.cluster else name


@dataclass
class Hours:
    """GPU-hours, kilowatt-hours (None if no GPU reports energy) and cost. `busy`: integral of utilization.

    `stalled`: fully busy without progress.
    """

    held: float = 0.0
    known: float = 0.0
    busy: float = 0.0
    idle: float = 0.0
    energy_kwh: float | None = None
    cost: float = 0.0
    cost_idle: float = 0.0
    unpriced: float = 0.0
    stalled: float = 0.0
    cost_stalled: float = 0.0

    @property
    def used(self) -> float:
        """Hours with known use that were neither idle nor stalled."""
        return max(0.0, self.known - self.idle - self.stalled)

    @property
    def unknown(self) -> float:
        return max(0.0, self.held - self.known)

    def add(self, other: Hours) -> None:
        for name, more in vars(other).items():
            if more is not None:
                setattr(self, name, (getattr(self, name) or 0.0) + more)


class IdleHolder(NamedTuple):
    """A pod or job with its idle GPU-hours."""

    name: HolderName
    title: str
    owner: str
    idle: float


class TenantCause(NamedTuple):
    """GPU-hours of a tenant with this cause of low utilization. A GPU with two causes counts for both."""

    tenant: TenantName
    cause: str
    hours: float


@dataclass
class Digest:
    """`days`: start and hours of each day, oldest first; None for a day without data in Prometheus. `before`: the hours
    of the previous period of the same length, None without data.

    `missing`: values that are missing or may be wrong, each with its reason.
    """

    start: float
    end: float
    tenants: dict[TenantName, Hours] = field(default_factory=dict)
    days: list[tuple[float, Hours | None]] = field(default_factory=list)
    before: Hours | None = None
    holders: list[IdleHolder] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    oversized: list[Oversized] = field(default_factory=list)
    causes: list[TenantCause] = field(default_factory=list)

    @property
    def total(self) -> Hours:
        total = Hours()
        for hours in self.tenants.values():
            total.add(hours)
        return total


class _PeriodPart(NamedTuple):
    """A part of the period, at most a day: `span` seconds that ended `ago` seconds before the end."""

    ago: float
    span: float

    @property
    def window(self) -> str:
        return f"[{self.span:.0f}s]" + (f" offset {self.ago:.0f}s" if self.ago else "")


class DigestReader:
    """Queries one PromQL API. Every method may raise AnswerError."""

    def __init__(
        self, address: Address, matcher: str, interval_s: float, fetch: Fetch, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        """`matcher`: label matcher of the exporter's series. `interval_s`: time between evaluations of the rules."""
        self._address, self._matcher, self._interval_s, self._fetch = address, matcher, interval_s, fetch
        self._clock = clock
        self._until = 0.0  # end of the time for all queries (monotonic)

    def read(self, since_s: float, end: float) -> Digest:
        """The digest of `since_s` seconds up to `end` (Unix seconds)."""
        self._until = self._clock.monotonic() + WITHIN_S
        digest = Digest(end - since_s, end)
        parts = [*_parts(since_s, 0.0), *_parts(since_s, since_s)]
        whole = _PeriodPart(0.0, since_s)
        enforced = self._count("gpu_up", 'namespace!=""', whole)
        nameless = self._count("gpu_tenant_held_gpu_seconds_total", 'node=""', whole)
        twice = {part: targets.nodes_scraped_twice(self._matcher, part.span, part.ago) for part in parts}
        first = [(whole, ("enforced", enforced)), (whole, ("nameless", nameless))]
        first += [(part, ("twice", query)) for part, query in twice.items()]
        nodes = {key: {row.labels.get("node", "") for row in rows} for key, rows in self._ask_each(first, end)}
        if nodes[whole, "enforced"]:
            raise AnswerError(f"{self._address}: {ENFORCED}")
        idle: dict[HolderName, IdleHolder] = {}
        causes: dict[tuple[TenantName, str], float] = {}
        for part in sorted(parts, key=lambda each: -each.ago):  # one after the other: their rows need memory
            is_before = part.ago >= since_s
            queries = self._queries(part, not is_before, twice[part] if nodes[part, "twice"] else "")
            answers = {name: rows for (_, name), rows in self._ask_each(((part, each) for each in queries), end)}
            day: Hours | None = None
            for tenant, hours in _hours(answers).items():
                day = _sum(day, hours)
                if not is_before:
                    digest.tenants.setdefault(tenant, Hours()).add(hours)
            if is_before:
                digest.before = _sum(digest.before, day)
            else:
                digest.days.append((end - part.ago - part.span, day))
                _add_holders(idle, answers.get("holders", []))
                _add_causes(causes, answers.get("causes", []))
            if max(len(digest.tenants), len(causes)) > TENANTS_MAX:
                raise AnswerError(f"{self._address}: the period has more than {TENANTS_MAX} tenants: {REMEDY}")
        queries = oversized.queries(HOLDER, OWNER, f"{since_s:.0f}s")
        over = {name: rows for (_, name), rows in self._ask_each(((whole, each) for each in queries), end)}
        digest.oversized = oversized.find(over, _owner_of)
        found = [TenantCause(tenant, cause, hours) for (tenant, cause), hours in causes.items()]
        digest.causes = sorted(found, key=lambda each: (-each.hours, each.tenant, each.cause))
        digest.holders = sorted(idle.values(), key=lambda holder: -holder.idle)
        if not digest.total.held:
            raise AnswerError(
                f"{self._address}: no gpu_tenant_held_gpu_seconds_total{{{self._matcher}}} in this period: check "
                "--source.matcher"
            )
        twice_there = set().union(*(nodes[part, "twice"] for part in parts))
        digest.missing = list(_missing(digest, sorted(twice_there), has_nameless=bool(nodes[whole, "nameless"])))
        return digest

    def _count(self, name: str, matcher: str, part: _PeriodPart) -> str:
        matchers = ",".join(filter(None, (self._matcher, matcher)))
        return f"count(last_over_time({name}{{{matchers}}}{part.window}))"

    def _ask_each(
        self, queries: Iterable[tuple[_PeriodPart, tuple[str, str]]], end: float
    ) -> Iterator[tuple[tuple[_PeriodPart, str], list[VectorRow]]]:
        try:
            yield from run_ahead(lambda item: self._ask(*item, end), queries, WORKERS, "digest")
        except NoThread as exc:
            raise AnswerError(str(exc)) from exc

    def _queries(self, part: _PeriodPart, all_of_it: bool, twice: str) -> Iterator[tuple[str, str]]:
        """Yield name and PromQL of each query. `all_of_it`: not only hours. `twice`: PromQL for nodes scraped twice."""
        counters = [(name, f"gpu_tenant_{name}_gpu_seconds_total", 3600.0) for name in HOURS]
        counters += [("energy_kwh", "gpu_tenant_energy_joules_total", 3.6e6)] if all_of_it else []
        for name, counter, unit in counters:
            grown = f"increase({counter}{{{self._matcher}}}{part.window})"
            yield name, f"{targets.total(grown, TENANT, twice)} / {unit:g}"
        if not all_of_it:
            return
        hours = self._interval_s / 3600.0
        for name, series in (
            ("cost", "tenant:gpu_cost:rate"),
            ("cost_idle", 'tenant:gpu_cost:rate{part="idle"}'),
            ("cost_stalled", 'tenant:gpu_cost:rate{part="stalled"}'),
            ("unpriced", "tenant:gpu_unpriced:rate5m"),
        ):
            yield name, f"sum by ({TENANT}) (sum_over_time({series}{part.window})) * {hours:g}"
        idle = (
            f'sum by ({HOLDER}) (sum_over_time(allocation:gpu_share:part{{part=~"idle_.+"}}{part.window})) * {hours:g}'
        )
        owner = (
            f"topk by ({HOLDER}) (1, max by ({HOLDER}, {OWNER}) (last_over_time(allocation:owner:info{part.window})))"
        )
        causes = f"sum_over_time(tenant:gpu_cause_gpus:sum{part.window})"
        yield "causes", f"sum by ({TENANT}, cause) ({causes}) * {hours:g}"
        yield "holders", f"topk({HOLDERS_MAX}, {idle}) * on ({HOLDER}) group_left ({OWNER}) {owner}"

    def _ask(
        self, part: _PeriodPart, query: tuple[str, str], end: float
    ) -> tuple[tuple[_PeriodPart, str], list[VectorRow]]:
        name, expression = query
        left_s = self._until - self._clock.monotonic()
        if left_s <= 0.0:
            raise AnswerError(f"{self._address}: the queries took longer than {WITHIN_S:.0f} s together: {REMEDY}")
        form = {"query": expression, "time": f"{end:.3f}"}
        rows_max = ROWS_MAX if name.startswith("over_") else TENANT_ROWS_MAX
        try:
            text = self._fetch(self._address.page("/api/v1/query"), form, MOST_BYTES, min(ANSWER_S, left_s))
            return (part, name), parse_vector(text, expression, rows_max)
        except LimitError as exc:
            raise AnswerError(f"{exc}: {REMEDY}; the query was {expression}") from exc
        except TooManyRows as exc:
            raise AnswerError(f"{self._address}: {exc}: {REMEDY}") from exc


def _sum(one: Hours | None, other: Hours | None) -> Hours | None:
    if one is None or other is None:
        return one or other
    total = Hours()
    total.add(one)
    total.add(other)
    return total


def _hours(answers: Mapping[str, list[VectorRow]]) -> dict[TenantName, Hours]:
    found: dict[TenantName, Hours] = {}
    for name in vars(Hours()):
        for row in answers.get(name, []):
            tenant = _tenant_of(row.labels)
            hours = found.setdefault(tenant, Hours())
            setattr(hours, name, (getattr(hours, name) or 0.0) + row.value)
    return found


def _missing(digest: Digest, twice: list[str], *, has_nameless: bool) -> Iterator[str]:
    """Values that are missing in the digest or may be wrong. `twice`: nodes that several targets scraped."""
    if twice:
        nodes = shorten(render_names(twice), REASON_MAX)
        yield (
            f"possibly some hours of {nodes}: several targets scraped one exporter, so only the larger value counts; "
            "scrape each exporter once"
        )
    if has_nameless:
        yield (
            "whether an exporter was scraped twice, so that its hours count twice: some series lack the label node; "
            "set it in Prometheus (alerts/prometheus.example.yaml)"
        )
    without = [tenant for tenant, hours in digest.tenants.items() if hours.held and hours.energy_kwh is None]
    if without:
        yield f"energy of {len(without)} of {len(digest.tenants)} tenants: their GPUs have no energy counter"
    if not digest.holders and digest.total.idle > 1.0:
        yield "holders: allocation:gpu_share:part is not recorded; load alerts/rules"
    if not digest.total.cost and not digest.total.unpriced:
        yield "money: tenant:gpu_cost:rate is not recorded; load alerts/rules"
    elif digest.total.unpriced:
        yield f"money: {digest.total.unpriced:.0f} GPU-hours have no price (alerts/prices.example.yaml)"


def _parts(since_s: float, ago: float) -> Iterator[_PeriodPart]:
    end = ago + since_s
    while ago < end:
        yield _PeriodPart(ago, min(DAY_S, end - ago))
        ago += DAY_S


def _tenant_of(labels: Mapping[str, str]) -> TenantName:
    return TenantName(*(labels.get(label, "") for label in TenantName._fields))


def _add_causes(causes: dict[tuple[TenantName, str], float], rows: list[VectorRow]) -> None:
    for row in rows:
        key = (_tenant_of(row.labels), row.labels.get("cause", ""))
        causes[key] = causes.get(key, 0.0) + row.value


def _add_holders(idle: dict[HolderName, IdleHolder], rows: list[VectorRow]) -> None:
    for row in rows:
        name = holder_name(row.labels)
        before = idle[name].idle if name in idle else 0.0
        idle[name] = IdleHolder(name, title(name, users_id_of(row.labels)), _owner_of(row.labels), before + row.value)


def _owner_of(labels: Mapping[str, str]) -> str:
    """The user if Slurm names one, else a team or a workload."""
    person = "/".join(part for part in (labels.get("user", ""), labels.get("account", "")) if part)
    return person or labels.get("team", "") or labels.get("workload", "")
