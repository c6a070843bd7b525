"""Runs the daemon: starts everything, waits for a signal, ends within a second."""

from __future__ import annotations

import ctypes
import errno
import gc
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
from gpu_exporter.common.model.metrics import Family
from gpu_exporter.common.notify import READY, WATCHDOG, notify
from gpu_exporter.common.service import follow_signals, repeat, stop_on_signal
from gpu_exporter.common.tasks import Task
from gpu_exporter.common.threads import start
from gpu_exporter.common.web.server import HttpServer

log = logging.getLogger(__name__)
PROCESS_REFRESH_S = 5.0
FIRST_CYCLE_S = 10.0  # if the driver hangs at the start, the file is still written and contains the error
GARBAGE_EACH = 5_000  # new objects, instead of Python's 700: fewer than two scrapes of 8 GPUs keep for a moment
M_ARENA_MAX, M_MMAP_THRESHOLD, M_TRIM_THRESHOLD = -8, -3, -1  # of mallopt (malloc.h of glibc)
KEEP_BYTES = 64 * 1024  # a larger block, such as a page of metrics, goes back to the kernel at once
SOCKET_NAME = "gpu-exporter.sock"


class ProcessSeries:
    """The process_* series of prometheus_client. Read every PROCESS_REFRESH_S, so that no scrape reads /proc."""

    def __init__(self) -> None:
        self._collector = ProcessCollector(registry=CollectorRegistry())
        self.series = self._read()  # the first scrape has these series too

    def refresh(self) -> None:
        self.series = self._read()

    def _read(self) -> list[Series]:
        fresh: list[Series] = []
        for metric in self._collector.collect():
            for sample in metric.samples:
                fresh.append(Series(Family(sample.name, metric.documentation), (), [((), sample.value)]))
        return fresh


def spare_garbage_collections() -> None:
    """Excludes what the start made from garbage collections, and makes them rarer.

    Otherwise a collection of all objects takes 14 to 22 ms, mostly within a scrape, which makes most new objects.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(GARBAGE_EACH)


def allocate_together() -> None:
    """Makes all threads allocate from one arena of glibc, which returns free memory. Call it before the first thread.

    By default, each thread gets an arena of its own, and memory that was freed in one does not serve the others. With
    some 20 threads, the process then grew by 5 MiB a day (docs/benchmarks.md). Python runs one thread at a time, so
    threads rarely wait for the arena.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # other C libraries have no arenas
        mallopt(M_ARENA_MAX, 1)
        mallopt(M_TRIM_THRESHOLD, KEEP_BYTES)
        mallopt(M_MMAP_THRESHOLD, KEEP_BYTES)


def hold_signals() -> None:
    """Ignores SIGUSR1 and SIGHUP until `release_on_signal` handles them. By default, they would end the process."""
    for number in (signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def release_on_signal(agent: Agent) -> None:
    """Releases the driver on SIGUSR1, and opens it again on SIGHUP."""
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
    spare_garbage_collections()
    server.start()  # the last thread: when the server answers "ready", everything has started
    log.info("serving on %s (port %d), metrics at %s", address, server.port, telemetry_path)
    notify(READY)

    def tick() -> None:
        notify(WATCHDOG)  # by this loop, which waits for no driver: a driver that hangs is no reason to restart
        agent.tasks.watch()
        process.refresh()

    repeat(tick, PROCESS_REFRESH_S, either, task)
    server.stop()
    return _end(agent, stop)


def write_textfiles(agent: Agent, path: Path, interval_s: float) -> bool:
    """Writes the metrics to a textfile at intervals, without HTTP. Ends and returns as `serve` does.

    Raises OSError if the file cannot be written at the start. Later, the exporter logs such an error, and tries again.
    The file has no process_* series, because node_exporter publishes its own under these names and refuses duplicates.
    The previous file remains until the first cycle is complete, so that no GPU is missing after a restart.
    """
    _try_to_write(path)
    publisher = Publisher(agent.view, agent.version)
    agent.start()
    log.info("writing %s every %g s", path, interval_s)
    failing, task = False, Task("textfile")
    agent.tasks.add(task)

    def tick() -> None:
        nonlocal failing
        notify(WATCHDOG)
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
    notify(READY)
    repeat(tick, interval_s, either, task)
    return _end(agent, stop)


def _try_to_write(path: Path) -> None:
    """Writes and removes an empty file beside `path`. Raises OSError if that fails, so that a unit without metrics does
    not look healthy.
    """
    probe = path.with_name(f".{path.name}.probe")
    try:
        write_atomically(probe, b"")
        probe.unlink()
    except OSError as exc:
        hint = "; add the directory to ReadWritePaths= of the systemd unit" if exc.errno == errno.EROFS else ""
        raise OSError(f"cannot write {path}: {exc.strerror}{hint}") from exc
