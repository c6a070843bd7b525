"""Detects pods that run slurmd, e.g. those of the Slinky operator. These pods are nodes of Slurm, not holders.

The kubelet allocates GPUs to such a pod, and Slurm allocates these GPUs to jobs. The holder is the job, and a GPU
without a job is free for Slurm. A pod counts as a slurmd pod if the administrator configured its name, or if a process
of this node's Slurm jobs was seen in the pod.

The jobs in a slurmd pod are known if the pod is the only slurmd pod here, or if a job of this node was seen in it.
Otherwise, and without the Slurm source, the job of a GPU is unknown. Then the pod is shown as the holder, and is never
judged.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from gpu_exporter.agent.attribution.processes import Owners, UnitOwners
from gpu_exporter.common.cgroup import ProcessOwner
from gpu_exporter.common.model.holders import Grant, Holder, Use

WHY = "the pod runs slurmd, and it is unknown which job has this GPU"


class SlurmPods:
    """Detects slurmd pods. `patterns`: the configured patterns NAMESPACE/POD with * and ?, separated by commas."""

    def __init__(self, patterns: str, *, asks_slurm: bool) -> None:
        """`asks_slurm`: Slurm is among the sources."""
        self._patterns = [pattern.strip() for pattern in patterns.split(",") if pattern.strip()]
        self._asks_slurm = asks_slurm
        # pods in which a job was seen, by UID, or by name if the UID is unknown
        self._proven: frozenset[str] = frozenset()

    def apply(self, grants: Sequence[Grant], owners: Owners) -> tuple[Sequence[Grant], Owners]:
        """Removes slurmd pods as holders and as owners of processes. Only Slurm's jobs remain as holders."""
        here = {_id(grant.holder): grant.holder for grant in grants if grant.holder.pod}
        self._proven = (self._proven | _find_proven(grants, owners)) & here.keys()
        named = {pod for pod, holder in here.items() if self._is_named(holder)}
        nodes = self._proven | named
        if not nodes:
            return grants, owners
        asked = self._proven | (named if len(nodes) == 1 else frozenset())
        asked = asked if self._asks_slurm else frozenset()
        left = [grant for grant in grants if _id(grant.holder) not in asked]
        left = [_doubted(grant) if _id(grant.holder) in nodes else grant for grant in left]
        return left, {unit: _outside(seen, asked) for unit, seen in owners.items()}

    def _is_named(self, holder: Holder) -> bool:
        name = f"{holder.namespace}/{holder.pod}"
        return any(fnmatchcase(name, pattern) for pattern in self._patterns)


def _id(holder: Holder) -> str:
    return holder.pod_uid or f"{holder.namespace}/{holder.pod}"


def _find_proven(grants: Sequence[Grant], owners: Owners) -> frozenset[str]:
    """Returns the UIDs of the pods that contain a process of one of this node's Slurm jobs."""
    jobs = {grant.holder.job_id for grant in grants if grant.holder.job_id}
    return frozenset(pod for seen in owners.values() for owner in seen.uses if owner.job in jobs for pod in owner.pods)


def _doubted(grant: Grant) -> Grant:
    return grant._replace(running=False, why=WHY, obstacle="slurmd")


def _outside(seen: UnitOwners, pods: frozenset[str]) -> UnitOwners:
    """Replaces slurmd pods as owners of processes by a Slurm job, whose number may be unknown here."""
    uses: dict[ProcessOwner, Use] = {}
    for owner, use in seen.uses.items():
        whose = owner if pods.isdisjoint(owner.pods) else ProcessOwner(slurm=True, job=owner.job, step=owner.step)
        uses[whose] = uses.get(whose, Use()).plus(use)
    return seen._replace(uses=uses)
