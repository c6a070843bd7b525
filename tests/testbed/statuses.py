"""A status of a node that has the given rows: the inverse of the join, for tests of its readers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gpu_exporter.common.model.rows import Row

WALL = 1_700_000_000.0
SILENT = ("away", "lost", "missing", "hung", "stale")
ROW = Row("0", "H100", 0.5, 1.0, None, 40, "job 7", "", 60, None, "unknown", "")


def status_of(rows: Iterable[Row] = (ROW,), **more: Any) -> dict[str, Any]:
    """The parts of docs/status.schema.json that `top` reads. `gpu` of a row is an index, or index:instance.

    A row without a holder is a free GPU or instance. `more`: other keys of the status.
    """
    gpus: dict[str, dict[str, Any]] = {}
    allocations = []
    for row in rows:
        label, _, mig = row.gpu.partition(":")
        gpu = gpus.setdefault(label, _gpu(label, row))
        if mig and mig not in [each["mig"] for each in gpu["instances"]]:
            unit = {"mig": mig, "mig_uuid": f"MIG-{row.gpu}", "profile": row.name}
            gpu["instances"].append(unit | {"state": "held" if row.holder else row.state, "reason": row.why})
        if row.holder:
            allocations.append(_allocation(label, f"MIG-{row.gpu}" if mig else "", row))
    status = {"timestamp_seconds": WALL, "driver_up": True, "driver_error": "", "attribution": []}
    return {**status, "gpus": list(gpus.values()), "allocations": allocations, **more}


def _gpu(label: str, row: Row) -> dict[str, Any]:
    is_board = ":" not in row.gpu
    return {
        "gpu": int(label) if label.isdecimal() else None,
        "uuid": f"GPU-{label}",
        "pci_bus_id": label,
        "name": row.name if is_board else "H100",
        "up": row.state not in SILENT,
        "error": "",
        "state": row.state if row.state in SILENT or not row.holder else "held",
        "reason": row.why if row.state in SILENT or not row.holder else "",
        "advice": row.advice if row.state in SILENT else "",
        "read_error": "",
        "conditions": [],
        "age_seconds": row.age_s,
        "utilization_ratio": row.utilization,
        "memory_used_bytes": row.memory_bytes,
        "power_watts": row.power_w if is_board else None,
        "temperature_celsius": row.temperature_celsius,
        "throttle_reason": row.throttling.reason if row.throttling else "",
        "throttle_ratio": row.throttling.ratio if row.throttling else None,
        "instances": [],
    }


def _allocation(label: str, mig_uuid: str, row: Row) -> dict[str, Any]:
    name, _, confidence = row.cause.partition(" ")
    cause = {"name": name, "confidence": confidence, "evidence": row.why, "advice": row.advice}
    user, _, account = row.owner.partition("/")
    return {
        "uuid": f"GPU-{label}",
        "mig_uuid": mig_uuid,
        "holder": row.holder,
        "user": user,
        "account": account,
        "start_timestamp_seconds": WALL - row.held_s if row.held_s is not None else None,
        "idle_run_seconds": row.idle_s,
        "stalled_run_seconds": row.stalled_s,
        "utilization_ratio": row.utilization,
        "memory_used_bytes": row.memory_bytes,
        "power_watts": row.power_w if mig_uuid else None,  # as of a GPU that several holders share
        "state": row.state,
        "evidence": "" if row.cause else row.why,
        "advice": "" if row.cause else row.advice,
        "causes": [cause] if row.cause else [],
        "cause_needs": [],
    }
