"""Cases for the rules of causes: a holder with one GPU at 30 %, whose host looks quiet, and what differs from that."""

from __future__ import annotations

from typing import Any

from gpu_exporter.common.model.causes import Cause
from gpu_exporter.common.model.evidence import HostEvidence, ProcessEvidence
from gpu_exporter.diagnosis.causes.case import CauseCase, HeldGpu, HostLook
from gpu_exporter.diagnosis.causes.rules import find_causes

LOOK_S = 15.0
QUIET: dict[str, Any] = {
    "cpus": 8.0,
    "quota": 8.0,
    "cores": 1.0,
    "throttled": 0.0,
    "host_cpus": 64.0,
    "host_busy": 0.1,
    "read": 0.0,
    "written": 0.0,
    "received": 0.0,
    "sent": 0.0,
    "refaults": 0.0,
    "killed": 0.0,
    "network_files": (),
}
PROCESSES: dict[str, Any] = {"processes": 3, "is_all": True, "ranks": 1, "rank_cores": 0.3, "loaders": 0, "runnable": 1}


def evidence(position: int = 0, processes: dict[str, Any] | None = PROCESSES, **changes: Any) -> HostEvidence:
    """One look. `processes`: None if they cannot be seen."""
    start = 1000.0 + LOOK_S * position
    values = QUIET | changes
    seen = None if processes is None else ProcessEvidence(**(PROCESSES | processes))
    return HostEvidence(start, start + LOOK_S, processes=seen, **values)


def case(
    state: str = "low",
    *,
    looks: int = 20,
    processes: dict[str, Any] | None = PROCESSES,
    about: dict[str, Any] | None = None,
    **changes: Any,
) -> CauseCase:
    """`about`: fields of the case. `changes`: fields of every look."""
    seen = tuple(HostLook(evidence(position, processes, **changes), 0.3) for position in range(looks))
    idle = state in ("held_idle", "held_no_process")
    mean = 0.0 if idle else 0.3
    values: dict[str, Any] = {
        "state": state,
        "uuid": "GPU-0",
        "held_s": 7200.0,
        "worked": True,
        "idle_run_s": 900.0 if idle else 0.0,
        "mean": mean,
        "processes": 0.0 if state == "held_no_process" else 1.0,
        "members": (HeldGpu("GPU-0", "0", mean, 1.0, 0.0),),
        "looks": seen,
        "link": 1.0,
    }
    return CauseCase(**(values | (about or {})))


def found(one: CauseCase) -> dict[str, str]:
    """Confidence by cause."""
    return {cause.name: cause.confidence for cause in find_causes(one).found}


def the(one: CauseCase, name: str) -> Cause:
    """The cause with this name."""
    return next(cause for cause in find_causes(one).found if cause.name == name)
