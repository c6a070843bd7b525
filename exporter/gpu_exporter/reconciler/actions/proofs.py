"""What must be proven before anything is taken back, asked of Alertmanager and of the PromQL API.

That its owner was warned, and for how long; that decisions of the same policy on holders of the same class have been
right; that somebody waits for such GPUs. What is not answered, or only in part, is no proof.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias
from urllib.parse import urlencode

from gpu_exporter.clock import Clock
from gpu_exporter.durations import format_duration
from gpu_exporter.fetch import MIB
from gpu_exporter.reconciler.evidence import EvidenceError, HolderName, holder_name
from gpu_exporter.reconciler.marks import parse_timestamp
from gpu_exporter.reconciler.vector import Row, parse_vector, restrict

ALERT = "GpuHolderIdle"  # what alerts/rules/owners.yaml sends to owners
FILTER_MAX = 4000  # characters: the whole address stays below 8 kB, which proxies allow
ANSWER_MAX = 4 * MIB
WITHIN_S = 5.0  # for each answer: the next cycle, which withdraws marks, waits for them
ASKED = {"active": "true", "silenced": "false", "inhibited": "false", "unprocessed": "false"}
RECORDS_KEEP_S = 600.0  # what the last two weeks say changes slowly, and costs the source the most
RUNNING_MIN = 0.9  # of the hours of actions.shadow_for: a reconciler was there
CLUSTER = re.compile(r'(?<![A-Za-z0-9_])cluster(?:=~|!~|!=|=)"(?:[^"\\]|\\.)*"')  # in matchers of PromQL
WAITED_S = 900.0
WAITED = "15m"  # pods or jobs have waited for so long
ENOUGH = 0.9  # of the evaluations in that time: while nobody waits, there is no sample


class Warned(NamedTuple):
    """The owner of a holder was warned, since then (Unix seconds), by these receivers of Alertmanager."""

    since_wall: float
    receivers: tuple[str, ...]


class Record(NamedTuple):
    """Decisions of one policy on one class of holders, and how many of them were regretted."""

    decisions: float
    regrets: float


RecordKey: TypeAlias = tuple[str, str]  # policy and class


class Fetch(Protocol):
    """GET, or POST of a form; an answer of at most so many bytes, within so many seconds. Raises EvidenceError."""

    def __call__(self, url: str, form: Mapping[str, str] | None, most_bytes: int, within_s: float) -> str: ...


class Proofs:
    """Asks for them. Every call raises EvidenceError."""

    def __init__(
        self,
        prometheus: str,
        alertmanager: str,
        filters: Sequence[str],
        reconcilers: str,
        matcher: str,
        shadow_s: float,
        rules_s: float,
        clock: Clock,
        fetch: Fetch,
        fetch_alerts: Fetch,
    ) -> None:
        """`filters`: further matchers of the alerts, as cluster="a". `reconcilers`: matchers of reconcilers' series.
        `matcher`: of the exporters' series; what it says of the cluster holds for all that is asked here.
        `shadow_s`: for how long there must have been a reconciler. `rules_s`: between two evaluations of the rules.
        """
        self._prometheus, self._alertmanager = prometheus.rstrip("/"), alertmanager.rstrip("/")
        self._cluster = [each[0] for each in CLUSTER.finditer(matcher)]
        self._filters = (f'alertname="{ALERT}"', 'audience="owner"', *self._cluster, *filters)
        self._is_pinned = any(CLUSTER.search(each) for each in self._filters)
        self._samples = math.floor(ENOUGH * WAITED_S / rules_s)
        self._reconcilers = ",".join([reconcilers, *self._cluster])
        self._shadow_s = shadow_s
        self._clock = clock
        self._fetch, self._fetch_alerts = fetch, fetch_alerts
        self._records: tuple[float, Mapping[RecordKey, Record]] | None = None

    def read_warnings(self, names: Collection[HolderName]) -> Mapping[HolderName, Warned]:
        """Of these, whose owner is being warned: by an alert that has a receiver, and that nobody silences."""
        found: dict[HolderName, Warned] = {}
        clusters: set[str] = set()
        for matchers in restrict(names, FILTER_MAX):
            query = urlencode(
                [*ASKED.items(), *(("filter", each) for each in (*self._filters, *matchers.split(",", 1)))]
            )
            url = f"{self._alertmanager}/api/v2/alerts?{query}"
            warned, seen = parse_alerts(self._fetch_alerts(url, None, ANSWER_MAX, WITHIN_S))
            found |= warned
            clusters |= seen
            _refuse_several(clusters, "--alertmanager.filter")
        if clusters - {""} and not self._is_pinned:  # of whichever cluster they are: a name may exist in several
            raise EvidenceError(
                f"alerts are of cluster {min(clusters)}: say that it is this one with --alertmanager.filter"
            )
        return found

    def read_records(self) -> Mapping[RecordKey, Record]:
        """By policy and class, what came of the decisions of the time that counts."""
        now = self._clock.monotonic()
        if self._records is None or now - self._records[0] > RECORDS_KEEP_S:
            self._records = now, self._ask_records()
        return self._records[1]

    def _ask_records(self) -> Mapping[RecordKey, Record]:
        span = format_duration(self._shadow_s)
        hours = self._shadow_s / 3600.0
        there = self._ask(
            f"count by (cluster) (count_over_time(group by (cluster) (gpu_reconciler_cycles_total"
            f"{{{self._reconcilers}}})[{span}:1h]) >= {RUNNING_MIN * hours:g})"
        )
        clusters = {row.labels.get("cluster", "") for row in there}
        if not clusters:
            days = f"{self._shadow_s / 86_400:g} days"
            raise EvidenceError(f"no reconciler has been seen for {RUNNING_MIN:.0%} of the last {days}")
        counted = [
            self._ask(f"sum by (cluster, policy, class) (increase({family}{{{self._reconcilers}}}[{span}]))", clusters)
            for family in ("gpu_reconciler_underused_total", "gpu_reconciler_regrets_total")
        ]
        decisions, regrets = (
            {(row.labels.get("policy", ""), row.labels.get("class", "")): row.value for row in rows} for rows in counted
        )
        return {key: Record(value, regrets.get(key, value)) for key, value in decisions.items()}

    def read_demand(self, names: Collection[HolderName]) -> Mapping[HolderName, Mapping[str, float]]:
        """By holder, the pools that its GPUs are of, and how many GPUs of each have been waited for all of WAITED."""
        labels = "cluster, scheduler, namespace, pod, job_id"
        demand: defaultdict[HolderName, dict[str, float]] = defaultdict(dict)
        clusters: set[str] = set()
        for of_these in restrict(names):
            matcher = ",".join([of_these, *self._cluster])
            rows = self._ask(
                f"group by ({labels}, pool) (allocation:gpu_pool:info{{{matcher}}}) * on (cluster, pool) "
                f"group_left () (min_over_time(pool:gpu_pending_gpus:sum[{WAITED}]) >= 1 "
                f"and count_over_time(pool:gpu_pending_gpus:sum[{WAITED}]) >= {self._samples})",
                clusters,
            )
            for row in rows:
                clusters.add(row.labels.get("cluster", ""))
                demand[holder_name(row.labels)][row.labels.get("pool", "")] = row.value
        return demand

    def _ask(self, query: str, clusters: Collection[str] = ()) -> list[Row]:
        """The rows, all of one cluster, which is one of these where there are any."""
        rows = parse_vector(
            self._fetch(f"{self._prometheus}/api/v1/query", {"query": query}, ANSWER_MAX, WITHIN_S), query
        )
        _refuse_several({row.labels.get("cluster", "") for row in rows} | set(clusters), "--source.matcher")
        return rows


def parse_alerts(text: str) -> tuple[Mapping[HolderName, Warned], set[str]]:
    """The answer of /api/v2/alerts, and the clusters in it. Raises EvidenceError.

    Of two alerts on one holder the younger counts.
    """
    try:
        rows: list[Any] = json.loads(text)
        alerts = [_parse_alert(row) for row in rows]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as exc:
        raise EvidenceError(f"not an answer of Alertmanager's /api/v2/alerts ({type(exc).__name__})") from exc
    found: dict[HolderName, Warned] = {}
    for name, _, warned in alerts:
        if warned is not None and (name not in found or warned.since_wall > found[name].since_wall):
            found[name] = warned
    return found, {cluster for _, cluster, _ in alerts}


def _parse_alert(row: Any) -> tuple[HolderName, str, Warned | None]:
    """Whom it is about, of which cluster; None for one that nobody gets, or whose start is not a time."""
    labels: Mapping[str, str] = row["labels"]
    since = parse_timestamp(str(row["startsAt"]))
    receivers = tuple(str(each["name"]) for each in row["receivers"])
    is_sent = row["status"]["state"] == "active" and bool(receivers) and since is not None
    warned = Warned(since or 0.0, receivers) if is_sent else None
    return holder_name(labels), str(labels.get("cluster", "")), warned


def _refuse_several(clusters: set[str], setting: str) -> None:
    if len(clusters) > 1:
        raise EvidenceError(f"clusters {sorted(clusters)} in one answer: choose one with {setting}")
