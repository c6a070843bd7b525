"""Defines the accounts of units and holders: their seconds, joules and dates."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from gpu_exporter.common.model.holders import Allocation

STEP_S = 1.0  # if the wall clock moved by more against the monotonic clock, it was set, and dates move with it


class ConfirmedAllocation(NamedTuple):
    """An allocation with times on the monotonic clock.

    `confirmed`: when its source last reported it. `start`: since when the holder certainly has the unit; only Slurm
    states that. `working`: since when the holder's program can work, None if unknown. `renewed_s`: as in Grant.
    """

    allocation: Allocation
    confirmed: float
    start: float | None
    working: float | None = None
    renewed_s: float = 0.0


@dataclass(slots=True)
class UnitAccount:
    """Counters of one unit. `rest_w`: its power at utilization 0 in watts, as learned so far, None while unknown."""

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

    - `confirmed`: the last time at which the source reported the holder.
    - `booked`, `energy_booked`: readings up to this time are in the counters. This time lags, because the
      driver's samples arrive a moment after the time that they cover.
    - `unproven_s`: time at utilization 0 for which fewer than WITNESSES_MIN witnesses were read: not in `idle_s`.
    - `run_unknown_s`: unknown time within the idle run.
    - `running`, `alone`: whether the holder could work, and was alone on the unit, at the last poll.
    - `working`: since when the holder's program can work. Infinite while the program is not known to run, None if the
      source does not report it.
    - `first_seen`: when a poll first showed the holder (monotonic seconds). None if the source states the start, or in
      a state file of an older version: `start_wall` is then never changed.
    - `longest_gap_s`: the longest idle run that ended with work.
    - `renewed_s`: the interval at which the source confirms the holder, 0 for every poll.

    A run without progress (spins.py): `stalled_s`; `pending_s`, which may still become stalled or busy; `spin_begin`
    and `spin_end`, its time; `is_stalled`, whether the run counts as a stall.

    Data with which a restarted exporter continues the detection of stalls (SpinMemory of stalls/watch.py):
    `spin_since`, the begin of the run, even if its seconds count as busy; `spin_until`, `spin_known_s`,
    `spin_all_known`, `spin_memory_bytes`, `spin_sm`; `work_s` and `work_w`, the seconds and the median power of the
    holder's work. `waits`, `wait_longest_s`: number and longest of the holder's waits (stalls/waits.py).
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
    unproven_s: float = 0.0
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
    first_seen: float | None = None
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
    """The time of the last activity in Unix seconds, to the millisecond. It stays the same until the next activity.

    If it were computed again for each scrape, it would move by some milliseconds, and Prometheus would store each
    change.
    """
    if account.last_active is None:
        return None
    fresh, kept = wall - (now - account.last_active), account.last_active_wall
    if kept is None or kept[0] != account.last_active or abs(kept[1] - fresh) > STEP_S:
        kept = account.last_active_wall = (account.last_active, round(fresh, 3))
    return kept[1]


def read_start(account: HolderAccount, now: float, wall: float) -> float:
    """Unix seconds of the holder's start, to the millisecond. A start that the exporter itself saw moves with the wall
    clock if that was set, so that the holder's age stays right. A start that Slurm or the kubelet states stays theirs.
    """
    if account.first_seen is not None:
        fresh = wall - (now - account.first_seen)
        if abs(fresh - account.start_wall) > STEP_S:
            account.start_wall = fresh
    return round(account.start_wall, 3)
