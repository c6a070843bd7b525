"""Makes immutable records of a node's GPUs, holders and tenants at one moment. Pure: changes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from gpu_exporter.agent.attribution.holders import HolderUpdate
from gpu_exporter.agent.collectors.processes import PROCESSES
from gpu_exporter.agent.ledger.ledger import Ledger
from gpu_exporter.agent.ledger.state import StateFile
from gpu_exporter.agent.node.place import Placed
from gpu_exporter.agent.node.spins import NodeSpins
from gpu_exporter.agent.sampling.events import XidBook
from gpu_exporter.common.model.holders import Allocation, Grant, TenantKey
from gpu_exporter.common.model.readings import DeviceSnapshot
from gpu_exporter.common.model.records import GpuRecord, HolderRecord, NodeRecords
from gpu_exporter.common.model.totals import TenantTotals, UnitTotals
from gpu_exporter.common.model.units import UnitId

NOT_OFFERED = (
    "the kubelet does not offer this GPU or instance to pods: the device plugin is down, excludes it or reports it "
    "as unhealthy"
)


class NodeRecorder(NamedTuple):
    """The data from which the records are made. The node's lock protects it.

    - `answered`: the last answer of each GPU, by UUID.
    - `proven`: the driver has listed a process, so that an empty list means no process.
    - `now`, `wall`: the present moment in monotonic and Unix seconds.
    """

    ledger: Ledger
    state: StateFile | None
    spins: NodeSpins
    xids: XidBook
    held: HolderUpdate
    answered: Mapping[str, DeviceSnapshot]
    proven: bool
    now: float
    wall: float

    def write(self, placed: Mapping[str, Placed]) -> NodeRecords:
        """Returns the records of the GPUs as they are shown, and of all holders and tenants."""
        gpus = {key: self._record_gpu(each) for key, each in placed.items()}
        found = (self._record_holder(allocation, grant) for allocation, grant in self.held.resolution.allocations)
        holders = tuple(record for record in found if record is not None)
        return NodeRecords(self.now, self.wall, gpus, holders, tuple(self._list_tenants()))

    def _record_gpu(self, placed: Placed) -> GpuRecord:
        snapshot = placed.snapshot
        uuid = snapshot.identity.uuid
        here = ("", *(instance.uuid for instance in snapshot.instances))
        totals = {
            mig_uuid: found for mig_uuid in here if (found := self._read_unit(UnitId(uuid, mig_uuid))) is not None
        }
        shown = snapshot if self.proven else _without_processes(snapshot)
        not_free: dict[str, str] = {}
        allocatable: bool | None = None
        if self.held.offered is not None:
            offered = {unit.mig_uuid for unit in self.held.offered if unit.uuid == uuid}
            allocatable = bool(offered)
            not_free = {mig_uuid: NOT_OFFERED for mig_uuid in here if mig_uuid not in offered}
        not_free |= {used.mig_uuid: text for used, text in self.held.in_use.items() if used.uuid == uuid}
        return GpuRecord(shown, placed.hung, totals, self.xids.counts(uuid), not_free, allocatable, placed.links)

    def _record_holder(self, allocation: Allocation, grant: Grant) -> HolderRecord | None:
        unit, key = allocation.unit, allocation.holder.key
        totals = self.ledger.holder_totals(allocation, self.now, self.wall)
        if totals is None:
            return None
        if self.state is not None:
            totals = self.state.bound_holder(unit, key, totals)
        answered = self.answered.get(unit.uuid)  # a holder keeps a GPU that was lost before the exporter's start
        instances = answered.instances if answered is not None else ()
        return HolderRecord(
            allocation,
            totals,
            unconfirmed_s=self.now - grant.confirmed,
            stale_s=self.ledger.rules.longest_unconfirmed_s(grant.renewed_s),
            mig=next((instance.mig for instance in instances if instance.uuid == unit.mig_uuid), ""),
            use=self.held.uses.get((unit, key)),
            ratio=self.ledger.newest_ratio(allocation, self.now),
            spin=self.spins.boards.report(unit, key),
        )

    def _list_tenants(self) -> Iterator[tuple[TenantKey, TenantTotals]]:
        for key, totals in self.ledger.tenants.totals(self.now):
            yield key, totals if self.state is None else self.state.bound_tenant(key, totals)

    def _read_unit(self, unit: UnitId) -> UnitTotals | None:
        totals = self.ledger.unit_totals(unit, self.now, self.wall)
        if totals is None or self.state is None:
            return totals
        return self.state.bound_unit(unit, totals)


def _without_processes(snapshot: DeviceSnapshot) -> DeviceSnapshot:
    """Removes the process count from a snapshot, because a count of 0 may be wrong.

    In a container NVML returns an empty list, so a count of 0 proves nothing until the driver has listed a process.
    """
    return snapshot._replace(
        samples=tuple(sample for sample in snapshot.samples if sample.family not in PROCESSES.families),
        facts=snapshot.facts._replace(compute_processes=None, graphics_processes=None),
    )
