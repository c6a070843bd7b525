"""Counts the GPUs that pending Slurm jobs wait for, by partition: gpu_demand_pending_gpus, gpu_demand_counted_gpus.

On Kubernetes, kube-state-metrics reports the demand. Slurm has no such exporter. A job that waits for something else (a
dependency, a start time, a limit or a release) is not demand, because a free GPU would not start it.
"""

from __future__ import annotations

import logging
import re
from collections import Counter, defaultdict
from collections.abc import Callable

from gpu_exporter.common.outside import need_whole
from gpu_exporter.reconciler.evidence.records import Demand
from gpu_exporter.reconciler.marks import MarkError

log = logging.getLogger(__name__)
# Widths of columns. Slurm pads every value to its width, or cuts it. They are far above any real value, and add up to
# 830 bytes per row, so that 160,000 pending tasks fit into the largest answer.
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
    "UserID": 64,
}
FORMAT = ",".join(f"{column}:{width}|" for column, width in COLUMNS.items())
WAITING = ("Resources", "Priority")  # reasons that mean waiting for the scheduler; the first in line has Resources
GPUS = re.compile(r"(?:^|,)(?:gres[:/])?gpu(?:[:=][^\s:=,()]*[^\s:=,()\d][^\s:=,()]*)?(?:[:=](\d+))?(?=,|\(|$)")


def parse_demand(text: str, job_max: int, tenant_max: int) -> Demand:
    """Parses the output of `squeue -h -a -r -t PENDING -O FORMAT`. Counts GPUs by partition, omits malformed lines.

    `job_max`, `tenant_max`: the most GPUs of one job and of one account that count. A job of several partitions counts
    in equal parts: otherwise each partition would give up all its GPUs. Raises ValueError if all lines are malformed.
    """
    demand: Counter[str] = Counter()
    by_tenant: defaultdict[tuple[str, str], float] = defaultdict(float)
    odd, understood = "", 0
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|")][:-1]
        if len(cells) != len(COLUMNS):
            odd = odd or line
            continue
        understood += 1
        reason, partitions, nodes, tasks, per_job, per_node, per_task, per_socket, account, uid = cells
        if reason not in WAITING:
            continue
        # A request per job comes first, since it names the total. For sockets, one per node is assumed.
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
            named = partitions.split(",")
            for partition in named:
                demand[partition] += gpus
                by_tenant[partition, account or uid] += min(gpus, job_max) / len(named)
    if odd and not understood:
        raise ValueError(f"cannot parse a line of squeue: {odd.strip()[:80]!r}")
    counted: defaultdict[str, float] = defaultdict(float)
    for (partition, _), part in by_tenant.items():
        counted[partition] += min(part, tenant_max)
    # Ten tenths are not exactly 1.
    return Demand(dict(demand), {partition: round(part, 6) for partition, part in counted.items()})


def _count(tres: str) -> int:
    return sum(need_whole(match[1] or 1) for match in GPUS.finditer(tres))


def _number(text: str) -> int:
    """Returns a number of nodes or tasks: `2`, or the minimum `2` of `2-4`; 1 if Slurm does not show it yet."""
    match = re.match("[0-9]+", text)
    return max(1, need_whole(match[0])) if match else 1


class SlurmDemand:
    def __init__(self, run: Callable[..., str], job_max: int, tenant_max: int) -> None:
        """`run`: runs a command of Slurm and returns its output; raises MarkError. `job_max`, `tenant_max`: the most
        GPUs of one job and of one account that count.
        """
        self._run = run
        self._most = job_max, tenant_max
        self._problem = ""
        self._partitions: set[str] = set()  # in which a job has waited

    def read(self) -> Demand | None:
        """Returns the GPUs by partition; None while the answer of Slurm is missing or malformed. This is logged once.

        `counted` is 0 where a job waited earlier, because a missing value would not show that no job waits now.
        """
        problem, demand = "", None
        try:
            demand = parse_demand(self._run("squeue", "-h", "-a", "-r", "-t", "PENDING", "-O", FORMAT), *self._most)
        except (MarkError, ValueError) as exc:
            problem = str(exc)
        if problem and problem != self._problem:
            log.warning("it is unknown how many GPUs pending jobs wait for: %s", problem)
        self._problem = problem
        if demand is None:
            return None
        self._partitions |= demand.counted.keys()
        return demand._replace(counted={**dict.fromkeys(self._partitions, 0.0), **demand.counted})
