"""Runs the daemon: starts everything, waits for a signal, ends within a second."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Collection
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.process_collector import ProcessCollector

from gpu_exporter.agent.exposition.catalog import WEB_CONFIG_SUCCESS
from gpu_exporter.agent.exposition.publisher import Publisher
from gpu_exporter.agent.exposition.series import Series
from gpu_exporter.agent.exposition.site import ExporterSite
from gpu_exporter.agent.runtime.agent import Agent
from gpu_exporter.common.files import write_atomically
from gpu_exporter.common.model.metrics import Family, MetricType
from gpu_exporter.common.service import follow_signals, repeat, stop_on_signal
from gpu_exporter.common.tasks import Task
from gpu_exporter.common.threads import start
from gpu_exporter.common.web.server import HttpServer

log = logging.getLogger(__name__)
PROCESS_REFRESH_S = 5.0
FIRST_CYCLE_S = 10.0  # if the driver hangs at the start, the file is still written and contains the error
SOCKET_NAME = "gpu-exporter.sock"


class ProcessSeries:
    """The process_* series of prometheus_client. They are read every PROCESS_REFRESH_S, so that no
    scrape reads /proc.
    """

    def __init__(self) -> None:
        self._collector = ProcessCollector(registry=CollectorRegistry())
        self.series = self._read()  # the first scrape has these series too

    def refresh(self) -> None:
        self.series = self._read()

    def _read(self) -> list[Series]:
        fresh: list[Series] = []
        for metric in self._collector.collect():
            kind: MetricType = "counter" if metric.type == "counter" else "gauge"
            for sample in metric.samples:
                family = Family(sample.name, kind, metric.documentation)
                fresh.append(Series(family, (), [((), sample.value)]))
        return fresh


def hold_signals() -> None:
    """Ignores SIGUSR1 and SIGHUP until `release_on_signal` handles them. By default, they would end the process."""
    for number in (signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def release_on_signal(agent: Agent) -> None:
    """Releases the driver on SIGUSR1, and opens it again on SIGHUP.

    Another thread handles SIGTERM, because these driver calls may hang.
    """
    agent.tasks.add(follow_signals({signal.SIGUSR1: agent.devices.release, signal.SIGHUP: agent.devices.take}))


def stop_on_change(agent: Agent, stop: threading.Event) -> threading.Event:
    """Returns an event that is set when `stop` is set or the driver was replaced."""
    either = threading.Event()

    def wait(event: threading.Event) -> None:
        event.wait()
        either.set()

    for event in (stop, agent.driver.replaced):
        start(threading.Thread(target=wait, args=(event,), name="stop", daemon=True))
    return either


def _end(agent: Agent, stop: threading.Event) -> bool:
    """Stops the agent. Returns whether a new process must take over.

    Returns False if `stop` is set, because a user or the system then requested the end.
    """
    agent.stop()
    return agent.driver.replaced.is_set() and not stop.is_set()


def serve(
    agent: Agent,
    address: str,
    telemetry_path: str,
    state_directory: Path | None,
    socket_mode: int = 0o660,
    web_config: Path | None = None,
    hosts: Collection[str] = (),
) -> bool:
    """Serves until a signal comes, or until the driver was replaced.

    Returns True if the driver was replaced, so that a new process must take over. Raises ValueError, and OSError if the
    server cannot listen on the address.
    """
    process, task = ProcessSeries(), Task("process")

    def list_own() -> list[Series]:
        uses = server.uses_web_config()
        return [*process.series, *([] if uses is None else [Series(WEB_CONFIG_SUCCESS, (), [((), float(uses))])])]

    publisher = Publisher(agent.view, agent.version, list_own, agent.node.history)
    socket_path = state_directory / SOCKET_NAME if state_directory is not None else None
    site = ExporterSite(publisher, agent.readiness, telemetry_path, hosts)
    server = HttpServer(address, site, socket_path, socket_mode, web_config)
    agent.tasks.add(task, *server.tasks)
    agent.start()
    stop = stop_on_signal()
    release_on_signal(agent)
    either = stop_on_change(agent, stop)
    server.start()  # the last thread: when the server answers "ready", everything has started
    log.info("serving on %s (port %d), metrics at %s", address, server.port, telemetry_path)

    def tick() -> None:
        agent.tasks.watch()
        process.refresh()

    repeat(tick, PROCESS_REFRESH_S, either, task)
    server.stop()
    return _end(agent, stop)


def write_textfiles(agent: Agent, path: Path, interval_s: float) -> bool:
    """Writes the metrics to a textfile at intervals, without HTTP. Ends and returns as `serve` does.

    The file has no process_* series, because node_exporter publishes its own series under these names and refuses
    duplicates. The file of the previous run remains until the first cycle is complete, so that no GPU is missing after
    a restart.
    """
    publisher = Publisher(agent.view, agent.version)
    agent.start()
    log.info("writing %s every %g s", path, interval_s)
    failing, task = False, Task("textfile")
    agent.tasks.add(task)

    def tick() -> None:
        nonlocal failing
        agent.tasks.watch()
        try:
            write_atomically(path, publisher.body("prometheus"))
            failing = False
        except OSError as exc:
            if not failing:
                log.error("cannot write %s: %s; the old file remains and becomes stale", path, exc)
            failing = True

    stop = stop_on_signal()
    release_on_signal(agent)
    either = stop_on_change(agent, stop)
    deadline = time.monotonic() + FIRST_CYCLE_S
    while not (agent.is_complete() or either.is_set() or time.monotonic() > deadline):
        either.wait(0.1)
    repeat(tick, interval_s, either, task)
    return _end(agent, stop)
