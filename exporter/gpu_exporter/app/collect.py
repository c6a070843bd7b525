"""`slurm-collector`: one question to slurmctld in place of one from each node."""

from __future__ import annotations

import functools
from pathlib import Path

from gpu_exporter.app.serve import repeat_aside, stop_on_signal
from gpu_exporter.attribution import slurm_commands
from gpu_exporter.clock import SYSTEM_CLOCK
from gpu_exporter.cluster.collector import MAX_ANSWER, Collector, CollectorRun
from gpu_exporter.cluster.site import CollectorSite
from gpu_exporter.exits import Exit
from gpu_exporter.web.server import HttpServer


def collect(directory: Path | None, each_s: float, address: str, web_config: Path | None, *, once: bool) -> int:
    """Until a signal, or one round; the exit code. Raises OSError, ValueError."""
    collector = Collector(functools.partial(slurm_commands.run, limit=MAX_ANSWER), SYSTEM_CLOCK, each_s)
    run = CollectorRun(collector, directory, SYSTEM_CLOCK, is_open=bool(address) and web_config is None)
    if once:
        return Exit.DONE if run() else Exit.NO_DATA
    if address:
        HttpServer(address, CollectorSite(run), web_config=web_config).start()
    repeat_aside(run, each_s, stop_on_signal())
    return Exit.DONE
