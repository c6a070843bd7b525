"""Runs cycles that write. A problem is counted in every cycle, and logged only when it changes."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from gpu_exporter.common.clock import Clock
from gpu_exporter.reconciler.cycle import ReconcileCycle
from gpu_exporter.reconciler.marks import Marker, MarkError, guard
from gpu_exporter.reconciler.telemetry import Telemetry

log = logging.getLogger(__name__)


class Leadership(Protocol):
    """Decides which of several processes writes. A Protocol, because the Lease needs the kubernetes client."""

    def may_write(self) -> bool:
        """Returns whether this process certainly may write."""

    def wait(self, seconds: float) -> bool:
        """Waits at most `seconds` until this process may write. Returns whether it may write now."""


class ApplyRuns:
    """Runs the cycle, if this process may write."""

    def __init__(
        self,
        cycle: ReconcileCycle,
        telemetry: Telemetry,
        clock: Clock,
        leadership: Leadership | None = None,
        wait_s: float = 0.0,
        forget: Callable[[], None] = lambda: None,
    ) -> None:
        """`leadership`: None if there is no other process.
        `wait_s`: how long a run waits for leadership (seconds).
        `forget`: called while another process decides, because the memory of this process then becomes outdated.
        """
        self._cycle = cycle
        self._telemetry = telemetry
        self._clock = clock
        self._leadership = leadership
        self._wait_s = wait_s
        self._forget = forget
        self._last_problem = ""
        self._rest_until = -math.inf

    @property
    def rests(self) -> bool:
        """Whether a scheduler was slow and must get no requests now."""
        return self._clock.monotonic() < self._rest_until

    def run(self) -> str:
        """Runs one cycle. Returns the failures in words, "" if there were none or another process runs the cycle.

        After a scheduler was slow to list its marks, skips some runs, so that it gets fewer requests.
        """
        if self._leadership is not None and not self._leadership.may_write():
            self._telemetry.note_standby()
            self._forget()
            if not self._leadership.wait(self._wait_s):
                return ""
        if self.rests:
            return self._last_problem
        began = self._clock.monotonic()
        problem = self._cycle.run()
        self._rest_until = began + self._cycle.rest_s
        self._telemetry.note_odd(self._cycle.odd, self._cycle.foreign)
        self._telemetry.note_surveyed(self._cycle.surveyed, self._cycle.unreadable)
        cycle = self._cycle
        self._telemetry.note_cycle(began, not problem, cycle.standing, cycle.decisions, cycle.frozen, cycle.unmarked)
        if problem != self._last_problem:  # once, not in every run
            if problem:
                log.warning("cycle incomplete: %s", problem)
            else:
                log.info("cycles are complete again")
        self._last_problem = problem
        return problem


class RemovedMark(NamedTuple):
    """One mark: its holder, its stage, the outcome in words, and whether the mark was removed."""

    title: str
    stage: str
    outcome: str
    is_done: bool


def withdraw_all(
    markers: Sequence[Marker], clock: Clock, *, apply: bool, may_write: Callable[[], bool] = lambda: True
) -> Iterator[RemovedMark]:
    """Withdraws every mark. Without `apply`, only lists the marks.

    `may_write`: called before each withdrawal; false while another reconciler may write. Raises MarkError if the marks
    cannot be listed.
    """
    for marker in markers:
        for mark in guard(marker.list_marks):
            outcome, is_done = "would be withdrawn with --apply", True
            if apply:
                try:
                    if not may_write():
                        raise MarkError("fenced", "another reconciler may hold the Lease")
                    guard(marker.withdraw, mark, "all marks are removed", clock.wall())
                    outcome = "withdrawn"
                except MarkError as exc:
                    outcome, is_done = f"not withdrawn: {exc}", False
            yield RemovedMark(mark.title, mark.stage, outcome, is_done)
