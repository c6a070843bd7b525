"""Renders a view as JSON, for scripts: the values of the table with full precision, null if unknown."""

from __future__ import annotations

import json
from typing import Any

from gpu_exporter.agent.exposition.health import describe_recovery, judge_health, list_gaps
from gpu_exporter.agent.exposition.rows import list_rows
from gpu_exporter.agent.exposition.training import describe_training
from gpu_exporter.common.model.rows import Row
from gpu_exporter.common.model.totals import UnitTotals
from gpu_exporter.common.model.views import AllocationView, GpuView, Spin, View

JSON_TYPE = "application/json; charset=utf-8"


def render_json(view: View) -> str:
    """Returns one JSON document. Its keys are stable, and contain the units of measurement."""
    status = view.status
    return json.dumps(
        {
            "timestamp_seconds": view.wall,
            "version": status.version,
            "backend": status.backend,
            "note": status.note,
            "health": judge_health(view),
            "gaps": list_gaps(view),
            "devices_health": judge_health(view, devices_only=True),
            "devices_gaps": list_gaps(view, devices_only=True),
            "driver_up": status.driver_up,
            "driver_error": status.driver_error,
            "warnings": list(status.warnings),
            "gpus": [_gpu(gpu) for gpu in view.gpus],
            "rows": [_row(row) for row in list_rows(view)],
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
                }
                for s in status.sources
            ],
        },
        indent=1,
    )


def _gpu(gpu: GpuView) -> dict[str, Any]:
    identity, snapshot, facts = gpu.snapshot.identity, gpu.snapshot, gpu.snapshot.facts
    shown = snapshot.up and not gpu.withheld
    return {
        "gpu": identity.index if identity.index >= 0 else None,
        "uuid": identity.uuid,
        "name": identity.name,
        "pci_bus_id": identity.pci_bus_id,
        "up": shown,
        "hung": gpu.hung,
        "error": snapshot.error,
        "asks": describe_recovery(gpu) if shown else "",
        "age_seconds": gpu.age_s if snapshot.up else None,
        "mig_mode": identity.mig_mode,
        "utilization_ratio": facts.utilization if shown else None,
        "memory_used_bytes": facts.memory_used_bytes if shown else None,
        "memory_total_bytes": facts.memory_total_bytes if shown else None,
        "power_watts": facts.power_w if shown else None,
        "temperature_celsius": facts.temperature_celsius if shown else None,
        **_last_activity(gpu.totals),
        "instances": [
            {
                "mig": i.mig,
                "mig_uuid": i.uuid,
                "profile": i.profile,
                **_last_activity(gpu.instance_totals.get(i.uuid)),
            }
            for i in snapshot.instances
            if shown
        ],
    }


def _row(row: Row) -> dict[str, Any]:
    """Returns one line of the table: an allocation, or a GPU or MIG instance without a holder."""
    return {
        "gpu": row.gpu,
        "name": row.name,
        "utilization_ratio": row.utilization,
        "memory_used_bytes": row.memory_bytes,
        "power_watts": row.power_w,
        "temperature_celsius": row.temperature_celsius,
        "holder": row.holder,
        "owner": row.owner,
        "held_seconds": row.held_s,
        "idle_seconds": row.idle_s,
        "stalled_seconds": row.stalled_s,
        "state": row.state,
        "cause": row.cause,
        "why": row.why,
        "advice": row.advice,
        "throttle_reason": row.throttling.reason if row.throttling else "",
        "throttle_ratio": row.throttling.ratio if row.throttling else None,
        "age_seconds": row.age_s,
    }


def _last_activity(totals: UnitTotals | None) -> dict[str, Any]:
    """Returns time and witnesses of a unit's last activity, and the seconds of activity at utilization 0 by witness."""
    return {
        "last_active_timestamp_seconds": totals.last_active_wall if totals else None,
        "last_active_by": list(totals.active_by) if totals else [],
        "other_activity_seconds": dict(totals.other_s) if totals else {},
    }


def _allocation(view: AllocationView, wall: float) -> dict[str, Any]:
    unit, holder, totals = view.allocation.unit, view.allocation.holder, view.totals
    return {
        "gpu": view.gpu,
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
        "source": holder.source,
        "basis": view.allocation.basis,
        "doubt": view.allocation.contradiction or view.allocation.why,
        "confirmed_timestamp_seconds": wall - view.unconfirmed_s,
        "share": view.allocation.share,
        "share_ratio": view.allocation.share_ratio,
        "start_timestamp_seconds": totals.start_wall,
        "idle_run_seconds": totals.idle_run_s if totals.known else None,
        "stalled_run_seconds": view.stalled_run_s,
        "stall": _stall(view.spin),
        "stalled_seconds": totals.stalled_s if totals.known else None,
        "pending_seconds": totals.pending_s if totals.known else None,
        "busy_seconds": totals.busy_s if totals.known else None,
        "observed_seconds": totals.observed_s if totals.known else None,
        "utilization_ratio": view.utilization,
        "memory_used_bytes": view.memory_used_bytes,
        "processes": view.processes,
        "host_activity_ratio": view.host.cpu_ratio if view.host is not None else None,
        "host_io_bytes_per_second": view.host.io_bytes_per_s if view.host is not None else None,
        "state": view.verdict.state,
        "evidence": view.verdict.evidence,
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
