"""Pauses by a PromQL expression of the site (policy.pause_when), e.g. for a storage outage or maintenance.

During a pause, a GPU cannot work. So the reconciler marks nothing while the expression has a result, and idle time
before its last result does not count. A query of the past finds a pause that ended before the reconciler started.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from gpu_exporter.common.errors import AnswerError
from gpu_exporter.common.promql.vector import VectorRow

STEP_S = 60.0  # between two looks at the past: a pause shorter than this can be missed
OVERLAP_S = 600.0  # of the past that each cycle queries again


class Pause(NamedTuple):
    """The present and the last pause.

    `now`: the reason of the present pause, "" without one. `until_wall`: end of the last pause (Unix seconds), or None.
    """

    now: str = ""
    until_wall: float | None = None


class Pauses:
    """Remembers the last pause, so that later queries cover only the time since then."""

    def __init__(self, expression: str, longest_s: float) -> None:
        """`expression`: PromQL, "" for none. `longest_s`: seconds after which an ended pause changes no decision."""
        self._expression = expression
        self._longest_s = longest_s
        self._asked: float | None = None
        self._until: float | None = None

    def read(self, query: Callable[[str], Sequence[VectorRow]], wall: float) -> Pause:
        """Returns the pause at `wall` (Unix seconds). Raises AnswerError, like `query`."""
        if not self._expression:
            return Pause()
        past_s = self._longest_s if self._asked is None else wall - self._asked + OVERLAP_S
        past_s = min(max(past_s, OVERLAP_S), self._longest_s)
        try:
            matched = query(f"count({self._expression})")
            before = query(f"max_over_time(timestamp(count({self._expression}))[{past_s:.0f}s:{STEP_S:.0f}s])")
        except AnswerError as exc:
            raise AnswerError(f"policy.pause_when: {exc}") from exc
        self._asked = wall
        ends = [min(row.value + STEP_S, wall) for row in before] + [wall for _ in matched]
        self._until = max((end for end in [self._until, *ends] if end is not None), default=None)
        count = math.floor(matched[0].value) if matched else 0
        return Pause(f"policy.pause_when has {count} series" if matched else "", self._until)
