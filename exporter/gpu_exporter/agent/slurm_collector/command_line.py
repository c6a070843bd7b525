"""Queries slurmctld with Slurm's own commands."""

from __future__ import annotations

from gpu_exporter.agent.attribution.slurm.controller import Run
from gpu_exporter.agent.attribution.slurm.parse import NodeRecord, SlurmConfig, parse_config
from gpu_exporter.agent.slurm_collector.answers import ClusterJob, parse_cluster_jobs, parse_cluster_nodes

TIMEOUT_S = 60.0
STATES = "RUNNING,CONFIGURING,SUSPENDED,STOPPED"


class CommandLine:
    """Queries slurmctld with Slurm's commands. `run`: runs one command, with a timeout in seconds."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def read_nodes(self) -> dict[str, NodeRecord]:
        return parse_cluster_nodes(self._run(("scontrol", "show", "node", "-d"), TIMEOUT_S))

    def read_jobs(self) -> list[ClusterJob]:
        return parse_cluster_jobs(self._run(("squeue", "--json", "-a", "--local", "-t", STATES), TIMEOUT_S))

    def read_config(self) -> SlurmConfig:
        return parse_config(self._run(("scontrol", "show", "config"), TIMEOUT_S))
