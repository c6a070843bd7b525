"""Accounts of units and holders: their counters in seconds and joules, and their dates."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from gpu_exporter.common.model.holders import Allocation, AllocationId

STEP_S = 1.0  # if the wall clock moved by more against the monotonic clock, it was set, and dates move with it


class ConfirmedAllocation(NamedTuple):
    """An allocation with its times, in monotonic seconds.

    - `confirmed`: when the source last reported the allocation.
    - `start`: the time since which the holder provably has the unit. Only Slurm reports this time.
    - `working`: the time since which the holder's program can work, None if unknown.
    - `renewed_s`: seconds between two confirmations by the source, 0 if each poll confirms.
    - `possible`: until when an ended holder may have had the unit. Its own time ends at `confirmed`.
    """

    allocation: Allocation
    confirmed: float
    start: float | None
    working: float | None = None
    renewed_s: float = 0.0
    possible: float = 0.0

    @property
    def id(self) -> AllocationId:
        return self.allocation.unit, self.allocation.holder.key


@dataclass(slots=True)
class UnitAccount:
    """Counters of one unit. `rest_w`: its power at utilization 0, in watts; None while unknown."""

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
    """Counters of one holder on one unit. Times are monotonic seconds, except `start_wall` (Unix seconds).

    - `confirmed`: when the source last reported the holder.
    - `booked`, `energy_booked`: the counters contain all readings up to this time, which lags behind `confirmed`,
      because the driver delivers samples late.
    - `unproven_s`: seconds at utilization 0 with fewer than WITNESSES_MIN witnesses. `idle_s` does not contain them.
    - `run_unknown_s`: unknown seconds within the idle run.
    - `running`, `alone`: at the last poll, the holder could work, and was alone on the unit.
    - `working`: from when the holder's program can work. Infinite if the program is not known to run, None if the
      source does not report it.
    - `first_seen`: when a poll first showed the holder. None if the source reports the start, or if an older version
      wrote the state file; `start_wall` then never changes.
    - `longest_gap_s`: the longest idle run that ended with work.
    - `renewed_s`: seconds between two confirmations by the source, 0 if each poll confirms.
    - `away_s`: seconds in which others had the unit, between two times of this holder.
    - `guessed_held_s`: `held_s` with the estimated time up to an unseen end, which the tenant's account contains.

    The present run without progress (spins.py):

    - `stalled_s`: seconds that count as stalled.
    - `pending_s`: seconds that may still become stalled or busy.
    - `spin_begin`, `spin_end`: begin and end of the run.
    - `is_stalled`: the run counts as a stall.

    Data for the detection of stalls after a restart (SpinMemory of stalls/watch.py):

    - `spin_since`: begin of the run, even if its seconds count as busy.
    - `spin_until`, `spin_known_s`, `spin_all_known`, `spin_memory_bytes`, `spin_sm`: as in SpinMemory.
    - `work_s`, `work_w`: seconds and median power of the holder's work.
    - `waits`, `wait_longest_s`: number and longest of the holder's waits (stalls/waits.py).
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
    away_s: float = 0.0
    guessed_held_s: float = 0.0
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

    @property
    def began(self) -> float:
        """When the holder's time began (monotonic seconds)."""
        return self.confirmed - self.held_s - self.away_s

    @property
    def ended(self) -> float:
        """Until when the tenant is charged (monotonic seconds). With the estimated time after `confirmed`."""
        return self.confirmed + max(0.0, self.guessed_held_s - self.held_s)

    def end_run(self) -> None:
        self.idle_run_s = self.run_unknown_s = 0.0
        self.run_witnesses = 0


def read_date(account: UnitAccount | HolderAccount, now: float, wall: float) -> float | None:
    """Returns when the last activity was, in Unix seconds rounded to milliseconds. None without activity.

    The date stays the same until the next activity. Otherwise, it would differ by milliseconds in each scrape, and
    Prometheus would store each difference.
    """
    if account.last_active is None:
        return None
    fresh, kept = wall - (now - account.last_active), account.last_active_wall
    if kept is None or kept[0] != account.last_active or abs(kept[1] - fresh) > STEP_S:
        kept = account.last_active_wall = (account.last_active, round(fresh, 3))
    return kept[1]


def read_start(account: HolderAccount, now: float, wall: float) -> float:
    """Returns the holder's start, in Unix seconds rounded to milliseconds.

    A start that the exporter observed follows changes of the wall clock, so that the holder's age stays right. A start
    reported by Slurm or the kubelet never changes.
    """
    if account.first_seen is not None:
        fresh = wall - (now - account.first_seen)
        if abs(fresh - account.start_wall) > STEP_S:
            account.start_wall = fresh
    return round(account.start_wall, 3)
