"""Evidence from any PromQL API: Prometheus, Thanos, Mimir, VictoriaMetrics.

Few instant queries a cycle. The first asks for long idle runs only, so the answer is as short as the list of suspects;
the others are restricted to these holders.
"""

from __future__ import annotations

import json
import math
import re
import urllib.parse
from collections.abc import Callable, Collection
from typing import Any, NamedTuple, TypeAlias

from gpu_exporter.reconciler.coverage import coverage
from gpu_exporter.reconciler.direct import fetch_text
from gpu_exporter.reconciler.evidence import (
    KEY_LABELS,
    Evidence,
    EvidenceError,
    Gathered,
    HolderName,
    UnitEvidence,
    holder_name,
    is_hidden,
    refuse_renamed,
)

MAX_ROWS = 20_000
MAX_MATCHER = 100_000  # characters; a longer one is left out and the rows are compared here
Series: TypeAlias = frozenset[tuple[str, str]]  # every label of one series


class Row(NamedTuple):
    """One element of an instant vector."""

    labels: dict[str, str]
    value: float


def parse_vector(text: str, query: str) -> list[Row]:
    """The rows of an answer of /api/v1/query. Raises EvidenceError that names the query."""
    try:
        answer: Any = json.loads(text)
        if answer.get("status") != "success":
            raise EvidenceError(f"query failed: {answer.get('error', 'no reason given')}: {query}")
        data = answer["data"]
        if data["resultType"] != "vector":
            raise EvidenceError(f"expected a vector, not a {data['resultType']}: {query}")
        rows = [Row(dict(row["metric"]), float(row["value"][1])) for row in data["result"]]
        rows = [row for row in rows if math.isfinite(row.value)]  # no number is no evidence
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as exc:
        raise EvidenceError(f"not an answer of a PromQL API ({exc!r}): {query}") from exc
    if answer.get("warnings") or answer.get("isPartial"):
        raise EvidenceError(f"the answer is partial, so nothing is decided on it: {query}")
    if len(rows) > MAX_ROWS:
        raise EvidenceError(f"{len(rows)} rows are more than {MAX_ROWS}: narrow --source.matcher: {query}")
    return rows


