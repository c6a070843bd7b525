"""Reads slurmctld's data about this node from the cluster's collector, which asks slurmctld for all nodes."""

from __future__ import annotations

import re
from collections.abc import Collection, Set
from pathlib import Path

from gpu_exporter.agent.attribution.slurm.controller import KnownJob, SlurmSnapshot
from gpu_exporter.agent.attribution.slurm.on_node.job_files import read_trusted
from gpu_exporter.agent.attribution.slurm.picture import parse_picture
from gpu_exporter.agent.attribution.source import SourceError
from gpu_exporter.common.address import Address
from gpu_exporter.common.clock import Clock
from gpu_exporter.common.fetch import FetchError, fetch_text

NODE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
READ_MAX = 4 * 1024 * 1024  # bytes; enough for a node with 5,000 jobs
AGE_MAX_S = 300.0  # as attribution.keep_last
ANSWERS = "/api/v1/slurm/nodes/"  # path on a collector, followed by the name of the node
HINT = "check that `gpu-exporter slurm-collector` runs, and that this node has GPUs in slurm.conf"
AHEAD_MAX_S = 30.0  # how far the collector's clock may be ahead; such an answer counts as new


class Collected:
    """Reads the collector's answer for one node. Has the same interface as Controller, which asks slurmctld itself."""

    def __init__(self, node: str, place: Address | Path, timeout_s: float, clock: Clock) -> None:
        """`place`: the collector's address or directory. Raises ValueError for an invalid NodeName."""
        if not NODE_NAME.fullmatch(node):
            raise ValueError(
                f"{node!r} is not a valid NodeName (letters, digits, '.', '_' and '-'; the first is a letter or a "
                "digit; at most 255): set --attribution.slurm.node"
            )
        self._place = place.page(f"{ANSWERS}{node}") if isinstance(place, Address) else place / f"{node}.json"
        self._timeout_s = timeout_s
        self._clock = clock

    def look(self, here: Collection[str], renew: bool = False, *, is_reconfigured: bool = False) -> SlurmSnapshot:
        """Returns the collector's answer. Raises SourceError if it is missing, too old, or writable by other users."""
        del here, renew, is_reconfigured  # each answer has all data about the node, and Slurm's configuration
        try:
            picture = parse_picture(self._read())
        except FetchError as exc:  # the error contains the address
            raise SourceError(f"{exc}; {HINT}") from exc
        except FileNotFoundError as exc:
            raise SourceError(f"{self._place}: no such file; {HINT}") from exc
        except (OSError, ValueError) as exc:
            raise SourceError(f"{self._place}: {getattr(exc, 'strerror', None) or exc}") from exc
        age_s = self._clock.wall() - picture.asked_wall
        if age_s < -AHEAD_MAX_S:
            raise SourceError(
                f"{self._place}: the answer is dated {-age_s:.0f} s in the future: check that the clocks of the "
                "nodes agree"
            )
        if age_s > max(AGE_MAX_S, 3 * picture.each_s):
            raise SourceError(f"{self._place}: the answer is {age_s:.0f} s old; {HINT}")
        asked = self._clock.monotonic() - max(0.0, age_s)
        return SlurmSnapshot(
            asked,
            picture.config,
            picture.node,
            {job.job_id: KnownJob(job, asked, gpus, asked) for job, gpus in picture.jobs.values()},
            each_s=picture.each_s,
        )

    def list_ending(self, jobs: Set[str]) -> Set[str]:
        """Returns the jobs: a round lists every job that runs, so a job that began before the round is ending."""
        return jobs

    def _read(self) -> str:
        if isinstance(self._place, Address):
            return fetch_text(self._place, most_bytes=READ_MAX, within_s=self._timeout_s)
        return read_trusted(self._place, READ_MAX)
