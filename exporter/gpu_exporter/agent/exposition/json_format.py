"""Describes a view in plain values, for JSON and for the table: full precision, None if unknown."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from gpu_exporter.agent.exposition.health import judge_health, list_failed_checks, list_gaps, list_unchecked
from gpu_exporter.agent.exposition.training import describe_training
from gpu_exporter.agent.exposition.units import judge_unit
from gpu_exporter.agent.node.conditions import list_conditions
from gpu_exporter.common.model.meanings import STATES
from gpu_exporter.common.model.rows import Row, join_rows
from gpu_exporter.common.model.totals import UnitTotals
from gpu_exporter.common.model.units import UnitId
from gpu_exporter.common.model.views import AllocationView, GpuView, Spin, View

JSON_TYPE = "application/json; charset=utf-8"
FAULTS = frozenset(("throttled", "stalled", "lost", "missing", "hung", "stale"))  # have an advice without a cause


def render_json(view: View) -> str:
    """Returns one JSON document. Its keys are stable, and contain the units of measurement."""
    return json.dumps(describe_status(view), indent=1)


def list_rows(view: View) -> list[Row]:
    """Returns the rows of the table, by the same join as in `top`."""
    return list(join_rows(describe_status(view)))


def describe_status(view: View) -> dict[str, Any]:
    """Returns the status as docs/status.schema.json describes it."""
    status = view.status
    held = {allocation.allocation.unit for allocation in view.allocations}
    return {
        "timestamp_seconds": view.wall,
        "version": status.version,
        "backend": status.backend,
        "note": status.note,
        "health": judge_health(view),
        "gaps": list_gaps(view),
        "devices_health": judge_health(view, devices_only=True),
        "failed_checks": [each._asdict() for each in list_failed_checks(view)],
        "unchecked": list_unchecked(view),
        "driver_up": status.driver_up,
        "driver_error": status.driver_error,
        "warnings": list(status.warnings),
        "gpus": [_gpu(gpu, view, held) for gpu in view.gpus],
        "allocations": [_allocation(allocation, view.wall) for allocation in view.allocations],
        "tenants": [
            {
                **key._asdict(),
                "held_gpu_seconds": totals.held_s,
                "known_gpu_seconds": totals.known_s,
                "busy_gpu_seconds": totals.busy_s,
                "idle_gpu_seconds": totals.idle_s,
                "stalled_gpu_seconds": totals.stalled_s,
                "unproven_gpu_seconds": totals.unproven_s,
                "energy_joules": totals.energy_j,
            }
            for key, totals in view.tenants
        ],
        "attribution": [
            {
                "source": s.name,
                "up": s.up,
                "complete": s.complete,
                "devices": s.devices,
                "last_success_timestamp_seconds": s.last_success_wall,
                "error": s.error,
                "notice": s.notice,
                "closed": s.closed,
                "closed_reason": s.closed_reason,
            }
            for s in status.sources
        ],
    }


def _gpu(gpu: GpuView, view: View, held: Collection[UnitId]) -> dict[str, Any]:
    identity, snapshot, facts = gpu.snapshot.identity, gpu.snapshot, gpu.snapshot.facts
    shown = snapshot.up and not gpu.withheld
    throttling = gpu.throttling if shown else None
    failed = [] if snapshot.not_ready else [outcome.error for outcome in snapshot.outcomes if not outcome.success]
    judged = judge_unit(gpu, view, UnitId(identity.uuid), held)
    return {
        "gpu": identity.index if identity.index >= 0 else None,
        "uuid": identity.uuid,
        "name": identity.name,
        "pci_bus_id": identity.pci_bus_id,
        "up": shown,
        "hung": gpu.hung,
        "error": snapshot.error,
        **judged._asdict(),
        "advice": _advise(judged.state),
        "read_error": failed[0] if failed else "",
        "conditions": [condition._asdict() for condition in list_conditions(gpu)],
        "age_seconds": gpu.age_s if snapshot.up else None,
        "mig_mode": identity.mig_mode,
        "utilization_ratio": facts.utilization if shown else None,
        "memory_used_bytes": facts.memory_used_bytes if shown else None,
        "memory_total_bytes": facts.memory_total_bytes if shown else None,
        "power_watts": facts.power_w if shown else None,
        "temperature_celsius": facts.temperature_celsius if shown else None,
        "throttle_reason": throttling.reason if throttling else "",
        "throttle_ratio": throttling.ratio if throttling else None,
        **_last_activity(gpu.totals),
        "instances": [
            {
                "mig": i.mig,
                "mig_uuid": i.uuid,
                "profile": i.profile,
                **judge_unit(gpu, view, UnitId(identity.uuid, i.uuid), held)._asdict(),
                **_last_activity(gpu.instance_totals.get(i.uuid)),
            }
            for i in snapshot.instances
        ],
    }


def _advise(state: str) -> str:
    """Returns the advice for a state of FAULTS, for the owner if the owner can change it."""
    return (STATES[state].owner or STATES[state].site) if state in FAULTS else ""


def _last_activity(totals: UnitTotals | None) -> dict[str, Any]:
    """Returns when a unit was last active, and which witnesses showed it. Also returns, for each witness, the seconds
    of activity that it showed while utilization was 0.
    """
    return {
        "last_active_timestamp_seconds": totals.last_active_wall if totals else None,
        "last_active_by": list(totals.active_by) if totals else [],
        "other_activity_seconds": dict(totals.other_s) if totals else {},
    }


def _allocation(view: AllocationView, wall: float) -> dict[str, Any]:
    unit, holder, totals = view.allocation.unit, view.allocation.holder, view.totals
    return {
        "gpu": view.gpu if view.gpu >= 0 else None,
        "uuid": unit.uuid,
        "mig": view.mig,
        "mig_uuid": unit.mig_uuid,
        "scheduler": holder.key.scheduler,
        "namespace": holder.namespace,
        "pod": holder.pod,
        "container": holder.container,
        "pod_uid": holder.pod_uid,
        "job_id": holder.job_id,
        "array_job_id": holder.array_job_id,
        "array_task_id": holder.array_task_id,
        "het_job_id": holder.het_job_id,
        "het_job_offset": holder.het_job_offset,
        "slurm_cluster": holder.cluster,
        "user": holder.user,
        "account": holder.account,
        "partition": holder.partition,
        "qos": holder.qos,
        "holder": holder.label,
        "source": holder.source,
        "basis": view.allocation.basis,
        "doubt": view.allocation.contradiction or view.allocation.why,
        "confirmed_timestamp_seconds": wall - view.unconfirmed_s,
        "share": view.allocation.share,
        "share_ratio": view.allocation.share_ratio,
        "start_timestamp_seconds": totals.start_wall,
        "held_seconds": totals.held_s,
        "idle_seconds": totals.idle_s if totals.known else None,
        "energy_joules": totals.energy_j,
        "idle_run_seconds": totals.idle_run_s if totals.known else None,
        "stalled_run_seconds": view.stalled_run_s,
        "stall": _stall(view.spin),
        "stalled_seconds": totals.stalled_s if totals.known else None,
        "pending_seconds": totals.pending_s if totals.known else None,
        "busy_seconds": totals.busy_s if totals.known else None,
        "observed_seconds": totals.observed_s if totals.known else None,
        "utilization_ratio": view.utilization,
        "memory_used_bytes": view.memory_used_bytes,
        "power_watts": view.power_w,
        "processes": view.processes,
        "host_activity_ratio": view.host.cpu_ratio if view.host is not None else None,
        "host_cpus": view.host.cpus if view.host is not None else None,
        "host_io_bytes_per_second": view.host.io_bytes_per_s if view.host is not None else None,
        "state": view.verdict.state,
        "evidence": view.verdict.evidence,
        "advice": "" if any(cause.advice for cause in view.causes.ranked[:1]) else _advise(view.verdict.state),
        "causes": [{**cause._asdict(), "values": dict(cause.values)} for cause in view.causes.ranked],
        "cause_needs": list(view.causes.needs),
        "training": describe_training(view.training),
    }


def _stall(spin: Spin | None) -> dict[str, Any] | None:
    """Returns the holder's run without progress, with its confidence. None if the holder cannot be watched."""
    if spin is None:
        return None
    return {
        "run_seconds": spin.run_s,
        "confidence": spin.confidence,
        "evidence": spin.evidence,
        "against": spin.against,
        "unknown": spin.unknown,
    }
