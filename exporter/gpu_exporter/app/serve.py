"""The daemon: start everything, wait for a signal, end within a second."""

from __future__ import annotations

import logging
import queue
import signal
import threading
import time
from collections.abc import Callable, Collection
from enum import Enum
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.process_collector import ProcessCollector

from gpu_exporter.app.agent import Agent
from gpu_exporter.exposition.publisher import Publisher
from gpu_exporter.exposition.series import Series
from gpu_exporter.exposition.site import ExporterSite
from gpu_exporter.files import write_atomically
from gpu_exporter.model.metrics import Family, MetricType
from gpu_exporter.threads import start
from gpu_exporter.web.server import HttpServer

log = logging.getLogger(__name__)
PROCESS_REFRESH_S = 5.0
FIRST_CYCLE_S = 10.0  # a driver that hangs at its start must not keep the file from saying so
LAST_TICK_S = 0.5  # for the tick that a signal finds at work; one that needs longer ends with the process
SOCKET_NAME = "gpu-exporter.sock"


class ProcessSeries:
    """process_* as prometheus_client reports them, read now and then, so that no scrape touches /proc."""

    def __init__(self) -> None:
        self._collector = ProcessCollector(registry=CollectorRegistry())
        self.series = self._read()  # the first scrape has them too

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


class Ended(Enum):
    """How a run came to its end."""

    CLEAN = "clean"
    HUNG = "a driver call hangs, so the process must end by force"
    CHANGED = "the driver was replaced, so a new process must take over"


def stop_on_signal() -> threading.Event:
    """An event that SIGTERM and SIGINT set."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    return stop


def hold_signals() -> None:
    """Until `release_on_signal` these two, which end a process by default, mean nothing."""
    for number in (signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def release_on_signal(agent: Agent) -> None:
    """SIGUSR1 releases the driver, SIGHUP reopens it; in a thread, since a driver call may hang.

    The thread is there before the signals: when one arrives, the host may have none left.
    """
    actions = {signal.SIGUSR1: agent.devices.release, signal.SIGHUP: agent.devices.take}
    arrived: queue.SimpleQueue[int] = queue.SimpleQueue()  # put() may interrupt itself

    def act() -> None:
        while True:
            try:
                actions[signal.Signals(arrived.get())]()
            except Exception:  # a fault of ours must not make the next signal mean nothing
                log.exception("a request by signal failed")

    start(threading.Thread(target=act, name="signal", daemon=True))
    for number in actions:
        signal.signal(number, lambda number, _: arrived.put(number))


def stop_on_change(agent: Agent, stop: threading.Event) -> threading.Event:
    """An event that is set when `stop` is, and when the driver was replaced under us."""
    either = threading.Event()

    def wait(event: threading.Event) -> None:
        event.wait()
        either.set()

    for event in (stop, agent.driver.replaced):
        start(threading.Thread(target=wait, args=(event,), name="stop", daemon=True))
    return either


def _end(agent: Agent, stop: threading.Event) -> Ended:
    """`stop` was somebody's wish, which a replaced driver does not overrule."""
    clean = agent.stop()
    if agent.driver.replaced.is_set() and not stop.is_set():
        return Ended.CHANGED
    return Ended.CLEAN if clean else Ended.HUNG


def repeat(tick: Callable[[], object], each_s: float, stop: threading.Event) -> None:
    """Call `tick` every `each_s` until `stop`."""
    while not stop.is_set():
        tick()
        stop.wait(each_s)


def repeat_aside(tick: Callable[[], object], each_s: float, stop: threading.Event) -> None:
    """`repeat` in a thread of its own: whatever a tick waits for, the program ends soon after `stop`.

    Raises what ended the ticks.
    """
    faults: list[BaseException] = []

    def run() -> None:
        try:
            repeat(tick, each_s, stop)
        except BaseException as exc:
            faults.append(exc)
            stop.set()

    thread = threading.Thread(target=run, name="cycle", daemon=True)
    start(thread)
    stop.wait()
    thread.join(LAST_TICK_S)
    if faults:
        raise faults[0]


def serve(
    agent: Agent,
    address: str,
    telemetry_path: str,
    state_directory: Path | None,
    socket_mode: int = 0o660,
    web_config: Path | None = None,
    hosts: Collection[str] = (),
) -> Ended:
    """Serve until a signal, or until the driver was replaced.

    Raises ValueError, OSError when the address cannot be listened on.
    """
    process = ProcessSeries()
    publisher = Publisher(agent.view, agent.version, lambda: process.series, agent.node.history)
    socket_path = state_directory / SOCKET_NAME if state_directory is not None else None
    site = ExporterSite(publisher, agent.readiness, telemetry_path, hosts)
    server = HttpServer(address, site, socket_path, socket_mode, web_config)
    agent.start()
    stop = stop_on_signal()
    release_on_signal(agent)
    either = stop_on_change(agent, stop)
    server.start()  # the last thread: what answers that it is ready has started everything
    log.info("serving on %s (port %d), metrics at %s", address, server.port, telemetry_path)
    repeat(process.refresh, PROCESS_REFRESH_S, either)
    server.stop()
    return _end(agent, stop)


def write_textfiles(agent: Agent, path: Path, interval_s: float) -> Ended:
    """Keep a textfile fresh without HTTP. Ends and returns as `serve` does.

    Without process_* series: node_exporter publishes its own under these names, and refuses a second one.
    The file of a run before stays until the first cycle is complete, so that no restart leaves some GPUs out of it.
    """
    publisher = Publisher(agent.view, agent.version)
    agent.start()
    log.info("writing %s every %g s", path, interval_s)
    failing = False

    def tick() -> None:
        nonlocal failing
        try:
            write_atomically(path, publisher.body("prometheus"))
            failing = False
        except OSError as exc:
            if not failing:
                log.error("%s: %s; the old file remains and becomes stale", path, exc)
            failing = True

    stop = stop_on_signal()
    release_on_signal(agent)
    either = stop_on_change(agent, stop)
    deadline = time.monotonic() + FIRST_CYCLE_S
    while not (agent.is_complete() or either.is_set() or time.monotonic() > deadline):
        either.wait(0.1)
    repeat(tick, interval_s, either)
    return _end(agent, stop)
