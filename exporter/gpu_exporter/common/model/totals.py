"""The totals that the ledger counts, by unit, holder and tenant."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class UnitTotals(NamedTuple):
    """Running totals of one unit, in seconds or joules; None if the hardware never reported the value.

    - `active_by`: the witnesses of the last activity (UTILIZATION or others).
    - `other_s`: by witness, seconds at utilization 0 in which the witness showed activity, since this process started.
      Of several witnesses, only the first in the order of sampling/activity/witnesses.py counts.
    - `unattributed_s`, `unattributed_j`: seconds of full load, and joules, that belong to no known holder. Joules are
      None without an energy counter.

    Invariant: busy_s + idle_s <= observed_s.
    """

    busy_s: float
    observed_s: float
    idle_s: float
    witnesses: int
    last_active_wall: float | None
    active_by: tuple[str, ...] = ()
    other_s: Mapping[str, float] = {}
    unattributed_s: float = 0.0
    unattributed_j: float | None = None


class HolderTotals(NamedTuple):
    """Running totals of one holder on one unit, in seconds or joules.

    - `known`: false if no signal shows activity. Then only `held_s` counts.
    - `idle_run_s`: length of the present idle run; 0 while the holder works, None while unknown.
    - `idle_run_witnesses`: the fewest witnesses that were read in any part of the idle run.
    - `longest_gap_s`: the longest idle run that ended with work.
    - `stalled_s`: fully busy without progress. `pending_s`: seconds of a present run that may still become a stall.

    Invariants: observed_s <= held_s, busy_s + idle_s + stalled_s + pending_s <= observed_s.
    """

    held_s: float
    known: bool
    busy_s: float
    observed_s: float
    idle_s: float
    low_s: float
    high_s: float
    energy_j: float | None
    idle_run_s: float | None
    start_wall: float
    last_active_wall: float | None
    idle_run_witnesses: int = 0
    longest_gap_s: float = 0.0
    stalled_s: float = 0.0
    pending_s: float = 0.0


class TenantTotals(NamedTuple):
    """GPU-seconds and joules of a tenant on this node, by its share of each GPU.

    `energy_j`: None unless all of its GPUs have an energy counter. `unproven_s`: seconds at utilization 0 with too few
    other witnesses to prove idleness; None without such time.
    """

    held_s: float
    known_s: float
    busy_s: float
    idle_s: float
    energy_j: float | None
    stalled_s: float = 0.0
    unproven_s: float | None = None
