"""Counts the seconds of a run without progress: full utilization of a program that seems to hang.

The seconds are pending until the run becomes a stall (stalled) or ends (busy). Published counters never fall, so they
contain no pending seconds. Pure: changes only one holder's account.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from gpu_exporter.agent.ledger.accounts import HolderAccount
from gpu_exporter.common.model.readings import Span


class RunPart(NamedTuple):
    """A holder's present run without progress. `begin`: monotonic seconds. `is_stall`: the run counts as a stall."""

    begin: float
    is_stall: bool


def follow_run(account: HolderAccount, part: RunPart | None, now: float) -> None:
    """Sets how this holder's busy seconds count from now on: as part of the run, or as busy if `part` is None."""
    is_open = account.spin_begin is not None and account.spin_end == math.inf
    if is_open and (part is None or part.begin != account.spin_begin):
        account.busy_s += account.pending_s
        account.pending_s = 0.0
        if account.is_stalled:
            account.spin_end = now  # readings of that time are still to be booked
        else:
            account.spin_begin = None
        is_open = False
    if part is None:
        return
    if not is_open:
        # A stall that is detected late counts only from now on: seconds that were booked as busy stay busy.
        account.spin_begin, account.spin_end, account.is_stalled = part.begin, math.inf, False
    if part.is_stall and not account.is_stalled:
        account.stalled_s += account.pending_s
        account.pending_s = 0.0
        account.is_stalled = True


def book_busy(account: HolderAccount, span: Span) -> None:
    """Adds the span's busy seconds to the holder's account, as busy, pending or stalled seconds."""
    busy_s = (span.end - span.start) * span.ratio
    spun_s = 0.0
    if account.spin_begin is not None:
        length_s = min(span.end, account.spin_end) - max(span.start, account.spin_begin)
        spun_s = max(0.0, length_s) * span.ratio
    if account.is_stalled:
        account.stalled_s += spun_s
    else:
        account.pending_s += spun_s
    account.busy_s += busy_s - spun_s
