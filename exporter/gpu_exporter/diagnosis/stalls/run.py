"""Data of one run without progress (a GPU is fully busy, no witness shows progress), and the part that is saved."""

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
    """One run without progress.

    `begin`: its start (monotonic seconds). `known_s`: known time of the run. `since`: by witness, the start of its
    known time without a gap. `limit_w`: the present power limit. `unread`: witnesses that were known before a restart
    of the exporter, but not read since.
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
    """The data of a run that are saved for a restart, in the holder's account. Times are monotonic seconds."""

    begin: float
    until: float
    known_s: float
    all_known: bool
    was_stall: bool = False
    memory_bytes: float | None = None
    sm: float | None = None
