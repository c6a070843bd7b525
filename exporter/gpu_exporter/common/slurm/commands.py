"""Slurm's commands with a clean environment, for agent, collector and reconciler."""

from __future__ import annotations

import os
from collections.abc import Sequence

from gpu_exporter.common import commands

# Slurm's commands inherit only these variables. Others, such as SQUEUE_USERS or SLURM_CLUSTERS, hide jobs or select
# another cluster; a job's environment may set them.
KEPT = ("SLURM_CONF", "SLURM_JWT", "SACK_SOCKET", "HOME", "LD_LIBRARY_PATH")


def run(command: Sequence[str], timeout_s: float, limit: int) -> commands.Done:
    """Runs a Slurm command to its end, with at most `limit` bytes of output. Raises commands.CommandError."""
    return commands.run(command, environment(), timeout_s, limit)


def environment() -> dict[str, str]:
    """Environment for Slurm's commands: times as Unix seconds, messages in English. `run` adds PATH."""
    kept = {name: os.environ[name] for name in KEPT if name in os.environ}
    return {**kept, "SLURM_TIME_FORMAT": "%s", "LC_ALL": "C.UTF-8"}
