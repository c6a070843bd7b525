"""Turns a node's records into the view of one moment, for the daemon and for `--once`. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from gpu_exporter.agent.node.conditions import why_unusable
from gpu_exporter.common.model.causes import Causes
from gpu_exporter.common.model.readings import Facts
from gpu_exporter.common.model.records import GpuRecord, HolderRecord, NodeRecords
from gpu_exporter.common.model.totals import HolderTotals, UnitTotals
from gpu_exporter.common.model.views import (
    AgentStatus,
    AllocationView,
    GpuView,
    Throttling,
    Verdict,
    View,
)
from gpu_exporter.diagnosis.interface import IDLE_STATES, NOT_JUDGED, STALLED, Findings

UNUSABLE = "unusable"  # the reason in gpu_allocation_activity_unknown


class ViewRules(NamedTuple):
    """Time limits in seconds.

    - `withhold_s`: a reading that is older than this is not shown.
    - `keep_last_s`: a holder that no source has confirmed for this time counts as gone.
    """

    withhold_s: float
    keep_last_s: float


def build_view(records: NodeRecords, status: AgentStatus, findings: Findings, rules: ViewRules) -> View:
    throttling = findings.throttling
    gpus = {key: _view_gpu(gpu, records.monotonic, rules, throttling.get(key)) for key, gpu in records.gpus.items()}
    allocations = [
        _view_allocation(record, gpus[record.allocation.unit.uuid], findings, records.wall)
        for record in _shown(records, rules)
    ]
    allocations.sort(key=lambda view: (view.gpu, view.mig, view.allocation.holder.key))
    return View(records.wall, status, tuple(gpus.values()), tuple(allocations), records.tenants)


def list_standings(records: NodeRecords, rules: ViewRules) -> Iterator[tuple[HolderRecord, GpuRecord, str]]:
    """Yields each shown allocation, its GPU, and why its state is unknown now ("" if it is known)."""
    for record in _shown(records, rules):
        gpu = records.gpus[record.allocation.unit.uuid]
        yield record, gpu, _why_unknown(record, _view_gpu(gpu, records.monotonic, rules))[0]


def _shown(records: NodeRecords, rules: ViewRules) -> Iterator[HolderRecord]:
    for record in records.holders:
        # Attribution drops a mapping after keep_last. So an older mapping here means that the polls themselves hang.
        keep_s = max(rules.keep_last_s, record.stale_s)
        if record.allocation.unit.uuid in records.gpus and record.unconfirmed_s <= keep_s:
            yield record


def _view_gpu(record: GpuRecord, now: float, rules: ViewRules, throttling: Throttling | None = None) -> GpuView:
    age = now - record.snapshot.monotonic
    return GpuView(
        snapshot=record.snapshot,
        age_s=age,
        withheld=not record.snapshot.up or record.hung or age > rules.withhold_s,
        hung=record.hung,
        totals=record.totals.get(""),
        instance_totals={uuid: totals for uuid, totals in record.totals.items() if uuid},
        xids=record.xids,
        not_free=record.not_free,
        allocatable=record.allocatable,
        throttling=throttling,
        links=record.links,
    )


def _why_unknown(record: HolderRecord, gpu: GpuView) -> tuple[str, str]:
    """Returns why an allocation's state is unknown now, as a text and as one word. Both are "" if it is known.

    Such a reason has priority over the judgement of the last window.
    """
    allocation = record.allocation
    if gpu.snapshot.away:
        return gpu.snapshot.error, "away"
    if gpu.withheld:
        return "the GPU does not answer", "no_answer"
    if not record.is_confirmed:
        return f"no source has confirmed the holder for {record.unconfirmed_s:.0f} s", "unconfirmed"
    if allocation.contradiction:
        return allocation.contradiction, "contradiction"
    if not allocation.why and record.totals.idle_run_s and (problem := why_unusable(gpu)):
        # The holder may be idle because its programs fail on the GPU, and this is no fault of the holder.
        return f"idle, but the GPU is unusable: {problem}", UNUSABLE
    return allocation.why, allocation.obstacle


def _obstacle(record: HolderRecord, totals: HolderTotals, obstacle: str) -> str:
    """Returns why the allocation has no idle run, as one word; "" if it has an idle run."""
    if totals.known and totals.idle_run_s is not None:
        return ""
    if obstacle:
        return obstacle
    if record.allocation.is_shared:
        return "shared"
    return "no_sample" if totals.known else "no_source"


def _say_ended(idle_run_s: float | None, totals: UnitTotals | None, wall: float) -> str:
    """Returns why a holder is no longer idle: activity or unknown time ended the idle run."""
    if idle_run_s is None:
        return "the exporter last saw the holder idle; its present activity is unknown"
    ended = "its idle time has ended since its state was last judged"
    if totals is None or totals.last_active_wall is None or not totals.active_by:
        return ended
    return f"{ended}; {' and '.join(totals.active_by)} showed activity {wall - totals.last_active_wall:.0f} s ago"


def _view_allocation(record: HolderRecord, gpu: GpuView, findings: Findings, wall: float) -> AllocationView:
    allocation, totals, snapshot = record.allocation, record.totals, gpu.snapshot
    unit = allocation.unit
    if gpu.withheld or not record.is_confirmed:
        totals = totals._replace(idle_run_s=None)  # 0 would mean that the holder works
    why, obstacle = _why_unknown(record, gpu)
    if obstacle == UNUSABLE:
        totals = totals._replace(idle_run_s=None)
    verdict = Verdict("unknown", why) if why else findings.verdicts.get(record.id, NOT_JUDGED)
    judged = verdict
    if verdict.state in IDLE_STATES and not totals.idle_run_s:
        whole = gpu.instance_totals.get(unit.mig_uuid) if unit.mig_uuid else gpu.totals
        verdict = Verdict("unknown", _say_ended(totals.idle_run_s, whole, wall))
    spin = None if gpu.withheld or not record.is_confirmed or why else record.spin
    if verdict.state == STALLED and not (spin is not None and spin.is_stall):
        verdict = Verdict("unknown", "its run without progress has ended since its state was last judged")
    instance = next((i for i in snapshot.instances if i.uuid == unit.mig_uuid), None)
    is_alone = not (allocation.is_shared or allocation.contradiction)
    fresh = record.is_confirmed and is_alone and not gpu.withheld and (not unit.mig_uuid or instance is not None)
    facts = (snapshot.facts if instance is None else instance.facts) if fresh else Facts()
    use = record.use if record.is_confirmed and not gpu.withheld else None
    ratio = record.ratio if record.is_confirmed and not (gpu.withheld or allocation.contradiction) else None
    memory = facts.memory_used_bytes if is_alone else use.memory_bytes if use is not None else None
    return AllocationView(
        allocation=allocation,
        gpu=snapshot.identity.index,
        label=snapshot.identity.label,
        mig=record.mig,
        totals=totals,
        obstacle=_obstacle(record, totals, obstacle),
        verdict=verdict,
        unconfirmed_s=record.unconfirmed_s,
        utilization=facts.utilization if is_alone else ratio,
        memory_used_bytes=memory,
        power_w=facts.power_w,
        temperature_celsius=snapshot.facts.temperature_celsius if fresh else None,
        processes=use.processes if use is not None else None,
        host=record.host if record.is_confirmed else None,
        spin=spin,
        training=record.training if record.is_confirmed and not allocation.contradiction else None,
        causes=findings.causes.get(record.id, Causes()) if verdict is judged and not why else Causes(),
    )
