"""Finds programs that use a GPU that no scheduler has allocated to them. Only their processes show them.

Such a user is a container outside both schedulers (docker, podman, containerd), or a pod that sees GPUs without a
request (NVIDIA_VISIBLE_DEVICES=all, privileged, a hostPath). The exporter shows users but never judges them, because it
cannot see a user while none of its processes runs. A pod that a source reports is never such a user, even if its
processes run on another unit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from gpu_exporter.agent.attribution.processes import Owners
from gpu_exporter.agent.attribution.resolve import Resolution
from gpu_exporter.common.cgroup import ProcessOwner
from gpu_exporter.common.model.holders import PROCESS_SOURCE, Allocation, Grant, Holder, HolderKey, identify
from gpu_exporter.common.model.units import UnitId

log = logging.getLogger(__name__)
ID_SHOWN = 12  # digits of a container's id, as docker ps shows it
POD_WHY = (
    "no scheduler allocated this GPU to the pod: the pod uses it without a request, and is seen only by its processes"
)
OBSTACLE = "undeclared"
CONTAINER_WHY = "a container outside the schedulers, seen only by its processes"
REMEDY = (
    "a pod sees every GPU where NVIDIA_VISIBLE_DEVICES=all is set and the runtime accepts it from the environment, or "
    "where it is privileged; let the pod request a GPU, or block this access"
)
PodName = tuple[str, str]
"""Namespace and name of a pod."""


class Users:
    """Finds users at each poll, and logs each pod once."""

    def __init__(self, name_pod: Callable[[str], PodName | None]) -> None:
        """`name_pod`: returns namespace and name of the pod with a UID, None if unknown."""
        self._name_pod = name_pod
        self._names: dict[str, PodName | None] = {}

    def find(self, resolution: Resolution, owners: Owners, now: float, *, pods: bool) -> list[tuple[Allocation, Grant]]:
        """Returns an allocation for each user of a unit without a holder. `now`: monotonic seconds.

        `pods`: every source has answered, so that a pod that no source reports holds nothing.
        """
        held = {allocation.unit for allocation, _ in resolution.allocations}
        grants = [grant for _, grant in resolution.allocations]
        grants += [*(grant for grant, _ in resolution.unresolved), *resolution.conflicts]
        known = {who[1] for grant in grants if (who := identify(grant.holder)) is not None and who[0] == "pod"}
        found: list[tuple[Allocation, Grant]] = []
        for unit, seen in owners.items():
            if unit not in held:
                users = [owner for owner in seen.uses if (pods or not owner.pods) and known.isdisjoint(owner.pods)]
                found += self._list(unit, users, now)
        here = {allocation.holder.pod_uid for allocation, _ in found}
        self._names = {uid: name for uid, name in self._names.items() if uid in here}
        return found

    def _list(self, unit: UnitId, owners: Iterable[ProcessOwner], now: float) -> list[tuple[Allocation, Grant]]:
        holders = {holder.key: holder for owner in owners if (holder := self._holder(owner)) is not None}
        return [
            (
                Allocation(
                    unit,
                    holder,
                    "none" if len(holders) == 1 else "time_slice",
                    1.0 / len(holders),
                    running=False,
                    why=_why(holder),
                    obstacle=OBSTACLE,
                    basis=BASIS,
                ),
                Grant(
                    "uuid",
                    unit.mig_uuid or unit.uuid,
                    holder,
                    running=False,
                    why=_why(holder),
                    obstacle=OBSTACLE,
                    confirmed=now,
                ),
            )
            for holder in holders.values()
        ]

    def _holder(self, owner: ProcessOwner) -> Holder | None:
        if owner.slurm:
            return None  # Slurm itself reports jobs
        short = owner.container[:ID_SHOWN]
        if owner.pods:
            uid = owner.pods[-1]
            namespace, pod = self._look_up(uid) or ("", uid)
            key = HolderKey("kubernetes", f"{uid}/{short}")
            return Holder(key, namespace, pod, short, pod_uid=uid, source=PROCESS_SOURCE)
        if owner.container:
            return Holder(HolderKey("container", owner.container), container=short, source=PROCESS_SOURCE)
        return None

    def _look_up(self, uid: str) -> PodName | None:
        if uid not in self._names:
            name = self._names[uid] = self._name_pod(uid)
            log.warning("pod %s uses a GPU that no source allocated to it: %s", "/".join(name) if name else uid, REMEDY)
        return self._names[uid]


BASIS = "its processes run here"


def _why(holder: Holder) -> str:
    return POD_WHY if holder.key.scheduler == "kubernetes" else CONTAINER_WHY
