"""Limits the actions and reads of the reconciler per cycle and per hour, and pauses a target after a failed attempt."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection

from gpu_exporter.common.clock import Clock
from gpu_exporter.common.config.defaults import Actions as Settings
from gpu_exporter.common.durations import describe_duration
from gpu_exporter.reconciler.actions.journal import HOUR_S
from gpu_exporter.reconciler.marks import Refused

FAILED_S = HOUR_S  # how long a target is left alone after a failed attempt, so that it takes no other target's place
TARGETS_MAX = 10  # targets that a cycle reads: each is a list of a namespace, or of all jobs
WITHIN_S = 60.0  # longest time that a cycle spends on actions; the next cycle withdraws marks


class ActionLimits:
    """Counts actions and reads, per cycle and per hour. `begin_cycle` and the `note_` methods change them."""

    def __init__(self, settings: Settings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._shadowed: deque[float] = deque()  # when each action of mode shadow was counted (monotonic)
        self._failed_at: dict[str, float] = {}  # monotonic, by title
        self._read_at: dict[str, float] = {}  # monotonic, by title: when the target was read last
        self._acts_left = 0
        self._reads_left = 0
        self._until = 0.0  # monotonic

    def begin_cycle(self, titles: Collection[str]) -> None:
        """Resets the counts of a cycle. `titles`: of all proposals, also those that later cycles handle."""
        now = self._clock.monotonic()
        while self._shadowed and now - self._shadowed[0] >= HOUR_S:
            self._shadowed.popleft()
        self._failed_at = {title: at for title, at in self._failed_at.items() if now - at < FAILED_S}
        self._read_at = {title: at for title, at in self._read_at.items() if title in titles}
        self._acts_left, self._reads_left, self._until = self._settings.cycle_max, TARGETS_MAX, now + WITHIN_S

    def last_read(self, title: str) -> float:
        """Time at which this target was last read (monotonic seconds), -inf if never."""
        return self._read_at.get(title, -math.inf)

    def object_to(self, title: str, begun: int | None) -> None:
        """Raises Refused if a limit is reached.

        `begun`: actions of the last hour according to the journal; None in mode shadow.
        """
        now = self._clock.monotonic()
        if now - self._failed_at.get(title, -math.inf) < FAILED_S:
            raise Refused("failed", f"the last attempt failed less than {describe_duration(FAILED_S)} ago")
        if now > self._until:
            raise Refused(
                "limit", f"the time for actions in this cycle ({WITHIN_S:.0f} s) is used up; the next cycle continues"
            )
        within_an_hour = sum(now - at < HOUR_S for at in self._shadowed) if begun is None else begun
        if self._acts_left <= 0 or within_an_hour >= self._settings.hour_max:
            raise Refused(
                "limit", "this cycle or hour already has as many actions as actions.cycle_max or hour_max allows"
            )

    def object_to_reading(self) -> None:
        """Raises Refused if this cycle has read enough targets."""
        if self._reads_left <= 0:
            raise Refused("limit", f"this cycle has read {TARGETS_MAX} targets; the next cycle continues")

    def note_reading(self, title: str) -> None:
        self._reads_left -= 1
        self._read_at[title] = self._clock.monotonic()

    def note_act(self, *, is_shadow: bool = False) -> None:
        """Counts one action, or in mode shadow an action that mode act would take."""
        self._acts_left -= 1
        if is_shadow:
            self._shadowed.append(self._clock.monotonic())

    def note_failure(self, title: str) -> None:
        """Notes that an attempt failed because of the target itself."""
        self._failed_at[title] = self._clock.monotonic()
