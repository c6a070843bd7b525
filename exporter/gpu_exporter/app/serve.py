"""The daemon: start everything, wait for a signal, end within a second."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.process_collector import ProcessCollector

from gpu_exporter.app.agent import Agent
from gpu_exporter.exposition.files import write_atomically
from gpu_exporter.exposition.publisher import Publisher
from gpu_exporter.exposition.series import Series
from gpu_exporter.exposition.server import HttpServer
from gpu_exporter.model import Family, MetricType

log = logging.getLogger(__name__)
PROCESS_REFRESH_S = 5.0
FIRST_CYCLE_S = 10.0  # a driver that hangs at its start must not keep the file from saying so
SOCKET_NAME = "gpu-exporter.sock"


class ProcessSeries:
    """process_* as prometheus_client tells them, read now and then, so that no scrape touches /proc."""

    def __init__(self) -> None:
        self._collector = ProcessCollector(registry=CollectorRegistry())
        self.series: list[Series] = []

    def refresh(self) -> None:
        fresh: list[Series] = []
        for metric in self._collector.collect():
            kind: MetricType = "counter" if metric.type == "counter" else "gauge"
            for sample in metric.samples:
                family = Family(sample.name, kind, metric.documentation)
                fresh.append(Series(family, (), [((), sample.value)]))
        self.series = fresh


def stop_on_signal() -> threading.Event:
    """An event that SIGTERM and SIGINT set."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    return stop


def repeat(tick: Callable[[], None], each_s: float, stop: threading.Event) -> None:
    """Call `tick` every `each_s` until `stop`."""
    while not stop.is_set():
        tick()
        stop.wait(each_s)


def serve(agent: Agent, address: str, telemetry_path: str, state_directory: Path | None) -> bool:
    """Serve until a signal. Returns false when a driver call hangs, so that the process must end by force.

    Raises ValueError, OSError when the address cannot be listened on.
    """
    process = ProcessSeries()
    publisher = Publisher(agent.build_view, agent.version, lambda: process.series)
    socket_path = state_directory / SOCKET_NAME if state_directory is not None else None
    server = HttpServer(address, publisher, agent.readiness, telemetry_path, socket_path)
    agent.start()
    server.start()
    log.info("serving on %s (port %d), metrics at %s", address, server.port, telemetry_path)
    repeat(process.refresh, PROCESS_REFRESH_S, stop_on_signal())
    server.stop()
    return agent.stop()


def write_textfiles(agent: Agent, path: Path, interval_s: float) -> bool:
    """Keep a textfile fresh until a signal, without HTTP. Returns as `serve` does.

    Without process_* series: node_exporter publishes its own under these names, and refuses a second one.
    The file of a run before stays until the first cycle is complete, so that no restart leaves some GPUs out of it.
    """
    publisher = Publisher(agent.build_view, agent.version)
    agent.start()
    log.info("writing %s each %g s", path, interval_s)
    failing = False

    def tick() -> None:
        nonlocal failing
        try:
            write_atomically(path, publisher.body("prometheus"))
            failing = False
        except OSError as exc:
            if not failing:
                log.error("%s: %s; the old file stays and ages", path, exc)
            failing = True

    stop = stop_on_signal()
    deadline = time.monotonic() + FIRST_CYCLE_S
    while not (agent.is_complete() or stop.is_set() or time.monotonic() > deadline):
        stop.wait(0.02)
    repeat(tick, interval_s, stop)
    return agent.stop()
