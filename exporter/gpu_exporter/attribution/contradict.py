"""Processes against the mapping: where a GPU runs the processes of another job or pod than its holder, one is wrong.

A wrong mapping makes work look idle that is not, so the holder's time is unknown from then on. A grant is contradicted
in two ways: processes of another pod or job run on the holder's unit; or the holder's own run on a unit that it does
not hold, and none of them on this one. It stays contradicted until the holder's own processes, and no others, are seen
on its unit: that the others have ended does not make the mapping right. What a previous holder left running counts only
while it runs. Processes never say who holds a unit: a pod without a process holds its GPU all the same. Pure, but for
the log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

from gpu_exporter.attribution.cgroup import Owner
from gpu_exporter.attribution.resolve import Resolution
from gpu_exporter.model.holders import Allocation, Grant, Holder, HolderKey
from gpu_exporter.model.units import UnitId
from gpu_exporter.outside import WHOLE_MAX, whole

log = logging.getLogger(__name__)
NAMED_MAX = 3  # so many owners are named in a text
Relation: TypeAlias = Literal["own", "other", "unknown"]
Who: TypeAlias = tuple[str, str]
"""A pod ("pod", UID) or a Slurm job ("job", id): all containers and steps of it are one."""
REMEDIES = {
    "slurm": "compare the order of gres.conf with `nvidia-smi -L` and with `scontrol show node -d`",
    "kubelet": "compare the device plugin's device ids with `nvidia-smi -L`, and restart it where a GPU was lost",
    "static": "correct the file of --attribution.static",
}


def relate(holder: Holder, owner: Owner) -> Relation:
    """Whether a process of `owner` is the holder's. Only what is positively another pod's or job's is "other"."""
    if holder.key.scheduler == "container":
        return "own" if owner.container == holder.key.incarnation else "other" if owner.container else "unknown"
    if not owner.is_scheduled:
        return "unknown"  # the system's, a login's, or of a container that no scheduler knows
    if holder.key.scheduler == "slurm":
        if owner.job:
            return _compare(holder.job_id, [owner.job], lambda job: whole(job, WHOLE_MAX) is not None)
        return "unknown" if owner.slurm else "other"
    if owner.pods:
        # A static pod's UID is a hash for the kubelet and another one for the API server: these cannot be compared.
        return _compare(holder.pod_uid, owner.pods, lambda uid: ("-" in uid) == ("-" in holder.pod_uid))
    return "other"


def _compare(held: str, found: Sequence[str], is_comparable: Callable[[str], bool]) -> Relation:
    if held and held in found:
        return "own"
    if not held or not is_comparable(held):
        return "unknown"
    for name in found:  # a loop, since this is asked of each holder and owner of each unit
        if not is_comparable(name):
            return "unknown"
    return "other"


def identify(holder: Holder) -> Who | None:
    """The pod or job that holds, None when only its name is known."""
    if holder.key.scheduler == "slurm":
        return ("job", holder.job_id) if holder.job_id else None
    return ("pod", holder.pod_uid) if holder.pod_uid else None


class _Finding(NamedTuple):
    """A contradicted allocation: whose processes were seen (`others`; none when it is the holder's), and where."""

    names: str
    place: str
    others: frozenset[Who]
    source: str
    holder: str
    present: bool = True  # seen at the last look, and not only before

    def __str__(self) -> str:
        verb = "run" if self.present else "ran"
        if self.others:
            return f"processes of {self.names} {verb} here, but {self.source} reports {self.holder}"
        return f"processes of {self.names} {verb} on {self.place}, which {self.source} did not allocate to it"


class ProcessNet:
    """Remembers which allocations are contradicted.

    `in_use`: for people, who uses each unit that has no holder.
    """

    def __init__(self) -> None:
        self.in_use: dict[UnitId, str] = {}
        self._found: dict[tuple[UnitId, HolderKey], _Finding] = {}
        self._logged: dict[tuple[UnitId, HolderKey], _Finding] = {}
        self._held: dict[UnitId, frozenset[Who]] = {}
        self._before: dict[UnitId, frozenset[Who]] = {}  # who held the unit before its present holders

    def check(
        self, resolution: Resolution, owners: Mapping[UnitId, Sequence[Owner]], places: Mapping[UnitId, str]
    ) -> Resolution:
        """Mark the allocations that processes contradict, and count each as a conflict of its source.

        `owners`: the owners of the processes on each unit; `places`: every unit of this node, as people call it.
        """
        look = _Look(resolution, owners)
        self._note_changes(look.holders, places)
        previous, self._found = self._found, {}
        marked: list[tuple[Allocation, Grant]] = []
        conflicts = list(resolution.conflicts)
        for allocation, grant in resolution.allocations:
            key = (allocation.unit, allocation.holder.key)
            finding = look.judge(allocation, places) or self._keep(look, allocation, previous.get(key))
            if finding is not None:
                self._found[key] = finding
                conflicts.append(grant)
                allocation = allocation._replace(contradiction=str(finding))
            self._log(key, finding, places)
            marked.append((allocation, grant))
        self._logged = {key: finding for key, finding in self._logged.items() if key in look.keys}
        self.in_use = {unit: text for unit in owners if (text := look.describe_use(unit))}
        return resolution._replace(allocations=marked, conflicts=conflicts)

    def _keep(self, look: _Look, allocation: Allocation, before: _Finding | None) -> _Finding | None:
        """What an earlier look found and this one neither finds nor refutes."""
        if before is None or look.has_own(allocation):
            return None
        left = before.others & self._before.get(allocation.unit, frozenset())
        if before.others and left == before.others and not left & look.whos:
            return None  # what the previous holder had left running has ended
        return before._replace(present=False)

    def _note_changes(self, holders: Mapping[UnitId, Sequence[Holder]], places: Mapping[UnitId, str]) -> None:
        for unit, several in holders.items():
            present = frozenset(who for holder in several if (who := identify(holder)) is not None)
            last = self._held.get(unit, present)
            if last - present:
                self._before[unit] = last - present
            self._held[unit] = present  # a unit that is free for a while keeps its last holders
        for known in (self._held, self._before):
            for unit in [unit for unit in known if unit not in places]:
                del known[unit]

    def _log(self, key: tuple[UnitId, HolderKey], finding: _Finding | None, places: Mapping[UnitId, str]) -> None:
        """Each finding once for an allocation, with what to do."""
        if finding is None or self._logged.get(key) == finding._replace(present=True):
            return
        self._logged[key] = finding._replace(present=True)
        remedy = REMEDIES.get(finding.source, f"check what {finding.source} reports")
        place = places.get(key[0], key[0].mig_uuid or key[0].uuid)
        log.warning(
            "%s: %s; the time of %s here is unknown until only its own processes are seen here; %s",
            place, finding, finding.holder, remedy,
        )  # fmt: skip


