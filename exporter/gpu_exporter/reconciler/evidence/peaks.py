"""Pods whose GPUs have little to do even in their busiest hour: what serves requests may do so from a part of a GPU.

A server is quiet at night, so neither an idle run nor a mean says anything of it. Two steps, once an hour: which pods
used little of whole GPUs on the whole, by two readings of their counters, so that even 100,000 allocations cost no more
than a lookup each; then, of these alone, each hour by itself. An hour of which too little is known could have been the
busiest, so nearly all of them must be known.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

from gpu_exporter.clock import Clock
from gpu_exporter.durations import describe_duration
from gpu_exporter.reconciler.evidence.records import EvidenceError, HolderName, holder_name
from gpu_exporter.reconciler.evidence.vector import HOLDER_LABELS, Asked, restrict

log = logging.getLogger(__name__)
HOUR_S = 3600.0
STEPS = 4  # an hour begins at each quarter of one, so that work of an hour is hardly split between two
KNOWN_SHARE = 0.9  # of an hour that must be observed
HOURS_SHARE = 0.95  # of the hours that must be known
PODS_MAX = 1000  # that are looked at, those with the least use first
PODS = 'scheduler="kubernetes"'


class Peaks:
    """Remembers the answer for an hour."""

    def __init__(self, below: float, window_s: float, clock: Clock) -> None:
        """`below`: utilization, 0 to 1. `window_s`: over which the busiest hour is wanted."""
        self._below = below
        self._hours = max(1, math.floor(window_s / HOUR_S))
        self._clock = clock
        self._asked = -math.inf
        self.known: Mapping[HolderName, str] = {}
        """Each pod that stayed below the limit in the busiest hour of its busiest GPU, and how far, in words."""

    def renew(self, api: Asked) -> None:
        """Ask, if an hour has passed, for the cycles to come. An answer that cannot be had leaves none until then."""
        now = self._clock.monotonic()
        if now - self._asked >= HOUR_S:
            self._asked = now
            try:
                self.known = self._ask(api)
            except EvidenceError as exc:
                self.known = {}
                log.warning("which servers could share their GPUs is not known: %s", exc)

    def _ask(self, api: Asked) -> dict[HolderName, str]:
        by = f"by ({', '.join(HOLDER_LABELS)})"
        whole = api.select("gpu_allocation_share_ratio", PODS)
        mean = _share(api, PODS, f"{self._hours}h", self._hours * HOUR_S)
        rows = api.query(f"bottomk({PODS_MAX}, max {by} ({mean} and {whole} == 1) < {self._below:g})")
        clusters = sorted({row.labels.get("cluster", "") for row in rows})
        if len(clusters) > 1:
            raise EvidenceError(f"clusters {clusters} in one answer: choose one with --source.matcher")
        names = {holder_name(row.labels) for row in rows}
        found: dict[HolderName, str] = {}
        for wanted in restrict(names):
            hours = f"{_share(api, wanted, '1h', HOUR_S)}[{self._hours}h:{HOUR_S / STEPS:g}s]"
            known = f"count {by} (count_over_time({hours}) >= {HOURS_SHARE * STEPS * self._hours:g})"
            held = f"count {by} ({api.select('gpu_allocation_info', wanted)})"
            busiest = f"max {by} (max_over_time({hours})) < {self._below:g}"
            rows = api.query(f"{busiest} and {known} == {held}")
            found |= {name: self._describe(row.value) for row in rows if (name := holder_name(row.labels)) in names}
        return found

    def _describe(self, peak: float) -> str:
        past = describe_duration(self._hours * HOUR_S)
        return f"in its busiest hour of the last {past} it used {peak:.0%} of its GPUs, below {self._below:.0%}"


def _share(api: Asked, wanted: str, past: str, past_s: float) -> str:
    """Mean utilization over that time, of each series that is known for nearly all of it.

    Two readings of a counter are much less than all that lie between. Where it began again in between, less has been
    observed than the time that has gone by.
    """
    busy, observed = (
        f"({counter} - {counter} offset {past})"
        for counter in (api.select(f"gpu_allocation_{name}_seconds_total", wanted) for name in ("busy", "observed"))
    )
    return f"({busy} / ({observed} >= {KNOWN_SHARE * past_s:g}))"
