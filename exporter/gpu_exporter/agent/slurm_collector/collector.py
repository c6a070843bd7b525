"""Asks slurmctld for the data of all nodes in rounds, and keeps an answer (a picture) for each node."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from gpu_exporter.agent.attribution.slurm.collected import NODE_NAME
from gpu_exporter.agent.attribution.slurm.parse import Job, JobGpus, NodeRecord, SlurmConfig
from gpu_exporter.agent.attribution.slurm.picture import Picture, render_picture
from gpu_exporter.agent.attribution.source import SourceError
from gpu_exporter.agent.slurm_collector.answers import ClusterJob
from gpu_exporter.common.clock import Clock
from gpu_exporter.common.files import READABLE, write_atomically

log = logging.getLogger(__name__)
MAX_ANSWER = 512 * 1024 * 1024  # 45,000 jobs as 24.11 prints them
PRIVATE = 0o640  # used if PrivateData hides jobs or users: readable only by owner and group
BETWEEN_S = 5.0  # the nodes' records may lack the GPUs of a job that began this recently


class Slurmctld(Protocol):
    """A way to query slurmctld. Each method raises SourceError."""

    def read_nodes(self) -> dict[str, NodeRecord]:
        """Returns every node that has GPUs, by name."""

    def read_jobs(self) -> list[ClusterJob]:
        """Returns every job that runs, or is configured, stopped or suspended while it has its nodes."""

    def read_config(self) -> SlurmConfig:
        """Returns the configuration. Call it after the other two."""


class SlurmCollector:
    """Reads the cluster's nodes, jobs and configuration in every round."""

    def __init__(self, slurmctld: Slurmctld, clock: Clock, each_s: float) -> None:
        """`each_s`: seconds between two rounds; every answer contains it."""
        self._slurmctld = slurmctld
        self._clock = clock
        self._each_s = each_s

    def collect(self) -> dict[str, Picture]:
        """Asks slurmctld. Returns the picture of each node that has GPUs, by node name. Raises SourceError."""
        asked = self._clock.wall()
        # The node's name becomes a file name.
        nodes = {name: node for name, node in self._slurmctld.read_nodes().items() if NODE_NAME.fullmatch(name)}
        jobs: dict[str, dict[str, tuple[Job, JobGpus]]] = {node: {} for node in nodes}
        for job, by_node in self._slurmctld.read_jobs():
            for node in by_node.keys() & jobs.keys():
                gpus = by_node[node]
                jobs[node][job.job_id] = (job, gpus)
                if job.start is not None and job.start > asked - BETWEEN_S:
                    nodes[node] = _with(nodes[node], gpus)
        config = self._slurmctld.read_config()  # in each round, because PrivateData counts at once
        return {name: Picture(asked, self._each_s, config, node, jobs[name]) for name, node in nodes.items()}


def _with(node: NodeRecord, gpus: JobGpus) -> NodeRecord:
    """Returns the node record with these GPUs added to the GPUs in use."""
    used = node.used
    indexes = tuple(sorted({*used.indexes, *gpus.indexes}))
    return node._replace(used=used._replace(indexes=indexes, shared=tuple(sorted({*used.shared, *gpus.shared}))))


def write_answers(answers: Mapping[str, str], directory: Path, mode: int) -> None:
    """Writes NODE.json for each node. Raises OSError, also if all users can write to `directory`."""
    for name, text in answers.items():
        write_atomically(directory / f"{name}.json", text.encode(), mode)


WITHHELD = (
    "slurm.conf hides jobs or users (PrivateData), but this port is open: set basic_auth_users or client_auth_type "
    "in --web.config.file, or omit --web.listen-address"
)


class CollectorRun:
    """Runs one round at each call. Logs each new problem once.

    After a failed round the old answers remain, and their age grows.
    """

    def __init__(self, collector: SlurmCollector, directory: Path | None, clock: Clock) -> None:
        """`directory`: the directory for the files NODE.json; None if the answers are served only over HTTP."""
        self.is_open: Callable[[], bool] = lambda: False
        """Returns whether every client may read the port now. The web configuration file may change this. An open port
        serves no answer while PrivateData hides jobs or users.
        """
        self._is_private = False
        self._answers: Mapping[str, str] = {}
        self._collector = collector
        self._directory = directory
        self._clock = clock
        self._problem: str | None = None
        self.last_success_wall: float | None = None
        """End of the last round that gave an answer to at least one node (Unix seconds)."""
        self.rounds = 0
        self.failures = 0

    @property
    def is_withheld(self) -> bool:
        """Whether the port must not serve the present answers."""
        return self._is_private and self.is_open()

    @property
    def answers(self) -> Mapping[str, str]:
        """The newest answer for each node with GPUs, by name. Empty if the HTTP port must not serve answers."""
        return {} if self.is_withheld else self._answers

    def __call__(self) -> bool:
        """Runs one round. Returns whether it succeeded."""
        problem = ""
        try:
            pictures = self._collector.collect()
            # Set before the answers: otherwise a request in between could read private answers from an open port.
            self._is_private = any(picture.config.private & {"jobs", "users"} for picture in pictures.values())
            self._answers = {name: render_picture(picture) for name, picture in pictures.items()}
            if self._directory is not None:
                write_answers(self._answers, self._directory, PRIVATE if self._is_private else READABLE)
            if not self._answers:
                raise SourceError("no node has GPUs in slurm.conf (Gres=)")
            if self._directory is not None or not self.is_withheld:
                self.last_success_wall = self._clock.wall()
            if self.is_withheld:
                raise SourceError(f"no node gets an answer over HTTP: {WITHHELD}")
        except (SourceError, OSError) as exc:
            problem = str(exc) if self.is_withheld else f"the nodes get no new answers: {exc}"
        self.rounds += 1
        self.failures += bool(problem)
        if problem and problem != self._problem:
            log.warning("%s", problem)
        elif not problem and self._problem != "":
            log.info("Slurm answers: %d nodes with GPUs have data", len(self._answers))
        self._problem = problem
        return not problem
