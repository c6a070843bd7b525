"""Turns a view into series: metric families with labels and values. Every text renderer uses them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from math import isfinite
from typing import NamedTuple, TypeAlias

from gpu_exporter.agent.exposition import catalog
from gpu_exporter.agent.exposition.training import list_training
from gpu_exporter.agent.node.conditions import list_conditions
from gpu_exporter.common.model.metrics import Family, Sample
from gpu_exporter.common.model.readings import XID_CLASSES, XidCounts
from gpu_exporter.common.model.totals import UnitTotals
from gpu_exporter.common.model.units import NO_PLACE, UnitId
from gpu_exporter.common.model.views import AllocationView, GpuView, View


class Series(NamedTuple):
    """One family with its label names and its rows of (label values, value)."""

    family: Family
    label_names: tuple[str, ...]
    rows: list[tuple[tuple[str, ...], float]]


@lru_cache(maxsize=2048)  # more than the units and allocations of one node
def _same(*labels: str) -> tuple[str, ...]:
    """Returns equal labels as the same object, so that rows of two scrapes are compared without each label."""
    return labels


_Value: TypeAlias = "Sample | tuple[Family, tuple[str, ...], float | None]"  # family, further labels, value


class _Table:
    """Collects rows by family, in order of first appearance."""

    def __init__(self) -> None:
        self.series: dict[str, Series] = {}

    def add(
        self,
        family: Family,
        place_names: tuple[str, ...],
        place: tuple[str, ...],
        value: float | None,
        more: tuple[str, ...] = (),
    ) -> None:
        if value is None or not isfinite(value):  # NaN and infinity are not published
            return
        series = self.series.get(family.name)
        if series is None:
            series = self.series[family.name] = Series(family, place_names + family.labels, [])
        series.rows.append((place + more if more else place, value))

    def add_all(self, place_names: tuple[str, ...], place: tuple[str, ...], values: Iterable[_Value]) -> None:
        """Adds the values of one place. Faster than `add` for each."""
        known = self.series
        for family, more, value in values:
            series = known.get(family.name)
            if series is None or value is None or not isfinite(value):
                self.add(family, place_names, place, value, more)
            else:
                series.rows.append((place + more if more else place, value))


def _plain(families: Sequence[Family], values: Sequence[float | None]) -> Iterable[_Value]:
    """Returns the values of these families, without further labels."""
    return zip(families, [()] * len(families), values, strict=True)


def list_series(view: View) -> list[Series]:
    table = _Table()
    _add_self(table, view)
    held = {allocation.allocation.unit.uuid for allocation in view.allocations}
    for gpu in view.gpus:
        _add_gpu(table, gpu, gpu.snapshot.identity.uuid in held, attribution=view.status.attribution_known)
    for allocation in view.allocations:
        _add_allocation(table, allocation)
    for tenant, totals in view.tenants:
        table.add_all(catalog.TENANT_LABELS, tenant, _plain(catalog.TENANT_FAMILIES, totals))
    return list(table.series.values())


def _add_gpu(table: _Table, gpu: GpuView, held: bool, attribution: bool) -> None:
    identity = gpu.snapshot.identity
    if identity.index == NO_PLACE and not identity.uuid:
        table.add(catalog.GPU_MISSING, (), (), 1.0, (identity.pci_bus_id,))
        return
    names, place = catalog.DEVICE_LABELS, _same(identity.label, identity.uuid)
    info = (
        identity.name,
        identity.driver_version,
        identity.pci_bus_id,
        str(identity.minor) if identity.minor >= 0 else "",
        identity.mig_mode,
    )
    table.add(catalog.GPU_INFO, names, place, 1.0, info)
    if not gpu.snapshot.away:
        table.add(catalog.GPU_UP, names, place, float(gpu.snapshot.up and not gpu.withheld and not gpu.hung))
    if attribution and (held or not gpu.not_free):
        table.add(catalog.GPU_ALLOCATED, names, place, float(held))
    if gpu.allocatable is not None:
        table.add(catalog.GPU_ALLOCATABLE, names, place, float(gpu.allocatable))
    for condition in list_conditions(gpu):
        table.add(catalog.GPU_CONDITION, names, place, 1.0, (condition.name, condition.severity))
    if gpu.totals is not None:
        _add_totals(table, catalog.UNIT_FAMILIES, catalog.GPU_OTHER_ACTIVITY, names, place, gpu.totals)
    if gpu.xids is not None:
        _add_xids(table, names, place, gpu.xids)
    if gpu.withheld:
        return
    table.add_all(names, place, gpu.snapshot.samples)
    for instance in gpu.snapshot.instances:
        mig_place = _same(*place, instance.mig, instance.uuid)
        table.add_all(catalog.MIG_LABELS, mig_place, instance.samples)
        totals = gpu.instance_totals.get(instance.uuid)
        if totals is not None:
            other = catalog.MIG_OTHER_ACTIVITY
            _add_totals(table, catalog.MIG_UNIT_FAMILIES, other, catalog.MIG_LABELS, mig_place, totals)


def _add_xids(table: _Table, names: tuple[str, ...], place: tuple[str, ...], counts: XidCounts) -> None:
    events = dict.fromkeys(XID_CLASSES, 0)
    for xid, kind, number, last_wall in counts.codes:
        events[kind] += number
        table.add(catalog.GPU_XID_ERRORS, names, place, float(number), (str(xid), kind))
        table.add(catalog.GPU_XID_LAST, names, place, last_wall, (str(xid), kind))
    for kind, number in events.items():
        table.add(catalog.GPU_XID_EVENTS, names, place, float(number), (kind,))


def _add_totals(
    table: _Table,
    families: tuple[Family, ...],
    other: Family,
    names: tuple[str, ...],
    place: tuple[str, ...],
    totals: UnitTotals,
) -> None:
    values = (
        totals.busy_s,
        totals.observed_s,
        totals.idle_s,
        float(totals.witnesses),
        totals.last_active_wall,
        totals.unattributed_s,
        totals.unattributed_j,
    )
    table.add_all(names, place, _plain(families, values))
    for witness, seconds in totals.other_s.items():
        table.add(other, names, place, seconds, (witness,))


def allocation_place(view: AllocationView) -> tuple[str, ...]:
    """Returns the values of ALLOCATION_LABELS."""
    unit, holder = view.allocation.unit, view.allocation.holder
    return _same(
        view.label or str(view.gpu),
        unit.uuid,
        view.mig,
        unit.mig_uuid,
        holder.key.scheduler,
        holder.namespace,
        holder.pod,
        holder.container,
        holder.job_id,
    )


def _add_allocation(table: _Table, view: AllocationView) -> None:
    names, place = catalog.ALLOCATION_LABELS, allocation_place(view)
    holder, totals = view.allocation.holder, view.totals
    info = (
        holder.cluster,
        holder.user,
        holder.account,
        holder.partition,
        holder.qos,
        holder.array_job_id,
        holder.array_task_id,
        holder.het_job_id,
        holder.het_job_offset,
        holder.pod_uid,
        holder.source,
        view.allocation.share,
        holder.resource,
        holder.identity,
    )
    host = view.host
    values: list[_Value] = [
        (catalog.ALLOCATION_INFO, info, 1.0),
        (catalog.ALLOCATION_SHARE, (), view.allocation.share_ratio),
        (catalog.ALLOCATION_HOLDER_UNITS, (), holder.units),
        (catalog.ALLOCATION_START, (), totals.start_wall),
        (catalog.ALLOCATION_HELD, (), totals.held_s),
        (catalog.ALLOCATION_UTILIZATION, (), view.utilization),
        (catalog.ALLOCATION_MEMORY, (), view.memory_used_bytes),
        (catalog.ALLOCATION_PROCESSES, (), view.processes),
        (catalog.ALLOCATION_POWER, (), view.power_w),
        (catalog.ALLOCATION_TEMPERATURE, (), view.temperature_celsius),
        (catalog.ALLOCATION_HOST_ACTIVITY, (), host.cpu_ratio if host is not None else None),
        (catalog.ALLOCATION_HOST_CPUS, (), host.cpus if host is not None else None),
        (catalog.ALLOCATION_HOST_IO, (), host.io_bytes_per_s if host is not None else None),
    ]
    if totals.known:
        values += [
            (catalog.ALLOCATION_LAST_ACTIVE, (), totals.last_active_wall),
            (catalog.ALLOCATION_IDLE_RUN, (), totals.idle_run_s),
            (catalog.ALLOCATION_IDLE_WITNESSES, (), None if totals.idle_run_s is None else totals.idle_run_witnesses),
            (catalog.ALLOCATION_LONGEST_GAP, (), totals.longest_gap_s or None),
            (catalog.ALLOCATION_BUSY, (), totals.busy_s),
            (catalog.ALLOCATION_OBSERVED, (), totals.observed_s),
            (catalog.ALLOCATION_IDLE, (), totals.idle_s),
            (catalog.ALLOCATION_LOW, (), totals.low_s),
            (catalog.ALLOCATION_HIGH, (), totals.high_s),
        ]
        if view.spin is not None or totals.stalled_s:
            values.append((catalog.ALLOCATION_STALLED, (), totals.stalled_s))
        values.append((catalog.ALLOCATION_STALLED_RUN, (), view.stalled_run_s))
    method = catalog.ENERGY_METHODS.get(view.allocation.share, catalog.ENERGY_DIVIDED)
    values.append((catalog.ALLOCATION_ENERGY, (method,), totals.energy_j))
    values.append((catalog.ALLOCATION_STATE, (view.verdict.state,), 1.0))
    table.add_all(names, place, values)
    for cause in view.causes.published:
        table.add(catalog.ALLOCATION_CAUSE, names, place, 1.0, (cause.name, cause.confidence))
        for quantity, value in cause.values:
            table.add(catalog.ALLOCATION_CAUSE_VALUE, names, place, value, (cause.name, quantity))
    if view.training is not None:
        table.add_all(names, place, ((family, more, value) for family, value, more in list_training(view.training)))
    if view.obstacle:
        table.add(catalog.ALLOCATION_UNKNOWN, names, place, 1.0, (view.obstacle,))


def _add_self(table: _Table, view: View) -> None:
    status = view.status
    table.add(catalog.BUILD_INFO, (), (), 1.0, (status.version, status.backend))
    table.add(catalog.DRIVER_UP, (), (), float(status.driver_up))
    table.add(catalog.DEVICES_VISIBLE, (), (), float(status.devices_visible))
    table.add(catalog.DEVICES_EXPECTED, (), (), float(status.devices_expected or status.counted_only))
    for driver, number in status.unmanaged:
        table.add(catalog.DEVICES_UNMANAGED, (), (), float(number), (driver,))
    if status.sources:
        table.add(catalog.DEVICES_UNATTRIBUTED, (), (), float(_count_unattributed(view)))
    table.add(catalog.SAMPLE_INTERVAL, (), (), status.sample_interval_s)
    table.add(catalog.LAST_SAMPLE, (), (), status.last_sample_wall)
    if status.state is not None:
        table.add(catalog.STATE_LAST_WRITE, (), (), status.state.last_write_wall)
        table.add(catalog.STATE_WRITE_ERRORS, (), (), float(status.state.write_errors))
    for name, success, duration in _collector_outcomes(view):
        table.add(catalog.COLLECTOR_SUCCESS, (), (), success, (name,))
        table.add(catalog.COLLECTOR_DURATION, (), (), duration, (name,))
    for call, error, count in status.errors:
        table.add(catalog.DRIVER_ERRORS, (), (), float(count), (call, error))
    for task, failures in status.task_failures:
        table.add(catalog.TASK_FAILURES, (), (), float(failures), (task,))
    for address, sxid, severity, number, last_wall in status.sxids:
        table.add(catalog.NVSWITCH_SXIDS, (), (), float(number), (address, str(sxid), severity))
        table.add(catalog.NVSWITCH_SXID_LAST, (), (), last_wall, (address, str(sxid), severity))
    for source in status.sources:
        table.add(catalog.ATTRIBUTION_UP, (), (), float(source.up), (source.name,))
        table.add(catalog.ATTRIBUTION_COMPLETE, (), (), float(source.complete), (source.name,))
        table.add(catalog.ATTRIBUTION_LAST_SUCCESS, (), (), source.last_success_wall, (source.name,))
        if source.closed:
            table.add(catalog.NODE_CLOSED, (), (), 1.0, (source.name, source.closed))
        if source.name == "slurm":
            table.add(catalog.JOBS_MISSED, (), (), float(source.missed), (source.name,))
        table.add(catalog.ATTRIBUTION_CONFLICTS, (), (), float(source.conflicts), (source.name,))


def _count_unattributed(view: View) -> int:
    held = {allocation.allocation.unit for allocation in view.allocations}
    count = 0
    for gpu in view.gpus:
        uuid = gpu.snapshot.identity.uuid
        for part in [instance.uuid for instance in gpu.snapshot.instances] or [""]:
            is_known = view.status.attribution_known and not gpu.not_free.get(part)
            count += bool(uuid) and not is_known and held.isdisjoint((UnitId(uuid), UnitId(uuid, part)))
    return count


def _collector_outcomes(view: View) -> Iterator[tuple[str, float, float]]:
    """Yields the result of each collector over all GPUs: name, 1 (no GPU failed) or 0, longest duration in seconds."""
    longest: dict[str, float] = {}
    failed: set[str] = set()
    for found in (view.status.outcomes, *(gpu.snapshot.outcomes for gpu in view.gpus)):
        for name, success, duration_s, _ in found:
            if duration_s > longest.get(name, -1.0):
                longest[name] = duration_s
            if not success:
                failed.add(name)
    for name, duration_s in longest.items():
        yield name, float(name not in failed), duration_s
