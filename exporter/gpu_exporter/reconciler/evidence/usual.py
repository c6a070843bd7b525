"""Reads how many GPUs usually become idle together at an hour of the day. Up to this number, they show no fault."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from statistics import median

from gpu_exporter.common.clock import Clock
from gpu_exporter.common.errors import AnswerError
from gpu_exporter.reconciler.evidence.matchers import Asked

log = logging.getLogger(__name__)
HOUR_S = 3600.0
DAYS = 7
DAYS_MIN = 4  # with fewer days, one unusual day could decide the median
TOGETHER_S = 15 * 60.0  # idle runs that began within this time may have one cause
AGAIN_S = 600.0  # after a failed query, the hour is asked for again after this time
HOURS_MAX = 48  # hours that are remembered; a brake looks back for policy.freeze_max


class Usual:
    """Reads the previous days once for each hour, because they no longer change."""

    def __init__(self, read_days: Callable[[float], Sequence[float]], clock: Clock) -> None:
        """`read_days`: takes the start of an hour (Unix seconds). For each known day of the DAYS before, returns the
        highest number of GPUs that became idle within TOGETHER_S in that hour. Raises AnswerError.
        """
        self._read_days = read_days
        self._clock = clock
        self._known: dict[float, float | None] = {}
        self._failed: dict[float, float] = {}  # by hour, when its query failed (monotonic seconds)

    def at(self, wall: float) -> float | None:
        """Returns the median over the previous days at the hour of `wall` (Unix seconds); None if unknown."""
        hour = wall - wall % HOUR_S
        if hour not in self._known and self._clock.monotonic() - self._failed.get(hour, -math.inf) >= AGAIN_S:
            try:
                days = self._read_days(hour)
            except AnswerError as exc:
                self._failed[hour] = self._clock.monotonic()
                log.warning("cannot read how many GPUs usually become idle at this hour: %s", exc)
                return None
            if len(self._known) + len(self._failed) >= HOURS_MAX:
                self._known.clear()
                self._failed.clear()
            self._known[hour] = median(days) if len(days) >= DAYS_MIN else None
        return self._known.get(hour)


def read_days(api: Asked, hour: float, shortest_s: float) -> list[float]:
    """Reads the days for Usual from a PromQL API. `shortest_s`: the shortest idle run that counts (seconds).

    Each idle run counts in exactly one step of the subquery.
    """
    run = api.select("gpu_allocation_idle_run_seconds")
    begun = f"count(count by (uuid, mig_uuid) ({run} >= {shortest_s:g} < {shortest_s + TOGETHER_S:g}))"
    known = f"0 * count({api.select('gpu_allocation_info')})"  # a day on which no GPU became idle counts as 0
    most = f"max_over_time(({begun} or {known})[{HOUR_S:g}s:{TOGETHER_S:g}s]"
    days = (f'label_replace({most} offset {day}d), "day", "{day}", "", "")' for day in range(1, DAYS + 1))
    return [row.value for row in api.query(" or ".join(days), at=hour + HOUR_S + shortest_s)]
