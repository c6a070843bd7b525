"""Pods that run slurmd, as those of the Slinky operator: nodes of Slurm, not holders.

The kubelet gives such a pod its GPUs, and Slurm gives them to jobs. Who holds one is the job, and one without a job is
free for Slurm. Known are the pods that the site names, and those in which a process has been seen of a job that Slurm
has on this node. A site's pod is the node that Slurm was asked about where it is the only one here, or where one of
that node's jobs was seen in it. Of any other, and where Slurm is not asked, nobody here knows which job has a GPU: the
pod is shown as its holder, and is never judged.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from gpu_exporter.attribution.cgroup import Owner
from gpu_exporter.attribution.processes import Owners, UnitOwners, Use
from gpu_exporter.model.holders import Grant, Holder

WHY = "the pod runs slurmd, and it is unknown which job has this GPU"


class SlurmPods:
    """`patterns`: the site's, as NAMESPACE/POD with * and ?, with commas between them."""

    def __init__(self, patterns: str, *, asks_slurm: bool) -> None:
        """`asks_slurm`: Slurm is among the sources."""
        self._patterns = [pattern.strip() for pattern in patterns.split(",") if pattern.strip()]
        self._asks_slurm = asks_slurm
        self._proven: frozenset[str] = frozenset()  # names of pods in which a job was seen, by UID where it is known

    def apply(self, grants: Sequence[Grant], owners: Owners) -> tuple[Sequence[Grant], Owners]:
        """The grants to those who hold something, and the owners of processes without the pods around Slurm's jobs."""
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
    """UIDs of the pods in which a job works that Slurm has here."""
    jobs = {grant.holder.job_id for grant in grants if grant.holder.job_id}
    return frozenset(pod for seen in owners.values() for owner in seen.uses if owner.job in jobs for pod in owner.pods)


def _doubted(grant: Grant) -> Grant:
    return grant._replace(running=False, why=WHY, obstacle="slurmd")


def _outside(seen: UnitOwners, pods: frozenset[str]) -> UnitOwners:
    """Whatever works in such a pod is a job's, of which Slurm alone may know the number."""
    uses: dict[Owner, Use] = {}
    for owner, use in seen.uses.items():
        whose = owner if pods.isdisjoint(owner.pods) else Owner(slurm=True, job=owner.job, step=owner.step)
        uses[whose] = uses.get(whose, Use()).plus(use)
    return seen._replace(uses=uses)
