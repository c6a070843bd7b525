"""The accounts of units and holders (seconds, joules, dates), and their ids."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from gpu_exporter.common.model.holders import Allocation

STEP_S = 1.0  # if the wall clock moved by more against the monotonic clock, it was set, and dates move with it


class ConfirmedAllocation(NamedTuple):
    """An allocation with dates in monotonic seconds. `confirmed`: when its source last reported it. `start`: since when
    the holder provably has the unit (Slurm). `working`: since when the holder can work, if known. `renewed_s`: as in
    Grant.
    """

    allocation: Allocation
    confirmed: float
    start: float | None
    working: float | None = None
    renewed_s: float = 0.0


@dataclass(slots=True)
class UnitAccount:
    """Counters of one unit. `rest_w`: its learned power at utilization 0, None while unknown."""

    covered_until: float
    busy_s: float = 0.0
    observed_s: float = 0.0
    idle_s: float = 0.0
    witnesses: int = 0
    last_active: float | None = None
    last_active_wall: tuple[float, float] | None = None  # (last_active, its wall time), see read_date
    energy_j: float | None = None
    power_limit_w: float | None = None
    unattributed_s: float = 0.0
    unattributed_j: float | None = None
    rest_w: float | None = None


@dataclass(slots=True)
class HolderAccount:
    """Counters of one holder on one unit.

    - `confirmed`: the holder is confirmed up to this time.
    - `booked`, `energy_booked`: readings are charged up to this time. It lags, because the driver's samples arrive a
      moment after the time that they cover.
    - `run_unknown_s`: unknown time within the idle run.
    - `running`, `alone`: at the last poll.
    - `working`: since when its program can work. It is infinite while the program is not known to run, and None if the
      source does not report it.
    - `longest_gap_s`: the longest idle run that ended with work.
    - `renewed_s`: the interval at which its source confirms it, 0 for every poll.

    A run without progress (spins.py): `stalled_s`; `pending_s`, which may still become stalled or busy; `spin_begin`
    and `spin_end`, its time; `is_stalled`, it counts as a stall.

    Data for the search after a restart (SpinMemory of stalls/watch.py): `spin_since`, the begin of the run, even if its
    seconds count as busy; `spin_until`, `spin_known_s`, `spin_all_known`, `spin_memory_bytes`, `spin_sm`; `work_s` and
    `work_w`, the seconds and the median power of its work. `waits`, `wait_longest_s`: learned from its waits
    (stalls/waits.py).
    """

    confirmed: float
    booked: float
    energy_booked: float
    start_wall: float
    known_until: float
    known: bool = False
    held_s: float = 0.0
    busy_s: float = 0.0
    observed_s: float = 0.0
    idle_s: float = 0.0
    low_s: float = 0.0
    high_s: float = 0.0
    energy_j: float | None = None
    idle_run_s: float = 0.0
    last_active: float | None = None
    last_active_wall: tuple[float, float] | None = None  # as in UnitAccount
    running: bool = True
    alone: bool = True
    working: float | None = None
    run_unknown_s: float = 0.0
    run_witnesses: int = 0
    longest_gap_s: float = 0.0
    renewed_s: float = 0.0
    stalled_s: float = 0.0
    pending_s: float = 0.0
    spin_begin: float | None = None
    spin_end: float = math.inf
    is_stalled: bool = False
    spin_since: float | None = None
    spin_until: float = 0.0
    spin_known_s: float = 0.0
    spin_all_known: bool = False
    spin_memory_bytes: float | None = None
    spin_sm: float | None = None
    work_s: float = 0.0
    work_w: float = 0.0
    waits: int = 0
    wait_longest_s: float = 0.0

    def end_run(self) -> None:
        self.idle_run_s = self.run_unknown_s = 0.0
        self.run_witnesses = 0


def read_date(account: UnitAccount | HolderAccount, now: float, wall: float) -> float | None:
    """Unix seconds of `last_active`, to the millisecond. The value remains the same until `last_active` changes.

    If it were computed again for each scrape, it would move by some milliseconds, and Prometheus would store each
    change.
    """
    if account.last_active is None:
        return None
    fresh, kept = wall - (now - account.last_active), account.last_active_wall
    if kept is None or kept[0] != account.last_active or abs(kept[1] - fresh) > STEP_S:
        kept = account.last_active_wall = (account.last_active, round(fresh, 3))
    return kept[1]
