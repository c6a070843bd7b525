"""Divides the activity and the energy of a shared GPU among its holders.

The driver's values for single processes are no proof alone, because the driver may leave out a process that works. They
count only as far as they explain the activity of the whole GPU. For each period:

- If the sum of the holders' shares exceeds the GPU's own utilization, the shares are scaled down.
- If the sum explains too little of that utilization, no share is used.
- A period that cannot be divided is unknown for every holder. It ends the idle run of a holder only if the work may be
  the holder's own: its process is listed, or the unit did more than the listed processes explain. A list that cannot
  be read, beside a neighbour that works, is no such sign.
- A holder is idle beside busy neighbours only if the neighbours explain all of the utilization.
- While the whole GPU is idle, every holder is idle. No values for processes are needed.

Pure: no clock, no lock, no file.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from gpu_exporter.common.model.holders import HolderKey
from gpu_exporter.common.model.readings import Span, Split

TOUCHING_S = 1e-6  # for spans that follow each other: their common timestamp may differ as floats
NOTHING = 1e-9  # seconds or joules; sums of fractions leave smaller remainders
COVERED_MIN = 0.8  # share of a period: if less is known about the GPU itself, nothing can be compared
# The list may leave so many slacks of the utilization unexplained. More is work of a process that it leaves out.
HIDDEN_SLACKS = 2
LOST_SLACK = 0.05  # as SLACK in attribution/usage.py
# More lists of one unit that are lost within this time are no accident: they may fail because of the holder that works.
# At one lost list of 300, in periods of 5 s, that happens once in two days.
LOST_MAX, LOST_OVER_S = 3, 600.0
LISTED_S = 60.0  # how long the work of listed processes explains later work whose list is lost
# A holder that is idle beside busy neighbours is proven by two witnesses: it is missing in the driver's list of
# processes, and the sum of that list agrees with the GPU's own utilization.
WITNESSES = 2


@dataclass(slots=True)
class Waiting:
    """A span (a time with known activity) of a unit, until a poll shows who held the unit in it.

    `booked_s`: seconds of full load that were already charged to (counted for) holders.
    """

    span: Span
    booked_s: float = 0.0

    @property
    def unclaimed_s(self) -> float:
        """Seconds of full load that no holder was charged for."""
        rest_s = (self.span.end - self.span.start) * self.span.ratio - self.booked_s
        return rest_s if rest_s > NOTHING else 0.0


def merge_active(spans: Iterable[Waiting], split: Split) -> deque[Waiting]:
    """Merge consecutive spans of a period that have utilization.

    The driver reports the work of processes only for a whole period, so single spans would only cost CPU.
    """
    merged: deque[Waiting] = deque()
    for waiting in spans:
        span, last = waiting.span, merged[-1] if merged else None
        if last is not None and _is_one(last.span, span, split):
            busy_s = sum((each.end - each.start) * each.ratio for each in (last.span, span))
            ratio, witnesses = busy_s / (span.end - last.span.start), min(last.span.witnesses, span.witnesses)
            whole = Span(last.span.start, span.end, ratio, (), witnesses)
            merged[-1] = Waiting(whole, last.booked_s + waiting.booked_s)
        else:
            merged.append(waiting)
    return merged


def _is_one(before: Span, after: Span, split: Split) -> bool:
    is_inside = split.start <= before.start and after.end <= split.end
    return is_inside and before.ratio > 0.0 < after.ratio and after.start - before.end <= TOUCHING_S


@dataclass(slots=True)
class Charge:
    """Energy that a GPU drew over (start, end]. `booked_j`: joules that were already charged to holders."""

    start: float
    end: float
    joules: float
    booked_j: float = 0.0

    @property
    def unclaimed_j(self) -> float:
        """Joules that no holder was charged for."""
        rest_j = self.joules - self.booked_j
        return rest_j if rest_j > NOTHING else 0.0


class Listed:
    """The work of the listed processes of one shared unit in the last minute."""

    def __init__(self) -> None:
        self._periods: deque[tuple[float, float, float]] = deque()  # end, mean utilization, highest utilization
        self._lost: list[float] = []  # ends of the last active periods without a list

    def note(self, end: float, mean: float, peak: float) -> None:
        """Add a period whose list explains the unit's utilization."""
        self._periods.append((end, mean, peak))
        while self._periods[0][0] < end - LISTED_S:
            self._periods.popleft()

    def note_lost(self, end: float) -> bool:
        """Add an active period whose list could not be read. Returns whether such losses are frequent."""
        self._lost = [*(at for at in self._lost if end - at <= LOST_OVER_S), end]
        return len(self._lost) > LOST_MAX

    def mean_before(self, at: float) -> float:
        """The highest mean utilization of a period in the minute before; 0 without such a period."""
        return max((mean for end, mean, _ in self._periods if at - LISTED_S <= end <= at + TOUCHING_S), default=0.0)

    def explain(self, span: Span) -> bool:
        """Whether the listed processes worked at least as much at some moment of the minute before this span."""
        at = span.start
        peaks = [peak for end, _, peak in self._periods if at - LISTED_S <= end <= at + TOUCHING_S]
        return bool(peaks) and span.ratio <= max(peaks) + LOST_SLACK


