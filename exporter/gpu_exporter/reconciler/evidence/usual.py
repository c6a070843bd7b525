"""How many GPUs become idle at about the same time on other days, at the same hour: what is usual is no fault."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from statistics import median

from gpu_exporter.clock import Clock
from gpu_exporter.reconciler.evidence.records import EvidenceError
from gpu_exporter.reconciler.evidence.vector import Asked

log = logging.getLogger(__name__)
HOUR_S = 3600.0
DAYS = 7
DAYS_MIN = 4  # with fewer days, one that was unusual itself would be the measure
TOGETHER_S = 15 * 60.0  # idle runs that began within so long of each other may have one cause
AGAIN_S = 600.0  # an hour that could not be asked for is asked for once more after so long
HOURS_MAX = 48  # hours that are remembered; a brake looks back for policy.freeze_max


class Usual:
    """Asks once for each hour: the days before it do not change any more."""

    def __init__(self, read_days: Callable[[float], Sequence[float]], clock: Clock) -> None:
        """`read_days`: of the hour that begins at this time (Unix seconds), on each of the DAYS before it that is
        known, the most GPUs that became idle within TOGETHER_S. Raises EvidenceError.
        """
        self._read_days = read_days
        self._clock = clock
        self._known: dict[float, float | None] = {}
        self._failed: dict[float, float] = {}  # by hour, when it could not be asked for (monotonic seconds)

    def at(self, wall: float) -> float | None:
        """The median of those days at the hour of `wall` (Unix seconds); None where that is not known."""
        hour = wall - wall % HOUR_S
        if hour not in self._known and self._clock.monotonic() - self._failed.get(hour, -math.inf) >= AGAIN_S:
            try:
                days = self._read_days(hour)
            except EvidenceError as exc:
                self._failed[hour] = self._clock.monotonic()
                log.warning("how many GPUs usually become idle at this hour is not known: %s", exc)
                return None
            if len(self._known) + len(self._failed) >= HOURS_MAX:
                self._known.clear()
                self._failed.clear()
            self._known[hour] = median(days) if len(days) >= DAYS_MIN else None
        return self._known.get(hour)


def read_days(api: Asked, hour: float, shortest_s: float) -> list[float]:
    """As Usual asks for them. `shortest_s`: of the idle runs that count; each GPU is in one step of these."""
    run = api.select("gpu_allocation_idle_run_seconds")
    begun = f"count(count by (uuid, mig_uuid) ({run} >= {shortest_s:g} < {shortest_s + TOGETHER_S:g}))"
    known = f"0 * count({api.select('gpu_allocation_info')})"  # a day on which nobody became idle counts as 0
    most = f"max_over_time(({begun} or {known})[{HOUR_S:g}s:{TOGETHER_S:g}s]"
    days = (f'label_replace({most} offset {day}d), "day", "{day}", "", "")' for day in range(1, DAYS + 1))
    return [row.value for row in api.query(" or ".join(days), at=hour + HOUR_S + shortest_s)]
