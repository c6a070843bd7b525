"""The looks at the holders' hosts, kept for the causes, and joined with what their GPUs did in the same time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from gpu_exporter.attribution.contradict import Who, identify
from gpu_exporter.diagnosis.causes.case import HostLook
from gpu_exporter.diagnosis.hold import AllocationId
from gpu_exporter.host.subject import HostSubject, RankedGpu
from gpu_exporter.model.evidence import HostEvidence
from gpu_exporter.model.holders import Allocation
from gpu_exporter.model.readings import DeviceSnapshot
from gpu_exporter.model.units import UnitId

KEEP_S = 600.0  # checkpoints are found over ten minutes, other causes over less
LOOKS_MAX = 40  # one every 15 s


class NodeEvidence:
    """Not thread-safe: the node's lock protects it."""

    def __init__(self) -> None:
        self._looks: dict[Who, deque[HostEvidence]] = {}

    def note(self, who: Who, evidence: HostEvidence) -> None:
        """Keep one look. What happened before a gap is forgotten: a holder that was well meanwhile began anew."""
        looks = self._looks.setdefault(who, deque(maxlen=LOOKS_MAX))
        if looks and evidence.start > looks[-1].end + 1.0:
            looks.clear()
        looks.append(evidence)
        while evidence.end - looks[0].start > KEEP_S:
            looks.popleft()

    def keep(self, present: Iterable[Allocation]) -> None:
        """Forget the holders that have left."""
        whos = {identify(allocation.holder) for allocation in present}
        self._looks = {who: looks for who, looks in self._looks.items() if who in whos}

    def looks(
        self, who: Who | None, units: Collection[UnitId], mean: Callable[[UnitId, float, float], float | None]
    ) -> tuple[HostLook, ...]:
        """The looks at a holder. `units`: what it holds. `mean`: the mean utilization of a unit between two times."""
        found = self._looks.get(who, ()) if who is not None else ()
        return tuple(HostLook(each, _mean(mean(unit, each.start, each.end) for unit in units)) for each in found)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def list_subjects(
    allocations: Sequence[Allocation],
    unwell: Collection[AllocationId],
    answered: Mapping[str, DeviceSnapshot],
    *,
    processes_proven: bool,
) -> list[HostSubject]:
    """The holders of these allocations, with all their GPUs here. `answered`: GPUs by UUID."""
    wanted = {identify(each.holder) for each in allocations if (each.unit, each.holder.key) in unwell} - {None}
    gpus: dict[Who, dict[str, RankedGpu]] = {}
    for each in allocations:
        who, snapshot = identify(each.holder), answered.get(each.unit.uuid)
        if who is None or who not in wanted or snapshot is None:
            continue
        listed = snapshot.processes.processes if snapshot.processes is not None else ()
        pids = tuple(process.pid for process in listed)
        gpus.setdefault(who, {})[each.unit.uuid] = RankedGpu(each.unit.uuid, snapshot.identity.cpus, pids)
    known = processes_proven and all(snapshot.processes is not None for snapshot in answered.values())
    return [HostSubject(who, tuple(found.values()) if known else None) for who, found in gpus.items()]