class _Look:
    """One look at all processes, against one mapping."""

    def __init__(self, resolution: Resolution, owners: Mapping[UnitId, Sequence[Owner]]) -> None:
        self.holders: dict[UnitId, list[Holder]] = {}
        for allocation, _ in resolution.allocations:
            self.holders.setdefault(allocation.unit, []).append(allocation.holder)
        self.keys = {(allocation.unit, allocation.holder.key) for allocation, _ in resolution.allocations}
        self.whos = {who for several in self.holders.values() for h in several if (who := identify(h)) is not None}
        unresolved = [grant for grant, _ in resolution.unresolved]
        grants = (*(grant for _, grant in resolution.allocations), *unresolved, *resolution.conflicts)
        self._known = {who: grant.holder for grant in grants if (who := identify(grant.holder)) is not None}
        self._unresolved = {identify(grant.holder) for grant in unresolved}
        self._owners = owners
        self._strays = self._find_strays()
        self._others: dict[UnitId, list[Owner]] = {}  # of processes of nobody who holds the unit, once asked for

    def _find_strays(self) -> dict[Who, UnitId]:
        """Holders that work on a unit that they do not hold, and that unit; an unresolved grant may mean just it."""
        strays: dict[Who, UnitId] = {}
        for unit, seen in self._owners.items():
            here = {identify(holder) for holder in self.holders.get(unit, ())}
            for owner in seen:
                whos = _whos(owner)
                if not here.intersection(whos):
                    strays.update((who, unit) for who in whos if who in self.whos - self._unresolved)
        return strays

    def has_own(self, allocation: Allocation) -> bool:
        """Whether a process of the holder is on the unit that it holds."""
        return any(relate(allocation.holder, owner) == "own" for owner in self._owners.get(allocation.unit, ()))

    def judge(self, allocation: Allocation, places: Mapping[UnitId, str]) -> _Finding | None:
        """What this look finds against an allocation."""
        unit, holder = allocation.unit, allocation.holder
        if unit not in self._others:
            self._others[unit] = [
                owner
                for owner in self._owners.get(unit, ())
                if all(relate(each, owner) == "other" for each in self.holders[unit])
            ]
        if others := self._others[unit]:
            whos = frozenset(who for owner in others for who in _whos(owner)) or frozenset({("job", "")})
            return _Finding(self._join(others), "", whos, holder.source, _short(holder))
        who = identify(holder)
        if who is None or who not in self._strays or self.has_own(allocation):
            return None
        elsewhere = self._strays[who]
        place = places.get(elsewhere, elsewhere.mig_uuid or elsewhere.uuid)
        return _Finding(_short(holder), place, frozenset(), holder.source, _short(holder))

    def describe_use(self, unit: UnitId) -> str:
        """Who uses a unit that has no holder, "" when it is held or used by the system alone."""
        users = [owner for owner in self._owners[unit] if owner.is_scheduled or owner.container]
        if unit in self.holders or not users:
            return ""
        sources = sorted({self._known[who].source for owner in users for who in _whos(owner) if who in self._known})
        if sources:
            return f"in use by {self._join(users)}, but {' and '.join(sources)} did not allocate it to {self._join(users)}"
        return f"in use by {self._join(users)}, which no source reports"

    def _join(self, owners: Iterable[Owner]) -> str:
        names = sorted({self._describe(owner) for owner in owners})
        more = f" and {len(names) - NAMED_MAX} more" if len(names) > NAMED_MAX else ""
        return ", ".join(names[:NAMED_MAX]) + more

    def _describe(self, owner: Owner) -> str:
        if owner.job:
            return f"job {owner.job}"
        if owner.slurm:
            return "a Slurm job of unknown number"
        if owner.pods:
            named = next((self._known[who] for who in _whos(owner) if who in self._known), None)
            return f"pod {owner.pods[-1]}" if named is None else _short(named)
        return f"container {owner.container[:12]}"


def _whos(owner: Owner) -> tuple[Who, ...]:
    """Every pod and job that a process belongs to: a job's slurmd may itself be in a pod."""
    pods = tuple(("pod", pod) for pod in owner.pods)
    return (*pods, ("job", owner.job)) if owner.job else pods


def _short(holder: Holder) -> str:
    return holder.label if holder.key.scheduler == "slurm" else f"pod {holder.namespace}/{holder.pod}"
