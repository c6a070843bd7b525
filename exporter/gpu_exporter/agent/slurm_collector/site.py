"""Serves a collector's HTTP pages: the answer for each node, its own metrics, and probes."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from gpu_exporter.agent.attribution.slurm.collected import ANSWERS
from gpu_exporter.agent.slurm_collector.collector import WITHHELD, CollectorRun
from gpu_exporter.common.web.own_metrics import OwnMetrics
from gpu_exporter.common.web.request import Request
from gpu_exporter.common.web.server import TEXT, Reply, Site


class CollectorSite:
    """Serves the collector's pages. The health probe shows only that the HTTP server works.

    The metrics and the age of the answers show whether Slurm answers.
    """

    def __init__(self, run: CollectorRun, host: Site | None = None, own: OwnMetrics | None = None) -> None:
        """`host`: the site of the process in which the collector runs; this site answers all other requests.

        `own`: the metrics of the process, if it runs only the collector.
        """
        self._run = run
        self._host = host
        self._registry = CollectorRegistry()
        self._registry.register(CollectorMetrics(run))
        if own is not None:
            self._registry.register(own)

    def answer_at_once(self, request: Request) -> Reply | None:
        if request.path.startswith(ANSWERS):
            answer = self._run.answers.get(request.path.removeprefix(ANSWERS))
            if answer is not None:
                return Reply(200, "application/json", answer.encode())
            if self._run.is_withheld:
                return Reply(403, TEXT, f"{WITHHELD}\n".encode())
            return Reply(404, TEXT, b"no node with GPUs has this name\n")
        if self._host is not None:
            return self._host.answer_at_once(request)
        if request.path == "/metrics":
            return None
        if request.path == "/-/healthy":
            return Reply(200, TEXT, b"healthy\n")
        if request.path == "/-/ready":
            is_ready = bool(self._run.last_success_wall)
            return (
                Reply(200, TEXT, b"ready\n")
                if is_ready
                else Reply(503, TEXT, b"no round has had an answer for a node yet\n")
            )
        return Reply(404, TEXT, f"no such page; try /metrics or {ANSWERS}NODE\n".encode())

    def answer(self, request: Request) -> Reply:
        if self._host is not None:
            return self._host.answer(request)
        return Reply(200, CONTENT_TYPE_LATEST, generate_latest(self._registry))


class CollectorMetrics(Collector):
    """Metrics of the last round. The time of the last success is absent until a round had an answer for a node."""

    def __init__(self, run: CollectorRun) -> None:
        self._run = run

    def collect(self) -> Iterator[Metric]:
        name = "gpu_slurm_collector"
        success = GaugeMetricFamily(
            f"{name}_last_success_timestamp_seconds",
            "Unix time of the end of the last round that had an answer for a node.",
        )
        if self._run.last_success_wall is not None:
            success.add_metric([], self._run.last_success_wall)
        yield success
        yield GaugeMetricFamily(
            f"{name}_nodes", "Nodes with GPUs for which the collector has data.", value=len(self._run.answers)
        )
        rounds = CounterMetricFamily(f"{name}_rounds", "Rounds of requests to Slurm, by result.", labels=["result"])
        rounds.add_metric(["success"], self._run.rounds - self._run.failures)
        rounds.add_metric(["error"], self._run.failures)
        yield rounds
