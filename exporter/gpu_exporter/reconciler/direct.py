"""Evidence from the exporters themselves, without a Prometheus.

The idle-run gauge carries the history of activity. For coverage one counter sample a minute is kept per allocation
(coverage.py).
"""

from __future__ import annotations

import http.client
import math
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeAlias
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from gpu_exporter.reconciler.coverage import Counters
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

MAX_EXPORTERS = 200
FETCHES = 16  # at once: nodes that do not answer must not make the answers of others old
Key: TypeAlias = tuple[str, ...]
# Of two rows for one allocation the more careful value counts: less idleness, less seen, a later start.
MORE_CAREFUL: dict[str, Callable[[float, float], float]] = {
    "gpu_allocation_idle_run_seconds": min,
    "gpu_allocation_idle_run_witnesses": min,
    "gpu_allocation_observed_seconds_total": min,
    "gpu_allocation_held_seconds_total": max,
    "gpu_allocation_start_timestamp_seconds": max,
    "gpu_allocation_holder_units": max,
}


def complete_url(text: str) -> str:
    """`host:9836` and `http://host:9836` to the address of the metrics."""
    url = text if "://" in text else f"http://{text}"
    return url.rstrip("/") + "/metrics" if urlsplit(url).path in ("", "/") else url


def fetch_text(url: str, timeout_s: float = 10.0) -> str:
    """GET a metrics page. Raises EvidenceError."""
    try:
        if urlsplit(url).scheme not in ("http", "https"):
            raise EvidenceError(f"{url}: expected http:// or https://")
        with urllib.request.urlopen(url, timeout=timeout_s) as answer:  # noqa: S310 - the scheme is checked above
            body: bytes = answer.read()
    except urllib.error.HTTPError as exc:
        reason = exc.read(300).decode("utf-8", "replace").strip()
        raise EvidenceError(f"{url}: HTTP status {exc.code}: {reason}") from exc
    except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError) as exc:
        raise EvidenceError(f"{url}: {exc}") from exc
    return body.decode("utf-8", "replace")


class ExporterSource:
    """Reads every exporter once a cycle."""

    def __init__(
        self,
        urls: Sequence[str],
        window_s: float,
        read_wall: Callable[[], float],
        fetch: Callable[[str], str] = fetch_text,
    ) -> None:
        """`window_s`: coverage is wanted over this time. Raises ValueError for too many exporters."""
        if len(urls) > MAX_EXPORTERS:
            raise ValueError(f"{len(urls)} exporters are more than {MAX_EXPORTERS}: use --source.prometheus")
        self._urls = [complete_url(url) for url in urls]
        self._window_s = window_s
        self._read_wall = read_wall
        self._fetch = fetch
        self._counters: dict[Key, Counters] = {}

    def read_evidence(self, marked: Collection[HolderName] = ()) -> Evidence:
        """Every holder of every exporter, `marked` or not."""
        wall = self._read_wall()
        pages: list[_Page] = []
        problems: list[str] = []
        with ThreadPoolExecutor(max_workers=FETCHES) as pool:
            fetched = [pool.submit(self._read_page, url) for url in self._urls]
        for future in fetched:
            try:
                pages.append(future.result())
            except EvidenceError as exc:  # its holders are not seen; units seen elsewhere no longer add up to theirs
                problems.append(str(exc))
        if not pages:
            raise EvidenceError("; ".join(problems[:3]))
        self._forget(pages, wall)
        holders: dict[HolderName, Gathered] = {}
        hidden: set[tuple[str, str]] = set()
        for page in pages:
            for key, series in page.allocations.items():
                if is_hidden(series.labels) or is_hidden(series.info):
                    hidden.add((series.labels.get("uuid", ""), series.labels.get("mig_uuid", "")))
                    continue
                holder = holders.setdefault(holder_name(series.labels), Gathered())
                holder.add(series.info, self._unit(page, key, series, wall))
                count = series.values.get("gpu_allocation_holder_units")
                if count is not None:
                    holder.count(count)
        allocations = sum(len(page.allocations) for page in pages)
        found = tuple(holder.evidence(name) for name, holder in holders.items())
        return Evidence(wall, found, len(pages), allocations, tuple(problems), len(hidden))

    def _read_page(self, url: str) -> _Page:
        text = self._fetch(url)
        return _Page(url, text, self._read_wall())

    def _unit(self, page: _Page, key: Key, series: _Allocation, wall: float) -> UnitEvidence:
        values = series.values
        return UnitEvidence(
            node=page.node,
            gpu=series.labels.get("gpu", ""),
            uuid=series.labels.get("uuid", ""),
            mig=series.labels.get("mig", ""),
            start_wall=values.get("gpu_allocation_start_timestamp_seconds"),
            idle_run_s=values.get("gpu_allocation_idle_run_seconds"),
            sample_age_s=None if page.last_sample is None else page.wall - page.last_sample,
            coverage=self._coverage(page.node, key, series, wall),
            witnesses=_whole(values.get("gpu_allocation_idle_run_witnesses")),
            sample_interval_s=page.sample_interval_s,
        )

    def _coverage(self, node: str, key: Key, series: _Allocation, wall: float) -> float | None:
        held = series.values.get("gpu_allocation_held_seconds_total")
        observed = series.values.get("gpu_allocation_observed_seconds_total")
        if held is None or observed is None:
            return None
        return self._counters.setdefault((node, *key), Counters()).cover(self._window_s, held, observed, wall)

    def _forget(self, pages: Sequence[_Page], wall: float) -> None:
        """Drop the samples of holders that are gone, and keep those of an exporter that does not answer now."""
        nodes = {page.node for page in pages}
        keys = {(page.node, *key) for page in pages for key in page.allocations}
        self._counters = {
            key: value
            for key, value in self._counters.items()
            if key in keys or (key[0] not in nodes and wall - value.last_wall < self._window_s)
        }


@dataclass(slots=True)
class _Allocation:
    labels: dict[str, str]
    info: dict[str, str] = field(default_factory=dict)
    values: dict[str, float] = field(default_factory=dict)


class _Page:
    """One exporter's metrics, sorted by allocation."""

    def __init__(self, url: str, text: str, wall: float) -> None:
        self._url = url
        self.node = urlsplit(url).netloc
        self.wall = wall
        self.last_sample: float | None = None
        self.sample_interval_s = 1.0
        self.allocations: dict[Key, _Allocation] = {}
        try:
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    if math.isfinite(sample.value):
                        self._take(sample.name, dict(sample.labels), sample.value)
        except ValueError as exc:
            raise EvidenceError(f"{url}: not in the Prometheus text format: {exc}") from exc

    def _take(self, name: str, labels: dict[str, str], value: float) -> None:
        if name == "gpu_exporter_last_sample_timestamp_seconds":
            self.last_sample = value
        elif name == "gpu_exporter_sample_interval_seconds":
            self.sample_interval_s = value
        elif name.startswith("gpu_allocation_"):
            refuse_renamed(labels, self._url)
            key = tuple(labels.get(label, "") for label in KEY_LABELS)
            allocation = self.allocations.setdefault(key, _Allocation(labels))
            if name == "gpu_allocation_info":
                allocation.info = labels
            elif name in allocation.values and name in MORE_CAREFUL:
                allocation.values[name] = MORE_CAREFUL[name](allocation.values[name], value)
            else:
                allocation.values[name] = value


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
