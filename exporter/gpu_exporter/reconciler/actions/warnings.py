"""For how long each owner has been warned, as this process has seen it.

What an alert says of its own beginning is silent on silences that have ended since, on routes that were changed, and on
an Alertmanager that was away. So time counts only from one look to the next, and a gap begins again from nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from gpu_exporter.clock import Clock
from gpu_exporter.reconciler.actions.proofs import Warned
from gpu_exporter.reconciler.evidence.records import HolderName

UNSEEN_MAX_S = 180.0  # between two looks, at the usual interval of half a minute: some may fail
CYCLE_MAX_S = 120.0  # a process that stood still has no long cycles: it has seen nothing meanwhile


class _Sight(NamedTuple):
    """When this process has seen a warning first, and last (monotonic seconds)."""

    first: float
    last: float


class SeenWarnings:
    """Remembers from one cycle to the next whose owner was seen to be warned."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._sights: dict[HolderName, _Sight] = {}
        self._last_cycle: float | None = None
        self._cycle_s = 0.0

    def begin_cycle(self, turns: int) -> None:
        """A cycle begins, and each holder is looked at in one of so many."""
        now = self._clock.monotonic()
        most_s = max(UNSEEN_MAX_S, 2 * self._cycle_s * turns)  # of the cycle before: a gap is no reason for itself
        self._cycle_s = min(now - self._last_cycle, CYCLE_MAX_S) if self._last_cycle is not None else 0.0
        self._last_cycle = now
        self._sights = {name: sight for name, sight in self._sights.items() if now - sight.last <= most_s}

    def note(self, warnings: Mapping[HolderName, Warned], asked: Collection[HolderName]) -> dict[HolderName, Warned]:
        """The warnings of this look, each since it has been seen without a gap. `asked`: who was looked at."""
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
