"""Checks the allocations against the processes that run on each unit.

A wrong allocation makes a working holder look idle, so a contradicted holder's time counts as unknown. The processes
contradict an allocation in two cases:

- Processes of another pod or job run on the holder's unit.
- The holder's own processes run on a unit that it does not hold, and none of them run on its own unit.

The allocation stays contradicted until only the holder's own processes run on its unit, because the end of the other
processes does not prove that the allocation is right. Processes of a previous holder contradict only while they run.
Processes never prove who holds a unit, because a pod without a process still holds its GPU. This module only computes
and logs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

from gpu_exporter.agent.attribution.resolve import Resolution
from gpu_exporter.common.cgroup import ProcessOwner
from gpu_exporter.common.model.holders import Allocation, Grant, Holder, HolderKey, Who, identify
from gpu_exporter.common.model.units import UnitId
from gpu_exporter.common.outside import WHOLE_MAX, whole

log = logging.getLogger(__name__)
NAMED_MAX = 3  # most owners that a text names; it gives the number of the others
Relation: TypeAlias = Literal["own", "other", "unknown"]
REMEDIES = {
    "slurm": "compare the order of gres.conf with `nvidia-smi -L` and with `scontrol show node -d`",
    "kubelet": "compare the device plugin's ids with `nvidia-smi -L`, and restart the plugin where a GPU was lost",
    "static": "correct the file of --attribution.static",
}


def relate(holder: Holder, owner: ProcessOwner) -> Relation:
    """Returns "own" if the process belongs to the holder, "other" if it provably belongs to another pod or job,
    otherwise "unknown". `owner`: the owner of the process.
    """
    if holder.key.scheduler == "container":
        return "own" if owner.container == holder.key.incarnation else "other" if owner.container else "unknown"
    if not owner.is_scheduled:
        return "unknown"  # the process belongs to the system, a login, or a container that no scheduler started
    if holder.key.scheduler == "slurm":
        if owner.job:
            return _compare(holder.job_id, [owner.job], lambda job: whole(job, WHOLE_MAX) is not None)
        return "unknown" if owner.slurm else "other"
    if owner.pods:
        # The kubelet's UID of a static pod is a hash, and the API server has another UID: these cannot be compared.
        return _compare(holder.pod_uid, owner.pods, lambda uid: ("-" in uid) == ("-" in holder.pod_uid))
    return "other"


def _compare(held: str, found: Sequence[str], is_comparable: Callable[[str], bool]) -> Relation:
    if held and held in found:
        return "own"
    if not held or not is_comparable(held):
        return "unknown"
    for name in found:  # a loop, because this runs for each holder and owner of each unit
        if not is_comparable(name):
            return "unknown"
    return "other"


class _Finding(NamedTuple):
    """The reason why an allocation is contradicted.

    - `names`: the owners of the processes.
    - `others`: the same owners; empty if the processes belong to the holder itself.
    - `place`: the unit on which the holder's processes run although the holder does not hold it.
    """

    names: str
    place: str
    others: frozenset[Who]
    source: str
    holder: str
    present: bool = True  # the last check saw the processes; False: only an earlier check did

    def __str__(self) -> str:
        verb = "run" if self.present else "ran"
        if self.others:
            return f"processes of {self.names} {verb} here, but {self.source} reports {self.holder}"
        return f"processes of {self.names} {verb} on {self.place}, which {self.source} did not allocate to it"


class ProcessNet:
    """Remembers the allocations that processes contradict.

    `in_use`: for each used unit without a holder, a text with the owners of its processes.
    """

    def __init__(self) -> None:
        self.in_use: dict[UnitId, str] = {}
        self._found: dict[tuple[UnitId, HolderKey], _Finding] = {}
        self._logged: dict[tuple[UnitId, HolderKey], _Finding] = {}
        self._held: dict[UnitId, frozenset[Who]] = {}
        self._before: dict[UnitId, frozenset[Who]] = {}  # the previous holders of each unit

    def check(
        self, resolution: Resolution, owners: Mapping[UnitId, Sequence[ProcessOwner]], places: Mapping[UnitId, str]
    ) -> Resolution:
        """Returns the resolution. Contradicted allocations have `contradiction` and count as conflicts of a source.

        `owners`: the owners of the processes on each unit. `places`: every unit of this node, with its name for
        messages.
        """
        look = _Comparison(resolution, owners)
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

    def _keep(self, look: _Comparison, allocation: Allocation, before: _Finding | None) -> _Finding | None:
        """Returns the earlier finding if the present processes neither confirm nor refute it, otherwise None."""
        if before is None or look.has_own(allocation):
            return None
        left = before.others & self._before.get(allocation.unit, frozenset())
        if before.others and left == before.others and not left & look.whos:
            return None  # the processes that the previous holder left running have ended
        return before._replace(present=False)

    def _note_changes(self, holders: Mapping[UnitId, Sequence[Holder]], places: Mapping[UnitId, str]) -> None:
        for unit, several in holders.items():
            present = frozenset(who for holder in several if (who := identify(holder)) is not None)
            last = self._held.get(unit, present)
            if last - present:
                self._before[unit] = last - present
            self._held[unit] = present  # a free unit keeps its last holders here
        for known in (self._held, self._before):
            for unit in [unit for unit in known if unit not in places]:
                del known[unit]

    def _log(self, key: tuple[UnitId, HolderKey], finding: _Finding | None, places: Mapping[UnitId, str]) -> None:
        """Logs each finding of an allocation once, with the remedy."""
        if finding is None or self._logged.get(key) == finding._replace(present=True):
            return
        self._logged[key] = finding._replace(present=True)
        remedy = REMEDIES.get(finding.source, f"check the reports of {finding.source}")
        place = places.get(key[0], key[0].mig_uuid or key[0].uuid)
        log.warning(
            "%s: %s. The time of %s on %s counts as unknown until only the processes of %s run on %s. To do: %s",
            place, finding, finding.holder, place, finding.holder, place, remedy,
        )  # fmt: skip


class _Comparison:
    """Compares the processes of one moment with the allocations of the same moment."""

    def __init__(self, resolution: Resolution, owners: Mapping[UnitId, Sequence[ProcessOwner]]) -> None:
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
        self._others: dict[UnitId, list[ProcessOwner]] = {}  # owners that hold nothing on the unit, filled on demand

    def _find_strays(self) -> dict[Who, UnitId]:
        """Returns each holder that has processes on a unit that it does not hold, with this unit.

        Omits holders with an unresolved grant, because that grant may mean this unit.
        """
        strays: dict[Who, UnitId] = {}
        for unit, seen in self._owners.items():
            here = {identify(holder) for holder in self.holders.get(unit, ())}
            for owner in seen:
                whos = _whos(owner)
                if not here.intersection(whos):
                    strays.update((who, unit) for who in whos if who in self.whos - self._unresolved)
        return strays

    def has_own(self, allocation: Allocation) -> bool:
        """Returns whether a process of the holder runs on the unit that it holds."""
        return any(relate(allocation.holder, owner) == "own" for owner in self._owners.get(allocation.unit, ()))

    def judge(self, allocation: Allocation, places: Mapping[UnitId, str]) -> _Finding | None:
        """Returns why the present processes contradict an allocation, None if they do not."""
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
        """Returns a text with the users of a unit without a holder. "" if it has a holder, or only processes of the
        system or of sessions use it.
        """
        users = [owner for owner in self._owners[unit] if owner.is_scheduled or owner.container or owner.login]
        if unit in self.holders or not users:
            return ""
        sources = sorted({self._known[who].source for owner in users for who in _whos(owner) if who in self._known})
        if sources:
            return (
                f"in use by {self._join(users)}, but {' and '.join(sources)} did not allocate it to {self._join(users)}"
            )
        return f"in use by {self._join(users)}, which no source reports"

    def _join(self, owners: Iterable[ProcessOwner]) -> str:
        names = sorted({self._describe(owner) for owner in owners})
        more = f" and {len(names) - NAMED_MAX} more" if len(names) > NAMED_MAX else ""
        return ", ".join(names[:NAMED_MAX]) + more

    def _describe(self, owner: ProcessOwner) -> str:
        if owner.job:
            return f"job {owner.job}"
        if owner.slurm:
            return "a Slurm job whose id is unknown"
        if owner.pods:
            named = next((self._known[who] for who in _whos(owner) if who in self._known), None)
            return f"pod {owner.pods[-1]}" if named is None else _short(named)
        return f"container {owner.container[:12]}" if owner.container else "a login"


def _whos(owner: ProcessOwner) -> tuple[Who, ...]:
    """Returns every pod and job that a process belongs to. If a slurmd in a pod started the process as a job, it
    belongs to both.
    """
    pods = tuple(("pod", pod) for pod in owner.pods)
    return (*pods, ("job", owner.job)) if owner.job else pods


def _short(holder: Holder) -> str:
    return holder.label if holder.key.scheduler == "slurm" else f"pod {holder.namespace}/{holder.pod}"
