"""Keeps the looks (readings of the holders' hosts) for the rules for causes, and selects the holders to read."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence

from gpu_exporter.common.model.holders import Allocation, AllocationId, Who, identify
from gpu_exporter.common.model.readings import DeviceSnapshot
from gpu_exporter.diagnosis.causes.case import HostLook
from gpu_exporter.diagnosis.host.subject import HostSubject, RankedGpu

KEEP_S = 600.0  # checkpoints are found over ten minutes, other causes over less
LOOKS_MAX = 40  # one every 15 s


class NodeEvidence:
    """The recent looks at the node's holders. Not thread-safe: NodeDiagnosis holds its lock during each call."""

    def __init__(self) -> None:
        self._looks: dict[Who, deque[HostLook]] = {}

    def note(self, who: Who, look: HostLook) -> None:
        """Keeps one look. Looks before a gap are dropped, because the holder was healthy in the gap."""
        looks, evidence = self._looks.setdefault(who, deque(maxlen=LOOKS_MAX)), look.evidence
        if looks and evidence.start > looks[-1].evidence.end + 1.0:
            looks.clear()
        looks.append(look)
        while len(looks) > 1 and evidence.end - looks[0].evidence.start > KEEP_S:
            looks.popleft()

    def keep(self, present: Iterable[Allocation]) -> None:
        """Forgets the holders that have left."""
        whos = {identify(allocation.holder) for allocation in present}
        self._looks = {who: looks for who, looks in self._looks.items() if who in whos}

    def looks(self, who: Who | None) -> tuple[HostLook, ...]:
        """Returns the looks at a holder, oldest first."""
        return tuple(self._looks.get(who, ())) if who is not None else ()


def list_subjects(
    allocations: Sequence[Allocation],
    unwell: Collection[AllocationId],
    answered: Mapping[str, DeviceSnapshot],
    *,
    processes_proven: bool,
) -> list[HostSubject]:
    """Lists the holders of the allocations in `unwell`, with all their GPUs here. `answered`: snapshots by UUID."""
    wanted = {identify(each.holder) for each in allocations if (each.unit, each.holder.key) in unwell} - {None}
    gpus: dict[Who, dict[str, RankedGpu]] = {}
    unknown: set[Who] = set()
    for each in allocations:
        who, snapshot = identify(each.holder), answered.get(each.unit.uuid)
        if who is None or who not in wanted or snapshot is None:
            continue
        if snapshot.processes is None or not processes_proven:
            unknown.add(who)
        listed = snapshot.processes.processes if snapshot.processes is not None else ()
        pids = tuple(process.pid for process in listed)
        gpus.setdefault(who, {})[each.unit.uuid] = RankedGpu(each.unit.uuid, snapshot.identity.cpus, pids)
    return [HostSubject(who, None if who in unknown else tuple(found.values())) for who, found in gpus.items()]
