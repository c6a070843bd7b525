"""Reads a report from the history of a site, day by day."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple, Protocol

from gpu_exporter.common.errors import AnswerError
from gpu_exporter.common.plain import REASON_MAX, shorten
from gpu_exporter.reports.history.asking import History, WindowSpan
from gpu_exporter.reports.usage.attribute import Cluster, attribute, find_suspects
from gpu_exporter.reports.usage.cells import WINDOW_S, Cell, HolderId
from gpu_exporter.reports.usage.clusters import ClusterNames, name_nodes
from gpu_exporter.reports.usage.collect import CellSums, HolderFacts
from gpu_exporter.reports.usage.model import GpuHours, UsageReport
from gpu_exporter.reports.usage.prices import Prices
from gpu_exporter.reports.usage.site import (
    EXPORTERS,
    SiteExporters,
    cluster_part,
    describe,
    describe_nothing,
    look_at_site,
)
from gpu_exporter.reports.usage.sources.gauges import GaugeReader
from gpu_exporter.reports.usage.sources.kube import KubeReader, PodFacts, PodName
from gpu_exporter.reports.usage.sources.witnesses import GpuWindow, deny_idle, key_of

CHUNK_S = 86400.0
SERIES_MAX = 1500  # of a day that is read in one part
NEW = 3.0  # a series of a short pod costs as much as so many hours of a series that lasts, in time and memory


class ReportWatch(Protocol):
    """Shows how far a report is."""

    def begin(self, days: Collection[WindowSpan], series: int, new: float) -> None: ...

    def end_chunk(self) -> None: ...


class KubeRefusal(AnswerError):
    """A query about the series of kube-state-metrics failed."""


class _KubeDay(NamedTuple):
    """The answers of KubeReader about a part of the period: of read_requests (two), read_offers, read_most, read_bare
    and read_pods.
    """

    requests: Mapping[tuple[PodName, str], dict[float, float]]
    blind: Collection[tuple[str, float]] | None
    offers: Mapping[tuple[str, str], float]
    most: Mapping[tuple[str, str], float]
    bare: Collection[tuple[str, str]]
    pods: Mapping[PodName, PodFacts]


class _Chunk(NamedTuple):
    cells: list[Cell]
    known: Cluster | None
    facts: Mapping[HolderId, HolderFacts]


class Gatherer:
    """Reads one period from one PromQL API. Every method may raise AnswerError."""

    def __init__(
        self, history: History, matcher: str, prices: Prices, floor: float, team_label: str, watch: ReportWatch
    ) -> None:
        """`floor`: engine activity that counts as zero, one of model.FLOORS. `team_label`: of kube_pod_labels."""
        self._history, self._matcher, self._prices = history, matcher, prices
        self._floor, self._watch = floor, watch
        self._sparse: set[str] = set()  # exporters with samples too far apart for proof
        self._unclear: set[str] = set()  # names of nodes that several clusters have
        self._facts_refusal = ""  # reason why owners and teams are not read
        self._kube = KubeReader(history, cluster_part(matcher), team_label)

    def read(self, site: SiteExporters, span: WindowSpan, *, has_trend: bool = True) -> UsageReport:
        """The report of these windows, which begin and end at full hours."""
        start, end = span.start, span.end
        if not site.exporters:
            raise AnswerError(f"{self._history.address}: {describe_nothing(site)}")
        days = list(parts(span, site.series, site.new))
        earlier = WindowSpan(start - (end - start), start, WINDOW_S)
        has_trend = has_trend and look_at_site(self._history, self._matcher, earlier).covers(site)
        before = list(parts(earlier, site.series, site.new)) if has_trend else []
        self._watch.begin([*days, *before], site.series, site.new)
        report = UsageReport(start, end, currency=self._prices.currency if self._prices else "")
        try:
            collector = self._collect(site, days)
        except KubeRefusal as exc:
            site = site.without_kube(str(exc))
            self._watch.begin([*days, *before], site.series, site.new)
            collector = self._collect(site, days)
        collector.fill(report)
        report.sources = list(describe(site, self._sparse, self._facts_refusal, has_phases=self._kube.has_phases))
        report.floor = self._floor
        if site.own:
            report.missing.append(
                f"data of gpu-exporter, which covers only {site.own:,} GPUs, or a part of the period: "
                "`gpu-exporter digest` reports it"
            )
        if self._unclear:
            nodes = shorten(", ".join(sorted(self._unclear)), REASON_MAX)
            report.missing.append(
                f"pods that only kube-state-metrics shows on {nodes}: several clusters have nodes of these names; set "
                "the label cluster on its series too"
            )
        if not report.lines and not report.capacity:
            raise AnswerError(f"{self._history.address}: {', '.join(site.exporters)} has no samples in this period")
        if before:
            report.before = self._read_before(site, before)
        return report

    def _read_before(self, site: SiteExporters, days: list[WindowSpan]) -> GpuHours | None:
        """The hours of the period before, None if the source has not seen all of it."""
        earlier = UsageReport(days[0].start, days[-1].end)
        try:
            self._collect(site, days, is_brief=True).fill(earlier)
        except KubeRefusal:
            return None
        if earlier.covered is None or earlier.covered.seconds < earlier.covered.span:
            return None
        return earlier.total

    def _collect(self, site: SiteExporters, days: list[WindowSpan], *, is_brief: bool = False) -> CellSums:
        collector = CellSums(self._prices.of)
        if site.has_kube:
            with _about_kube():
                self._kube.look(WindowSpan(days[0].start, days[-1].end, WINDOW_S))

        def read(day: WindowSpan) -> _Chunk:
            cells, kube = list[Cell](), list[_KubeDay]()

            def read_kube() -> None:
                if site.has_kube:
                    kube.append(self._read_kube(day, has_facts=not is_brief))

            def read_cells() -> None:
                cells.extend(self._read_cells(site, day, is_brief=is_brief))

            # The server works for one of them while the other computes.
            for _ in self._history.ask_ahead(lambda task: task(), (read_cells, read_kube)):
                pass
            chunk = self._read_cluster(cells, kube[0], day) if kube else _Chunk(cells, None, {})
            self._history.end_chunk()
            return chunk

        with without_garbage_collector():
            # One worker keeps their order. It reads the next part, which takes much memory, while this thread adds up.
            for chunk in self._history.ask_ahead(read, days, workers=1, ahead=1):
                collector.add(attribute(chunk.cells, chunk.known))
                collector.know(chunk.facts)
                collector.end_chunk(chunk.known.offers if chunk.known is not None else None)
                self._watch.end_chunk()
        return collector

    def _read_cells(self, site: SiteExporters, day: WindowSpan, *, is_brief: bool) -> list[Cell]:
        """The cells of all exporters. A GPU that several exporters show counts once, idle only if none saw work."""
        seen: set[GpuWindow] = set()
        at_work: set[GpuWindow] = set()
        found: list[Cell] = []
        nodes: Mapping[tuple[str, str], str] = {}
        for name in site.exporters:
            reader = GaugeReader(self._history, EXPORTERS[name](), self._matcher, self._floor, is_brief=is_brief)
            cells = list(reader.read(day))
            if reader.is_sparse:
                self._sparse.add(name)
            if site.has_kube and (addresses := {c.unit.node for c in cells if _is_address(c.unit.node)}):
                nodes = name_nodes(
                    {(c.unit.cluster, c.unit.node) for c in cells}, self._kube.read_nodes(addresses, day)
                )
            earlier = frozenset(seen)
            for cell in cells:
                key = key_of(cell)
                if key in earlier:
                    if cell.used + cell.low > 0.0:
                        at_work.add(key)
                    continue
                seen.add(key)
                node = nodes.get((cell.unit.cluster, cell.unit.node))
                found.append(cell if node is None else cell._replace(unit=cell.unit._replace(node=node)))
        return deny_idle(found, at_work)

    def _read_kube(self, day: WindowSpan, *, has_facts: bool) -> _KubeDay:
        """The data of kube-state-metrics. `has_facts`: also owners and teams. They are not asked again after a query
        failed.
        """
        with _about_kube():
            requests, blind = self._kube.read_requests(day)
            offers, most, bare = self._kube.read_offers(day), self._kube.read_most(day), self._kube.read_bare(day)
        pods: dict[PodName, PodFacts] = {}
        if has_facts and not self._facts_refusal:
            try:
                pods = self._kube.read_pods(day)
            except AnswerError as exc:
                self._facts_refusal = str(exc)
        return _KubeDay(requests, blind, offers, most, bare, pods)

    def _read_cluster(self, cells: list[Cell], kube: _KubeDay, day: WindowSpan) -> _Chunk:
        """Adds what kube-state-metrics knows, with the clusters of the exporters."""
        requests, offers = kube.requests, kube.offers
        with _about_kube():
            completed = self._kube.read_completed(find_suspects(cells, requests), day)
        theirs = {*((pod.cluster, node) for pod, node in requests), *offers}
        names = ClusterNames(theirs, cells)
        of_node, of_pods = names.of_node, names.of_pods(requests, completed)
        ours: dict[tuple[PodName, str], dict[float, float]] = {}
        for (pod, node), windows in requests.items():
            if (cluster := of_node(pod.cluster, node)) is not None:
                of_pod = ours.setdefault((pod._replace(cluster=cluster), node), windows)
                for start, seconds in windows.items() if of_pod is not windows else ():
                    of_pod[start] = of_pod.get(start, 0.0) + seconds
        unclear = {place for name in names.unclear for place in names.nodes_of(name)}
        self._unclear |= names.unclear
        if kube.blind is not None:
            blind = {(name, start) for cluster, start in kube.blind for name in names.of_cluster(cluster)}
        else:  # no pod requested a GPU, or nobody showed it
            blind = set() if offers else {(cell.unit.cluster, cell.start) for cell in cells}
        known = Cluster(
            ours,
            {pod._replace(cluster=of_pods[pod]): of for pod, of in completed.items() if pod in of_pods},
            _rename(offers, of_node),
            _rename(kube.most, of_node),
            blind,
            {*_rename(dict.fromkeys(kube.bare, 0.0), of_node), *unclear},
        )
        of_pods = names.of_pods(requests, kube.pods)
        facts = {
            HolderId(of_pods[pod], "kubernetes", pod.namespace, pod.name): HolderFacts(of.workload, of.team)
            for pod, of in kube.pods.items()
            if pod in of_pods
        }
        return _Chunk(cells, known, facts)


def parts(span: WindowSpan, series: int, new: float, most: int = SERIES_MAX) -> Iterator[WindowSpan]:
    """The span in parts of a day, oldest first. With many series they are shorter, so that a part fits into memory.

    `series`: series at a moment. `new`: those that begin in an hour. `most`: series of a day that fit into memory.
    """
    hours = max(1.0, CHUNK_S * min(1.0, most / max(1.0, load_of(series, new))) // WINDOW_S)
    start = span.start
    while start < span.end:
        end = min(span.end, start + hours * WINDOW_S)
        yield span._replace(start=start, end=end)
        start = end


def load_of(series: int, new: float) -> float:
    """Returns the number of lasting series that cost as much."""
    return series + NEW * new


@contextmanager
def _about_kube() -> Iterator[None]:
    """Marks the errors of queries without which the report is possible."""
    try:
        yield
    except AnswerError as exc:
        raise KubeRefusal(str(exc)) from exc


@contextmanager
def without_garbage_collector() -> Iterator[None]:
    """The collector needs a quarter of the time of a large report, and finds nothing: a part has no cycles."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _is_address(node: str) -> bool:
    return node.replace(".", "").isdigit() or ":" in node


def _rename(
    values: Mapping[tuple[str, str], float], of_node: Callable[[str, str], str | None]
) -> dict[tuple[str, str], float]:
    """The values by node, with the clusters of the exporters, without nodes whose cluster is not clear."""
    found: dict[tuple[str, str], float] = {}
    for (theirs, node), value in values.items():
        if (cluster := of_node(theirs, node)) is not None:
            found[cluster, node] = found.get((cluster, node), 0.0) + value
    return found
