"""Metrics of a process and of its port, for the programs that publish with prometheus_client."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gpu_exporter.common.tasks import Tasks
from gpu_exporter.common.web.server import HttpServer


class OwnMetrics(Collector):
    """The metrics of a process about its tasks, and about the web configuration of its port."""

    def __init__(self, prefix: str) -> None:
        self.tasks = Tasks()
        self._prefix = prefix
        self._server: HttpServer | None = None

    def note_server(self, server: HttpServer) -> None:
        """Publishes the state of this port too."""
        self._server = server
        self.tasks.add(*server.tasks)

    def collect(self) -> Iterator[Metric]:
        failures = CounterMetricFamily(
            f"{self._prefix}_task_failures",
            "Internal errors, by task. The task skipped one turn and continued.",
            labels=["task"],
        )
        for task, count in self.tasks.failures().items():
            failures.add_metric([task], count)
        yield failures
        uses = GaugeMetricFamily(
            f"{self._prefix}_web_config_success",
            "State of --web.config.file: 1 if the whole file is in use, 0 if the process ignores its last "
            "change or a part of it, e.g. because the port would have less protection. Absent without the "
            "file.",
        )
        if self._server is not None and (is_current := self._server.uses_web_config()) is not None:
            uses.add_metric([], is_current)
        yield uses
