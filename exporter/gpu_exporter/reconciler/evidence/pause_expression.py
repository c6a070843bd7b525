"""Times that say nothing of holders, by an expression of the site: storage was down, there was maintenance.

A GPU that was idle then could not have worked, so nothing is marked while the expression has a result, and no idle time
before its last one counts. The expression is asked for its past as well, so that a reconciler that starts just after a
pause knows of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from gpu_exporter.reconciler.decision.rulebook import Rulebook
from gpu_exporter.reconciler.evidence.records import EvidenceError

STEP_S = 60.0  # between two looks at the past: a pause shorter than this can be missed
OVERLAP_S = 600.0  # of the past that is asked for again in each cycle


class Valued(Protocol):
    """A row of an instant vector."""

    @property
    def value(self) -> float: ...


class Pause(NamedTuple):
    """`now`: what pauses, in words, "" for nothing. `until_wall`: end of the last pause (Unix seconds), or None."""

    now: str = ""
    until_wall: float | None = None


class Pauses:
    """Remembers the last pause, so that only what is new is asked for."""

    def __init__(self, book: Rulebook) -> None:
        self._expression = book.site.pause_when
        self._longest_s = book.longest_s
        self._asked: float | None = None
        self._until: float | None = None

    def read(self, query: Callable[[str], Sequence[Valued]], wall: float) -> Pause:
        """The pause at `wall` (Unix seconds). Raises EvidenceError, as `query` does."""
        if not self._expression:
            return Pause()
        past_s = self._longest_s if self._asked is None else wall - self._asked + OVERLAP_S
        past_s = min(max(past_s, OVERLAP_S), self._longest_s)
        try:
            matched = query(f"count({self._expression})")
            before = query(f"max_over_time(timestamp(count({self._expression}))[{past_s:.0f}s:{STEP_S:.0f}s])")
        except EvidenceError as exc:
            raise EvidenceError(f"policy.pause_when: {exc}") from exc
        self._asked = wall
        ends = [min(row.value + STEP_S, wall) for row in before] + [wall for _ in matched]
        self._until = max((end for end in [self._until, *ends] if end is not None), default=None)
        count = math.floor(matched[0].value) if matched else 0
        return Pause(f"policy.pause_when has {count} series" if matched else "", self._until)