class PromQLSource:
    """Asks one PromQL API."""

    def __init__(
        self,
        url: str,
        candidate_after_s: float,
        window_s: float,
        read_wall: Callable[[], float],
        matcher: str = "",
        fetch: Callable[[str], str] = fetch_text,
    ) -> None:
        """`matcher`: label matchers that every selector gets, e.g. `cluster="a"`."""
        self._url = url.rstrip("/")
        self._candidate_after_s = candidate_after_s
        self._window_s = window_s
        self._read_wall = read_wall
        self._matcher = matcher
        self._fetch = fetch

    def read_evidence(self, marked: Collection[HolderName] = ()) -> Evidence:
        """Holders with a long idle run, and those in `marked`."""
        wall = self._read_wall()
        runs = self._query(self._suspects())
        clusters = {row.labels.get("cluster", "") for row in runs}
        if len(clusters) > 1:  # one pod name may exist in each of them
            raise EvidenceError(f"clusters {sorted(clusters)} in one answer: choose one with --source.matcher")
        names = {holder_name(row.labels) for row in runs if not is_hidden(row.labels)} | self._resolve(marked)
        exporters = self._count("gpu_exporter_build_info")
        if not exporters:
            matcher = f"{{{self._matcher}}}"
            raise EvidenceError(f"no gpu-exporter series match {matcher}: see --source.matcher")
        allocations = self._count("gpu_allocation_info")
        hidden = self._count("gpu_allocation_info", 'identity="hidden"', "count by (uuid, mig_uuid) ")
        if not names:
            return Evidence(wall, (), exporters, allocations, hidden=hidden)
        wanted = _restrict(names)
        units = self._by_unit("gpu_allocation_idle_run_seconds", wanted, min)
        starts = self._by_unit("gpu_allocation_start_timestamp_seconds", wanted, max)
        shares = self._coverage(wanted)
        witnesses = self._by_unit("gpu_allocation_idle_run_witnesses", wanted, min)
        infos = self._query(self._select("gpu_allocation_info", wanted))
        nodes = "node, instance"
        ages = {
            self._place(row.labels): row.value
            for row in self._query(
                f"time() - min by ({nodes}) ({self._select('gpu_exporter_last_sample_timestamp_seconds')})"
            )
        }
        intervals = {
            self._place(row.labels): row.value
            for row in self._query(f"min by ({nodes}) ({self._select('gpu_exporter_sample_interval_seconds')})")
        }
        holders: dict[HolderName, Gathered] = {}
        for row in infos:
            name, key = holder_name(row.labels), _unit_key(row.labels)
            if name not in names:
                continue
            holders.setdefault(name, Gathered()).add(
                row.labels,
                UnitEvidence(
                    node=row.labels.get("node") or row.labels.get("instance", ""),
                    gpu=row.labels.get("gpu", ""),
                    uuid=row.labels.get("uuid", ""),
                    mig=row.labels.get("mig", ""),
                    start_wall=starts.get(key),
                    idle_run_s=units.get(key),
                    sample_age_s=ages.get(self._place(row.labels)),
                    coverage=shares.get(key),
                    witnesses=int(witnesses[key]) if key in witnesses else None,
                    sample_interval_s=intervals.get(self._place(row.labels), 1.0),
                ),
            )
        for row in self._query(self._select("gpu_allocation_holder_units", wanted)):
            name = holder_name(row.labels)
            if name in holders:
                holders[name].count(row.value)
        found = tuple(holder.evidence(name) for name, holder in holders.items())
        return Evidence(wall, found, exporters, allocations, hidden=hidden)

    def _count(self, metric: str, wanted: str = "", distinct: str = "") -> int:
        selected = self._select(metric, wanted)
        rows = self._query(f"count({distinct}({selected}))" if distinct else f"count({selected})")
        return int(rows[0].value) if rows else 0

    def _suspects(self) -> str:
        return f"{self._select('gpu_allocation_idle_run_seconds')} >= {self._candidate_after_s:g}"

    def _coverage(self, wanted: str) -> dict[tuple[str, ...], float | None]:
        """Observed share of the time held, over the window: of each series, and of those of one unit the smallest.

        Series by series as in the alert: two targets that speak for one unit began at different times, and the growth
        of one says nothing of the other. A target that ended within the window counts with what it saw of it.
        Prometheus's own samples say how far back each is known.
        """
        held, held_in = self._totals("gpu_allocation_held_seconds_total", wanted)
        observed, observed_in = self._totals("gpu_allocation_observed_seconds_total", wanted)
        shares: dict[tuple[str, ...], float | None] = {}
        for series in held.keys() | observed.keys():
            share = None
            if series in held and series in observed:
                increases = held_in.get(series, 0.0), observed_in.get(series, 0.0)
                share = coverage(self._window_s, held[series], observed[series], *increases)
            key = _unit_key(dict(series))
            before = shares.get(key, share)
            shares[key] = None if share is None or before is None else min(share, before)
        return shares

    def _totals(self, metric: str, wanted: str) -> tuple[dict[Series, float], dict[Series, float]]:
        """A counter, and how much it grew over the window, by series."""
        selected = self._select(metric, wanted)
        growth = {_series(row.labels): row.value for row in self._query(f"increase({selected}[{self._window_s:g}s])")}
        return growth | {_series(row.labels): row.value for row in self._query(selected)}, growth

    def _by_unit(
        self, metric: str, wanted: str, worst: Callable[[float, float], float]
    ) -> dict[tuple[str, ...], float]:
        """The value of each unit; of two series for one unit the more careful one."""
        values: dict[tuple[str, ...], float] = {}
        for row in self._query(self._select(metric, wanted)):
            key = _unit_key(row.labels)
            values[key] = worst(values[key], row.value) if key in values else row.value
        return values

    def _resolve(self, marked: Collection[HolderName]) -> set[HolderName]:
        """The names, and Slurm's own ids of the jobs among them that are written as 3010_1 or 3011+1."""
        names = set(marked)
        for name in marked:
            if name.scheduler != "slurm" or name.name.isdigit():
                continue
            kind = ("array_job_id", "array_task_id") if "_" in name.name else ("het_job_id", "het_job_offset")
            parts = re.split("[_+]", name.name)
            matchers = ",".join(_match_any(label, {part}) for label, part in zip(kind, parts, strict=False))
            names |= {holder_name(row.labels) for row in self._query(self._select("gpu_allocation_info", matchers))}
        return names

    def _select(self, metric: str, wanted: str = "") -> str:
        return f"{metric}{{{','.join(part for part in (self._matcher, wanted) if part)}}}"

    @staticmethod
    def _place(labels: dict[str, str]) -> tuple[str, str]:
        return labels.get("node", ""), labels.get("instance", "")

    def _query(self, query: str) -> list[Row]:
        parameters = urllib.parse.urlencode({"query": query})
        rows = parse_vector(self._fetch(f"{self._url}/api/v1/query?{parameters}"), query)
        for row in rows:
            refuse_renamed(row.labels, query)
        return rows


def _unit_key(labels: dict[str, str]) -> tuple[str, ...]:
    return tuple(labels.get(label, "") for label in KEY_LABELS)


def _series(labels: dict[str, str]) -> Series:
    """The labels that identify a series within its metric. Functions of PromQL drop the name."""
    return frozenset((label, value) for label, value in labels.items() if label != "__name__")


def _restrict(names: set[HolderName]) -> str:
    """A matcher that keeps at least the series of these holders; the rows are compared exactly afterwards."""
    pods = {name.name for name in names if name.scheduler == "kubernetes"}
    jobs = {name.name for name in names if name.scheduler == "slurm"}
    if pods and jobs:
        return ""  # a matcher cannot say "or" over two labels
    return _match_any("pod", pods) if pods else _match_any("job_id", jobs)


def _match_any(label: str, values: set[str]) -> str:
    """A matcher for any of `values`, literally: quoted for RE2, then for a PromQL string; "" when it grows too long."""
    quoted = (re.sub(r"([^A-Za-z0-9_-])", r"\\\1", value) for value in sorted(values))
    pattern = "|".join(quoted).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'{label}=~"{pattern}"' if len(pattern) < MAX_MATCHER else ""
