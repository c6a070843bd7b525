"""Identifies this process among the processes of a distributed training."""

from __future__ import annotations

import os
import sys
from typing import NamedTuple

from gpu_exporter_torch.report_rules import RANKS_MAX

# Of torchrun. Slurm's variables prove nothing: all processes of an sbatch script have them.
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


class Rank(NamedTuple):
    """The place of a process in its training. `rank`, `world_size`: in the whole training. `local_rank`,
    `local_world_size`: on this node, None if unknown.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int | None = None
    local_world_size: int | None = None

    @property
    def speaks(self) -> bool:
        """Whether this process prints the summary. Exactly one process on each node prints it."""
        return not self.local_rank if self.local_rank is not None else self.rank == 0


def find_rank() -> Rank:
    """Returns the rank of this process: from torch.distributed if initialized, or from the launcher's variables."""
    named = _read_variables()
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return named._replace(rank=distributed.get_rank(), world_size=distributed.get_world_size())
    return named


def _read_variables() -> Rank:
    rank, world, local, local_world = (_number(os.environ.get(name)) for name in VARIABLES)
    is_known = rank is not None and world is not None and rank < world
    return Rank(rank, world, local, local_world) if is_known and rank is not None and world is not None else Rank()


def _number(text: str | None) -> int | None:
    is_number = text is not None and text.isascii() and text.isdecimal() and len(text) < 10
    return int(text) if is_number and text is not None and int(text) <= RANKS_MAX else None
