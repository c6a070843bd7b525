"""Runs Slurm's commands in a clean environment, and turns their failures into a source's errors."""

from __future__ import annotations

import re
from collections.abc import Sequence

from gpu_exporter.agent.attribution.source import CommandFailed, SlowSource, SourceError
from gpu_exporter.common import commands
from gpu_exporter.common.slurm import commands as slurm_commands

NO_NODE = re.compile(r"Invalid node name|^Node .* not found")
MAX_ANSWER = 16 * 1024 * 1024  # some 5,000 jobs of `squeue --json`; before 23.02 it prints jobs of the whole cluster


def run(command: Sequence[str], timeout_s: float, limit: int = MAX_ANSWER) -> str:
    """Returns the output of a command. Raises SourceError: SlowSource after the timeout, or CommandFailed."""
    try:
        done = slurm_commands.run(command, timeout_s, limit)
    except commands.NotFound as exc:
        raise SourceError(f"{exc}, or pass --no-attribution.slurm") from exc
    except commands.TooSlow as exc:
        raise SlowSource(str(exc)) from exc
    except commands.CommandError as exc:
        raise SourceError(str(exc)) from exc
    if done.status != 0:
        hint = "; name this node with --attribution.slurm.node" if NO_NODE.search(done.reason) else ""
        raise CommandFailed(f"{command[0]} ended with status {done.status}: {done.reason}{hint}", done.out)
    return done.out
