"""Finds programs that use a GPU without an allocation by a scheduler; only their processes show this use.

Such a user is a container outside both schedulers (docker, podman, containerd), or a pod that sees GPUs without a
request (NVIDIA_VISIBLE_DEVICES=all, privileged, a hostPath). The exporter shows users but never judges them, because it
cannot see a user while none of its processes runs. A pod that a source reports is never such a user, even if its
processes run on another unit.

A pod with a fraction of a GPU is a user too, for another reason: the kubelet does not know which device the pod's
scheduler chose. With KAI-Scheduler and Run:ai, the kubelet allocates the GPU to a reservation pod. With HAMi, the pod
may get another device than the kubelet reports.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence, Set

from gpu_exporter.agent.attribution.processes import Owners
from gpu_exporter.agent.attribution.resolve import Resolution
from gpu_exporter.common.cgroup import ProcessOwner
from gpu_exporter.common.model.holders import PROCESS_SOURCE, Allocation, Grant, Holder, HolderKey, identify
from gpu_exporter.common.model.units import UnitId

log = logging.getLogger(__name__)
ID_SHOWN = 12  # digits of a container's id, as docker ps shows it
POD_WHY = "a process of the pod uses this GPU, but no scheduler allocated it, and the pod requests no GPU"
OBSTACLE = "undeclared"
FRACTION = "fraction"  # the obstacle of a pod with a fraction of the GPU
STATIC = "write the holders into a file for --attribution.static"
FRACTION_WHY = (
    "its scheduler shares this GPU among pods. The exporter cannot see pods without a process, so it judges no pod "
    f"on this GPU; {STATIC}"
)
CONTAINER_WHY = "a process of the container uses this GPU, and no scheduler manages the container"
REMEDY = (
    "it may be privileged, or set NVIDIA_VISIBLE_DEVICES=all; let it request a GPU, or block this access "
    "(docs/concepts.md)"
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

        `pods`: every source has answered, so that an unreported pod holds nothing.
        """
        held = {allocation.unit for allocation, _ in resolution.allocations}
        grants = [*(grant for _, grant in resolution.allocations), *resolution.conflicts]
        grants += [grant for several in resolution.reserved.values() for grant in several]
        grants += [grant for grant, _ in resolution.unresolved if grant.kind != "unproven"]
        known = _list_pods(grants)
        unplaced = _list_pods(grant for grant, _ in resolution.unresolved) - known
        found: list[tuple[Allocation, Grant]] = []
        for unit, seen in owners.items():
            if unit not in held:
                users = [owner for owner in seen.uses if (pods or not owner.pods) and known.isdisjoint(owner.pods)]
                found += self._list(unit, users, now, None if unit in resolution.reserved else unplaced)
        here = {allocation.holder.pod_uid for allocation, _ in found}
        self._names = {uid: name for uid, name in self._names.items() if uid in here}
        return found

    def _list(
        self, unit: UnitId, owners: Iterable[ProcessOwner], now: float, sharing: Set[str] | None
    ) -> list[tuple[Allocation, Grant]]:
        """`sharing`: UIDs of the pods that may have a fraction of this unit, None for all pods."""
        found: dict[HolderKey, tuple[Holder, str, str]] = {}  # each holder with its reason and obstacle
        for owner in owners:
            is_fraction = bool(owner.pods) and (sharing is None or not sharing.isdisjoint(owner.pods))
            if (holder := self._holder(owner, warn=not is_fraction)) is not None:
                found[holder.key] = (
                    (holder, FRACTION_WHY, FRACTION) if is_fraction else (holder, _why(holder), OBSTACLE)
                )
        return [
            (
                Allocation(
                    unit,
                    holder,
                    "none" if len(found) == 1 and obstacle != FRACTION else "time_slice",
                    1.0 / len(found),
                    running=False,
                    why=why,
                    obstacle=obstacle,
                    basis=BASIS,
                ),
                Grant(
                    "uuid",
                    unit.mig_uuid or unit.uuid,
                    holder,
                    running=False,
                    why=why,
                    obstacle=obstacle,
                    confirmed=now,
                ),
            )
            for holder, why, obstacle in found.values()
        ]

    def _holder(self, owner: ProcessOwner, *, warn: bool) -> Holder | None:
        if owner.slurm:
            return None  # Slurm itself reports jobs
        short = owner.container[:ID_SHOWN]
        if owner.pods:
            uid = owner.pods[-1]
            namespace, pod = self._look_up(uid, warn=warn) or ("", uid)
            key = HolderKey("kubernetes", f"{uid}/{short}")
            return Holder(key, namespace, pod, short, pod_uid=uid, source=PROCESS_SOURCE)
        if owner.container:
            return Holder(HolderKey("container", owner.container), container=short, source=PROCESS_SOURCE)
        return None

    def _look_up(self, uid: str, *, warn: bool) -> PodName | None:
        if uid not in self._names:
            name = self._names[uid] = self._name_pod(uid)
            if warn:
                shown = "/".join(name) if name else uid
                log.warning("pod %s uses a GPU that no source allocated to it: %s", shown, REMEDY)
        return self._names[uid]


BASIS = "its processes run here"


def describe_reserved(reserved: Mapping[UnitId, Sequence[Grant]]) -> dict[UnitId, str]:
    """Returns why each unit that a scheduler reserved for fractions is not free, if no process shows its holders."""
    first = {unit: min((grant.holder.namespace, grant.holder.pod) for grant in reserved[unit]) for unit in reserved}
    return {
        unit: f"reserved by {namespace} for fractions, and no process shows which pods have them; {STATIC} "
        f"(reserved by pod {pod})"
        for unit, (namespace, pod) in first.items()
    }


def describe_unplaced(unresolved: Sequence[tuple[Grant, str]], units: Iterable[UnitId]) -> dict[UnitId, str]:
    """Returns why no unit is free while the device of a pod with a fraction is unknown. Empty without such a pod."""
    unproven = ((grant, reason) for grant, reason in unresolved if grant.kind == "unproven" and grant.holder.pod)
    first = min((f"{grant.holder.label} may have this GPU: {reason}" for grant, reason in unproven), default="")
    return dict.fromkeys(units, f"{first}; {STATIC}") if first else {}


def _list_pods(grants: Iterable[Grant]) -> Set[str]:
    whos = (identify(grant.holder) for grant in grants)
    return {who[1] for who in whos if who is not None and who[0] == "pod"}


def _why(holder: Holder) -> str:
    return POD_WHY if holder.key.scheduler == "kubernetes" else CONTAINER_WHY
