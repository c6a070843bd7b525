"""Measures for how long each owner has been warned, as far as this process has observed it.

The start time of an alert hides silences, changed routes and outages of Alertmanager. So only the time between two
checks counts, and a gap resets the timer to zero.
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
    """The first and the last time at which this process saw a warning (monotonic seconds)."""

    first: float
    last: float


class SeenWarnings:
    """Remembers from cycle to cycle which owners of holders are warned."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._sights: dict[HolderName, _Sight] = {}
        self._last_cycle: float | None = None
        self._cycle_s = 0.0

    def begin_cycle(self, turns: int) -> None:
        """Begins a cycle. `turns`: the number of cycles in which each holder is checked once."""
        now = self._clock.monotonic()
        most_s = max(UNSEEN_MAX_S, 2 * self._cycle_s * turns)  # by the previous cycle: a gap must not extend its limit
        self._cycle_s = min(now - self._last_cycle, CYCLE_MAX_S) if self._last_cycle is not None else 0.0
        self._last_cycle = now
        self._sights = {name: sight for name, sight in self._sights.items() if now - sight.last <= most_s}

    def note(self, warnings: Mapping[HolderName, Warned], asked: Collection[HolderName]) -> dict[HolderName, Warned]:
        """Returns the warnings of this check. Each begins when this process first saw it, and has since seen it without
        a gap.

        `asked`: the holders that were checked.
        """
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
