"""Runs `slurm-collector`, alone or inside the reconciler: this process asks slurmctld, so that no node has to."""

from __future__ import annotations

import functools
import logging
import threading
from pathlib import Path

from prometheus_client import CollectorRegistry

from gpu_exporter.agent.attribution.slurm import commands as slurm_commands
from gpu_exporter.agent.slurm_collector.collector import MAX_ANSWER, CollectorRun, SlurmCollector, Slurmctld
from gpu_exporter.agent.slurm_collector.command_line import CommandLine
from gpu_exporter.agent.slurm_collector.rest import Rest
from gpu_exporter.agent.slurm_collector.site import CollectorMetrics, CollectorSite
from gpu_exporter.common.address import Address
from gpu_exporter.common.clock import SYSTEM_CLOCK
from gpu_exporter.common.exits import Exit
from gpu_exporter.common.service import repeat, repeat_aside, stop_on_signal
from gpu_exporter.common.tasks import Task
from gpu_exporter.common.threads import start
from gpu_exporter.common.web.own_metrics import OwnMetrics
from gpu_exporter.common.web.server import HttpServer, Site

log = logging.getLogger(__name__)
TASK = "slurm-collector"
EACH_S = 90.0  # as `slurm-collector --interval` by default


def collect(
    slurmrestd: tuple[Address, Path] | None,
    directory: Path | None,
    each_s: float,
    address: str,
    web_config: Path | None,
    *,
    once: bool,
) -> int:
    """Collects until a signal, or one round with `once`. Returns the exit code. Raises OSError, ValueError.

    `slurmrestd`: the address of slurmrestd and the file with its token; None to use Slurm's commands.
    """
    run, task, own = _build(slurmrestd, directory, each_s), Task(TASK), OwnMetrics("gpu_exporter")
    if once:
        return Exit.DONE if run() else Exit.NO_DATA
    own.tasks.add(task)
    if address:
        server = HttpServer(address, CollectorSite(run, own=own), web_config=web_config)
        own.note_server(server)
        run.is_open = server.is_open
        server.start()
    repeat_aside(run, each_s, stop_on_signal(), task)
    return Exit.DONE


def _build(slurmrestd: tuple[Address, Path] | None, directory: Path | None, each_s: float) -> CollectorRun:
    slurmctld: Slurmctld = CommandLine(functools.partial(slurm_commands.run, limit=MAX_ANSWER))
    if slurmrestd is not None:
        slurmctld = Rest(*slurmrestd, MAX_ANSWER)
    return CollectorRun(SlurmCollector(slurmctld, SYSTEM_CLOCK, each_s), directory, SYSTEM_CLOCK)


def collect_beside(
    host: Site, registry: CollectorRegistry, address: str, web_config: Path | None
) -> tuple[HttpServer, Task]:
    """Runs a collector inside another process, in a separate thread, until the process ends. Returns server and task.

    Serves `host` and the collector's answers at `address`. `registry`: gets the collector's own metrics. Raises
    OSError, ValueError.
    """
    run, task = _build(None, None, EACH_S), Task(TASK)
    registry.register(CollectorMetrics(run))
    server = HttpServer(address, CollectorSite(run, host), web_config=web_config)
    run.is_open = server.is_open
    server.start()
    forever = threading.Event()
    start(threading.Thread(target=repeat, args=(run, EACH_S, forever, task), name=TASK, daemon=True))
    return server, task
