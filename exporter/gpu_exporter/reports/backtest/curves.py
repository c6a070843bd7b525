"""Reads the utilization before, during and after an idle time, with one small query."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple, Protocol

from gpu_exporter.common.errors import AnswerError
from gpu_exporter.reports.backtest.lives import HolderLife
from gpu_exporter.reports.history.asking import History, WindowSpan

POINTS = 40  # of a curve, at most
AROUND = 0.25  # of the stretch: the time before and after it that is shown
GRID_S = 60.0


class UseCurve(NamedTuple):
    """The mean utilization (0 to 1) of a holder's units. Each value covers `window` seconds; the first begins at
    `start` (Unix seconds). A value is None if there is no sample.
    """

    start: float
    window: float
    values: tuple[float | None, ...] = ()


NO_CURVE = UseCurve(0.0, GRID_S)


class CurveSource(Protocol):
    """A source of past utilization."""

    def mean(self, life: HolderLife, seconds: float) -> str:
        """Returns PromQL for the units' mean utilization over windows of `seconds`. "" if the source has none."""
        ...


def read_curve(
    history: History, sources: Iterable[CurveSource], life: HolderLife, start: float, end: float, until: float
) -> UseCurve:
    """Reads the utilization around the idle time from `start` to `end`, while the holder had its units, and before
    `until`.

    Returns a curve without values if the server does not answer, because the backtest is complete without it.
    """
    around = AROUND * (end - start)
    first = math.ceil(max(life.start, start - around) / GRID_S) * GRID_S
    last = math.floor(min(life.end, end + around, until) / GRID_S) * GRID_S
    window = math.ceil(max(last - first, 1.0) / POINTS / GRID_S) * GRID_S
    count = int((last - first) // window)
    for source in sources if count > 0 else ():
        query = source.mean(life, window)
        if not query:
            continue
        try:
            found = history.ask_table("curve", query, WindowSpan(first, first + count * window, window))
        except AnswerError:
            continue
        for values in found.values():
            return UseCurve(first, window, tuple(values.get(first + n * window) for n in range(count)))
    return UseCurve(first, window)
