"""Servers with the history of a simulated cluster."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from tests.testbed import history, history_series, history_worlds
from tests.testbed.history_series import Dcgm, dcgm, kube_state
from tests.testbed.node import program as go_program
from tests.testbed.processes import Processes, fetch, free_port, wait_for
from tests.testbed.programs import MODULES, fresh_entry
from tests.testbed.servers import Prometheus

Line = Mapping[str, Any]
LARGE = Dcgm(("DCGM_FI_PROF_GR_ENGINE_ACTIVE", "DCGM_FI_DEV_GPU_UTIL"))


def write_blocks(directory: Path, *series: Iterable[Line]) -> None:
    """Write series into `directory`/data, in which a Prometheus begins."""
    (directory / "data").mkdir(parents=True, exist_ok=True)
    _feed(str(directory / "data"), series)


def _feed(where: str, series: Iterable[Iterable[Line]]) -> None:
    with subprocess.Popen(
        [go_program("blocks"), where], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    ) as writer:
        assert writer.stdin is not None
        for line in chain.from_iterable(series):
            writer.stdin.write(json.dumps(line) + "\n")
    assert writer.returncode == 0, f"blocks {where}: {writer.returncode}"


def prometheus(processes: Processes, directory: Path, program: str = "prometheus") -> Prometheus:
    """A server of the blocks in `directory`, which scrapes nothing, and which keeps them: by default, a server deletes
    what is 15 days older than its newest block. `program`: also prometheus-3.
    """
    path = program if program == "prometheus" else go_program(program)
    return Prometheus(processes, directory, {}, program=path, flags=["--storage.tsdb.retention.time=100y"])


def large_history(directory: Path, end: float = history_worlds.END) -> None:
    """The blocks of history_worlds.large(end=end) with the families of LARGE and kube-state-metrics; the last one made is kept.

    The copy in `directory` shares the files: no server changes a file of a block.
    """
    sources = [Path(str(each.__file__)) for each in (history, history_series, history_worlds)]
    sources += [Path(__file__), MODULES / "prometheus" / "main.go"]
    key = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]
    go_program("blocks")  # before the lock of the cache, which it takes too
    with fresh_entry(f"history-{key}-{end:.0f}") as (target, making):
        if making is not None:
            cluster = history_worlds.large(end=end)
            write_blocks(making, dcgm(cluster, LARGE), kube_state(cluster))
            for old in target.parent.glob("history-*"):
                shutil.rmtree(old)
            (making / "data").rename(target)
        shutil.copytree(target, directory / "data", copy_function=_link)


def _link(source: str, copy: str) -> None:
    try:
        os.link(source, copy)
    except OSError:  # another file system
        shutil.copyfile(source, copy)


class VictoriaMetrics:
    """A server with these series."""

    def __init__(self, processes: Processes, directory: Path, *series: Iterable[Line]) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        self.running = processes.start(
            [
                go_program("victoria-metrics"),
                f"-storageDataPath={directory / 'victoria-metrics'}",
                f"-httpListenAddr={self.url.removeprefix('http://')}",
                "-retentionPeriod=100y",
                "-search.latencyOffset=0s",
            ]
        )
        wait_for(lambda: fetch(f"{self.url}/health"), "VictoriaMetrics to be ready")
        _feed(f"{self.url}/api/v1/write", series)
        fetch(f"{self.url}/internal/force_flush")  # before it, queries do not see the samples
