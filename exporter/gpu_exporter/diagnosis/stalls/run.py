"""One run without progress, the witnesses that may end it, and what a restart needs of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from gpu_exporter.diagnosis.stalls.power import Spread

POWER, MEMORY, PCIE, NVLINK, SM = "power", "memory", "PCIe", "NVLink", "SM activity"
LOADERS, PROCESSES, DISK, NETWORK = "CPU of the loaders", "new processes", "disk", "network"
OF_HOST = (LOADERS, PROCESSES, DISK, NETWORK)
PROGRESS = (MEMORY, PCIE, NVLINK, *OF_HOST)


@dataclass(slots=True)
class SpinRun:
    """`begin`: of the run, in monotonic seconds. `known_s`: how much of it is known. `since`: by witness, since when it
    has been known without a gap. `limit_w`: the power limit in force. `unread`: witnesses that an earlier process knew,
    and this one has not read yet.
    """

    begin: float
    steps: Spread
    sms: Spread
    known_s: float = 0.0
    until: float = 0.0
    memory_bytes: float | None = None
    limit_w: float | None = None
    minute_s: float = 0.0
    minute_busy_s: float = 0.0
    since: dict[str, float] = field(default_factory=dict)
    unread: set[str] = field(default_factory=set)


class SpinMemory(NamedTuple):
    """What an earlier process knew of a run; the holder's account keeps it. Times as in SpinRun."""

    begin: float
    until: float
    known_s: float
    all_known: bool
    was_stall: bool = False
    memory_bytes: float | None = None
    sm: float | None = None
