"""GPUs that pending Slurm jobs wait for, by partition: gpu_demand_pending_gpus, gpu_demand_counted_gpus.

On Kubernetes kube-state-metrics reports the same; Slurm has no exporter of its own. Jobs that wait for something else,
a dependency, a start time, a limit or a release, are not demand: freeing a GPU would not start them.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

from gpu_exporter.outside import need_whole
from gpu_exporter.reconciler.marks import MarkError

log = logging.getLogger(__name__)
# Widths pad every row, and Slurm cuts at them: far above any real value, and 830 bytes a row, so
# that 160,000 pending tasks fit into what one answer may be.
COLUMNS = {
    "Reason": 24,
    "Partition": 256,
    "NumNodes": 12,
    "NumTasks": 12,
    "tres-per-job": 96,
    "tres-per-node": 96,
    "tres-per-task": 96,
    "tres-per-socket": 96,
    "Account": 64,
    "UserName": 64,
}
FORMAT = ",".join(f"{column}:{width}|" for column, width in COLUMNS.items())
WAITING = ("Resources", "Priority")  # the scheduler's own reasons; the first in line has Resources
GPUS = re.compile(r"(?:^|,)(?:gres[:/])?gpu(?:[:=][^\s:=,()]*[^\s:=,()\d][^\s:=,()]*)?(?:[:=](\d+))?(?=,|\(|$)")


class Demand(NamedTuple):
    """GPUs that are waited for, by partition: all of them, and as many as count for actions."""

    pending: Mapping[str, float]
    counted: Mapping[str, float]


def parse_demand(text: str, job_max: int, tenant_max: int) -> Demand:
    """GPUs by partition out of `squeue -h -a -r -t PENDING -O FORMAT`. A line that is not understood is left out.

    Raises ValueError where that is all of them.

    A job that asks for several partitions is in each of them. `job_max`, `tenant_max`: of one job, and of one account,
    no more than so many count.
    """
    demand: Counter[str] = Counter()
    by_tenant: Counter[tuple[str, str]] = Counter()
    odd, understood = "", 0
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|")][:-1]
        if len(cells) != len(COLUMNS):
            odd = odd or line
            continue
        understood += 1
        reason, partitions, nodes, tasks, per_job, per_node, per_task, per_socket, account, user = cells
        if reason not in WAITING:
            continue
        # Of several ways to ask the one that names the whole comes first; sockets are at least one a node.
        try:
            gpus = (
                _count(per_job)
                or _count(per_task) * _number(tasks)
                or _count(per_node) * _number(nodes)
                or _count(per_socket) * _number(nodes)
            )
        except ValueError:  # not a number
            continue
        if gpus:
            for partition in partitions.split(","):
                demand[partition] += gpus
                by_tenant[partition, account or user] += min(gpus, job_max)
    if odd and not understood:
        raise ValueError(f"squeue printed a line that is not understood: {odd.strip()[:80]!r}")
    counted: Counter[str] = Counter()
    for (partition, _), gpus in by_tenant.items():
        counted[partition] += min(gpus, tenant_max)
    return Demand(dict(demand), dict(counted))


def _count(tres: str) -> int:
    return sum(need_whole(match[1] or 1) for match in GPUS.finditer(tres))


def _number(text: str) -> int:
    """A number of nodes or tasks: `2`, or at least `2` of `2-4`; 1 while Slurm does not say."""
    match = re.match("[0-9]+", text)
    return max(1, need_whole(match[0])) if match else 1


class SlurmDemand:
    """Asks one Slurm cluster."""

    def __init__(self, run: Callable[..., str], job_max: int, tenant_max: int) -> None:
        """`run`: one of Slurm's commands to its output; raises MarkError. Others as in parse_demand."""
        self._run = run
        self._most = job_max, tenant_max
        self._problem = ""

    def read(self) -> Demand | None:
        """GPUs by partition; None while Slurm does not answer, which is logged once."""
        problem, demand = "", None
        try:
            demand = parse_demand(self._run("squeue", "-h", "-a", "-r", "-t", "PENDING", "-O", FORMAT), *self._most)
        except (MarkError, ValueError) as exc:
            problem = str(exc)
        if problem and problem != self._problem:
            log.warning("GPUs that pending jobs wait for are not known: %s", problem)
        self._problem = problem
        return demand