class Division:
    """Compares the work of processes on a shared unit, in one period, with the work of the whole unit."""

    def __init__(self, split: Split, spans: Iterable[Span], listed: Listed) -> None:
        """`spans`: the known activity of the unit itself, in this period and around it. `listed`: the work of the
        periods before; this period is added to it.
        """
        self.start, self.end = split.start, split.end
        self.active_until = -math.inf
        """when the unit was last active in this period"""
        known_s = busy_s = peak = 0.0
        for span in spans:
            length = min(span.end, split.end) - max(span.start, split.start)
            if length > 0.0:
                known_s += length
                busy_s += length * span.ratio
                peak = max(peak, span.ratio)
                if span.ratio or span.other:
                    self.active_until = min(span.end, split.end)
        self._split = split
        self._is_covered = known_s >= COVERED_MIN * (split.end - split.start)
        self._mean = busy_s / known_s if known_s else 0.0
        self._sum = sum(split.ratios.values()) + (split.others or 0.0)
        self._before = listed.mean_before(split.start)
        if split.problem and self._mean > 0.0 and listed.note_lost(split.end):
            self._before = 0.0
        if self._is_covered and self._is_holders() and self._is_explained() and not split.problem:
            listed.note(split.end, self._sum, peak)

    def may_be_of(self, key: HolderKey) -> bool:
        """Whether work in this period is this holder's, or may be because no list explains it."""
        split = self._split
        if key in split.ratios:
            return True
        if self.active_until <= self.start or self.part_of(key) == 0.0:
            return split.others is not None and self._mean == 0.0
        if split.problem:  # a list that cannot be read is lost, whoever works
            return not self._before or self._mean > self._before + split.slack
        # An empty list is not lost: it may leave out the only process that works.
        return not self._sum or split.others is not None or self._mean - self._sum > HIDDEN_SLACKS * split.slack

    def _is_explained(self) -> bool:
        """Whether the listed processes account for all activity of the unit."""
        return self._sum >= self._mean - self._split.slack

    def _is_holders(self) -> bool:
        """Whether all listed activity belongs to holders."""
        return self._split.others is None and self._sum > 0.0

    def part_of(self, key: HolderKey) -> float | None:
        """The holder's part of the unit's activity, 0 to 1. None if it is unknown."""
        if self._split.problem or not self._is_covered or key in self._split.unclear:
            return None
        ratio = self._split.ratios.get(key)
        if not self._is_explained():
            return None  # the list may show only a fraction of each process's work: 1 % of a GPU that works at 100 %
        if ratio is None:
            return 0.0 if self._is_holders() else None
        return ratio / max(self._sum, self._mean)

    def contradicts_rest(self, key: HolderKey) -> bool:
        """Whether the driver reports work of this holder or of an unknown process, but no work of the unit."""
        return self._mean == 0.0 and (key in self._split.ratios or self._split.others is not None)

    def judge(self, span: Span, key: HolderKey) -> Span | None:
        """The holder's part of a span in which the unit was active. None if it may be any part."""
        part = self.part_of(key)
        if part is None:
            return None
        if part == 0.0:  # the neighbours caused the activity that the unit's witnesses saw
            return span._replace(ratio=0.0, other=(), witnesses=min(WITNESSES, span.witnesses))
        return span._replace(ratio=span.ratio * part)


def divide_joules(joules: float, rest_j: float, share: float, part: float | None) -> float:
    """The holder's part of a shared GPU's energy: of the energy at rest by `share`, of the other energy by `part`.

    `rest_j`: the energy that the GPU would have drawn at rest. `part`: as in Division.part_of.
    """
    floor = min(joules, rest_j)
    return floor * share + (joules - floor) * (part or 0.0)
