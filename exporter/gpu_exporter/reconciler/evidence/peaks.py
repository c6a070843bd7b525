"""Finds pods that use little of their GPUs even in their busiest hour. For a server, a part of a GPU may be enough.

A server is quiet at night, so an idle run or a mean shows little about it. The search runs once an hour, in two steps.
The first step finds pods with a low mean use of whole GPUs, from two readings of their counters: one lookup for each
allocation. The second step checks every hour of these pods. Nearly all hours must be known, because an unknown hour may
be the busiest.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

from gpu_exporter.common.clock import Clock
from gpu_exporter.common.durations import describe_duration
from gpu_exporter.common.errors import AnswerError
from gpu_exporter.reconciler.evidence.matchers import HOLDER_LABELS, MATCHER_MAX, Asked, restrict
from gpu_exporter.reconciler.evidence.records import HolderName, holder_name, refuse_several

log = logging.getLogger(__name__)
HOUR_S = 3600.0
STEPS = 4  # overlapping hours begin every quarter of an hour, so that a busy hour is hardly split between two
KNOWN_SHARE = 0.9  # share of an hour that must be observed
HOURS_SHARE = 0.95  # share of the hours that must be known
PODS_MAX = 1000  # pods in the second step, those with the least use first
SELECTORS = 9  # with the names of pods, in a query of the second step
PODS = 'scheduler="kubernetes"'


class Peaks:
    """Once an hour, finds the pods that use little of their GPUs, and remembers them."""

    def __init__(self, below: float, window_s: float, clock: Clock) -> None:
        """`below`: limit of utilization, 0 to 1. `window_s`: period that is searched for the busiest hour (seconds)."""
        self._below = below
        self._hours = max(1, math.floor(window_s / HOUR_S))
        self._clock = clock
        self._asked = -math.inf
        self.known: Mapping[HolderName, str] = {}
        """Pods whose busiest GPU is below the limit in its busiest hour. The values are the utilizations in words."""

    def renew(self, api: Asked) -> None:
        """Queries again if an hour has passed. If the source fails, no pods are known for the next hour."""
        now = self._clock.monotonic()
        if now - self._asked >= HOUR_S:
            self._asked = now
            try:
                self.known = self._ask(api)
            except AnswerError as exc:
                self.known = {}
                log.warning("the reconciler cannot read which serving pods need only a part of a GPU: %s", exc)

    def _ask(self, api: Asked) -> dict[HolderName, str]:
        by = f"by ({', '.join(HOLDER_LABELS)})"
        whole = api.select("gpu_allocation_share_ratio", PODS)
        mean = _share(api, PODS, f"{self._hours}h", self._hours * HOUR_S)
        rows = api.query(f"bottomk({PODS_MAX}, max {by} ({mean} and {whole} == 1) < {self._below:g})")
        refuse_several({row.labels.get("cluster", "") for row in rows}, "the source returned series")
        names = {holder_name(row.labels) for row in rows}
        found: dict[HolderName, str] = {}
        for wanted in restrict(names, MATCHER_MAX // SELECTORS):
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
    """PromQL: the mean utilization over `past`, for series that are known for nearly all of that time.

    `past_s`: length of `past` in seconds. Two readings of a counter are much cheaper than all samples between them. A
    counter reset makes the observed time too short, which excludes the series.
    """
    busy, observed = (
        f"({counter} - {counter} offset {past})"
        for counter in (api.select(f"gpu_allocation_{name}_seconds_total", wanted) for name in ("busy", "observed"))
    )
    return f"({busy} / ({observed} >= {KNOWN_SHARE * past_s:g}))"
