"""The data of a node at one moment, for the view and for diagnosis."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from gpu_exporter.common.model.holders import Allocation, AllocationId, TenantKey, Use
from gpu_exporter.common.model.readings import DeviceSnapshot, XidCounts
from gpu_exporter.common.model.totals import HolderTotals, TenantTotals, UnitTotals
from gpu_exporter.common.model.training import TrainingView
from gpu_exporter.common.model.views import HostWork, Spin


class GpuRecord(NamedTuple):
    """The data of one GPU. `hung`: a driver call for the GPU is past its deadline. `links`: the most NVLinks that were
    up at the same time.
    """

    snapshot: DeviceSnapshot
    hung: bool
    totals: Mapping[str, UnitTotals]  # by mig_uuid, "" for the GPU itself
    xids: XidCounts | None
    not_free: Mapping[str, str]  # by mig_uuid
    allocatable: bool | None = None
    links: int = 0


class HolderRecord(NamedTuple):
    """The data of one allocation, for the view and for diagnosis.

    - `unconfirmed_s`: seconds since a source last confirmed it. Above `stale_s` the allocation is unknown.
    - `mig`: the instance's position, even while the GPU does not answer.
    - `use`: processes and memory of the holder on the unit, None while unknown. `ratio`: their share of its work.
    - `host`: the work of the whole holder outside its GPUs, None while unknown.
    - `spin`: the present run of full utilization without progress, None if the exporter cannot watch the unit.
    - `training`: the report of the holder's training loop, None without a report.
    """

    allocation: Allocation
    totals: HolderTotals
    unconfirmed_s: float
    stale_s: float
    mig: str
    use: Use | None = None
    ratio: float | None = None
    host: HostWork | None = None
    spin: Spin | None = None
    training: TrainingView | None = None

    @property
    def is_confirmed(self) -> bool:
        return self.unconfirmed_s <= self.stale_s

    @property
    def id(self) -> AllocationId:
        return self.allocation.unit, self.allocation.holder.key


class NodeRecords(NamedTuple):
    """All GPUs, holders and tenants of a node at one moment."""

    monotonic: float
    wall: float
    gpus: Mapping[str, GpuRecord]  # by UUID, or by position if the UUID is unknown
    holders: tuple[HolderRecord, ...]
    tenants: tuple[tuple[TenantKey, TenantTotals], ...]
