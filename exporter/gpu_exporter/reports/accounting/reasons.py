"""Explains the difference between an account's GPU-seconds in sacct and in the exporters' series.

Slurm counts the elapsed time of a run for each gres/gpu. An exporter counts the holder's share of each GPU until the
node has released the GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from gpu_exporter.common.slurm.hostlist import parse_names
from gpu_exporter.reports.jobs.model import SlurmRun

EPILOG_S = 5.0  # Slurm 24.11.5 reports some ends to the node so late; a longer epilog of the site stays in the rest
ROUNDED = 0.2  # seconds squared: variance of a run's length by two whole-second dates, of which one in ten differs
SIGMAS = 3.0


class TimeReason(NamedTuple):
    """One reason for the difference, with its GPU-seconds: negative if Slurm counts more."""

    name: str
    text: str
    gpu_seconds: float


@dataclass(slots=True)
class AccountTime:
    """The GPU-seconds of an account.

    - `recorded`: by sacct. `held`: by the exporters.
    - `suspended`: time of suspended runs. Such runs keep their GPUs, but Slurm does not count the time.
    - `parts`: for MIG instances, shards and MPS, the exporters' time minus Slurm's.
    - `unseen`: time of runs on nodes that had no exporter at that time.
    - `runs`: number of runs. `gpus`: the sum of their GPUs. `squares`: the sum of the squares of their GPUs.
    """

    recorded: float = 0.0
    held: float = 0.0
    suspended: float = 0.0
    parts: float = 0.0
    unseen: float = 0.0
    runs: int = 0
    gpus: float = 0.0
    squares: float = 0.0

    def add(self, run: SlurmRun, unseen: float = 0.0, *, is_new: bool = True) -> None:
        """Adds a run from sacct, or one part of a run. `unseen`: the share of its time without an exporter, 0 to 1.
        `is_new`: false if another part of this run was added before.
        """
        self.recorded += run.gpus * run.elapsed_s
        self.suspended += run.gpus * suspended_s(run)
        self.unseen += unseen * run.gpus * (run.elapsed_s + suspended_s(run))
        if is_new:
            self.runs, self.gpus, self.squares = self.runs + 1, self.gpus + run.gpus, self.squares + run.gpus**2

    @property
    def difference(self) -> float:
        return self.held - self.recorded

    def reasons(self) -> list[TimeReason]:
        """Lists the reasons. Whole seconds and epilogs are limited to their largest possible effect. The last reason is
        the rest.
        """
        found = [
            TimeReason("suspended", "suspended jobs keep their GPUs; sacct omits this time", self.suspended),
            TimeReason("parts", "sacct counts a MIG instance as 1, shards and MPS as 0", self.parts),
            TimeReason("unseen", "no exporter ran on the node at that time", 0.0 - self.unseen),
        ]
        rest = self.difference - sum(reason.gpu_seconds for reason in found)
        noise = SIGMAS * math.sqrt(ROUNDED * self.squares)
        rounded = min(max(rest, -noise), noise)
        epilog = min(max(rest - rounded, 0.0), EPILOG_S * self.gpus)
        rest -= rounded + epilog
        each = f": {rest / self.gpus:+.1f} s for each GPU of a run" if self.gpus else ""
        found += [
            TimeReason("whole_seconds", "sacct shows times in whole seconds", rounded),
            TimeReason("epilog", f"the node frees GPUs after the epilog (at most {EPILOG_S:.0f} s a run)", epilog),
            TimeReason("rest", f"not explained{each}", rest),
        ]
        return found


def suspended_s(run: SlurmRun) -> float:
    """Returns the seconds for which the run kept its GPUs while it was suspended."""
    return max(0.0, (run.end or run.start) - run.start - run.elapsed_s)


class SeenNodes:
    """Knows when each node had an exporter: from its first to its last sample. A gap in between counts as seen, because
    an exporter that returns also counts the time of its absence. Node names are compared without their domain.
    """

    def __init__(self, seen: Mapping[str, tuple[float, float]]) -> None:
        """`seen`: by node name, the first and the last sample in Unix seconds."""
        self._seen = {_short(node): times for node, times in seen.items()}
        self.is_of_slurm = False  # whether any node of a run is among them

    def unseen(self, run: SlurmRun) -> float:
        """Returns the share of the run's time that no exporter could count, 0 to 1: the mean over the run's nodes."""
        end = run.end if run.end is not None else run.start + run.elapsed_s
        unseen = list(self._unseen(run.nodes, run.start, end))
        return sum(unseen) / len(unseen) if unseen else 0.0

    def _unseen(self, nodes: str, start: float, end: float) -> Iterator[float]:
        try:
            names = parse_names(nodes)
        except ValueError:  # a list that was cut
            return
        for name in names:
            first, last = self._seen.get(_short(name), (math.inf, math.inf))
            self.is_of_slurm = self.is_of_slurm or first < math.inf
            seen_s = max(0.0, min(end, last) - max(start, first))
            yield 1.0 - (seen_s / (end - start) if end > start else 1.0)


def _short(node: str) -> str:
    return node.partition(".")[0].lower()
