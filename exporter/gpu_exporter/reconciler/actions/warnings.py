"""Measures how long each owner has been warned, as far as this process has seen it.

The start time of an alert hides silences that have ended, routes that were changed, and outages of Alertmanager. So
only the time between two checks counts, and a gap resets the timer to zero.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from gpu_exporter.common.clock import Clock
from gpu_exporter.reconciler.actions.proofs import Warned
from gpu_exporter.reconciler.evidence.records import HolderName

UNSEEN_MAX_S = 180.0  # between two checks; the usual interval is half a minute, so some checks may fail
CYCLE_MAX_S = 120.0  # a longer gap between cycles means that the process was stopped and has seen nothing


class _Sight(NamedTuple):
    """When this process first and last saw a warning (monotonic seconds)."""

    first: float
    last: float


class SeenWarnings:
    """Keeps, from cycle to cycle, the holders whose owner was warned."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._sights: dict[HolderName, _Sight] = {}
        self._last_cycle: float | None = None
        self._cycle_s = 0.0

    def begin_cycle(self, turns: int) -> None:
        """Begin a cycle. `turns`: each holder is checked once in this number of cycles."""
        now = self._clock.monotonic()
        most_s = max(UNSEEN_MAX_S, 2 * self._cycle_s * turns)  # by the previous cycle: a gap must not extend its limit
        self._cycle_s = min(now - self._last_cycle, CYCLE_MAX_S) if self._last_cycle is not None else 0.0
        self._last_cycle = now
        self._sights = {name: sight for name, sight in self._sights.items() if now - sight.last <= most_s}

    def note(self, warnings: Mapping[HolderName, Warned], asked: Collection[HolderName]) -> dict[HolderName, Warned]:
        """The warnings of this check, each with the start of its time without a gap. `asked`: holders checked."""
        now, wall = self._clock.monotonic(), self._clock.wall()
        found: dict[HolderName, Warned] = {}
        for name in asked:
            if name not in warnings:
                self._sights.pop(name, None)
                continue
            first = self._sights[name].first if name in self._sights else now
            self._sights[name] = _Sight(first, now)
            warning = warnings[name]
            found[name] = warning._replace(since_wall=max(warning.since_wall, wall - (now - first)))
        return found
