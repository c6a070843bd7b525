"""Divides the activity and the energy of a shared GPU among its holders.

The driver's values for single processes are no proof alone, because the driver may leave out a process that works. They
count only as far as they explain the activity of the whole GPU. For each period:

- If the sum of the holders' shares exceeds the GPU's own utilization, the shares are scaled down.
- If the sum explains too little of that utilization, no share is used.
- A holder is idle beside busy neighbours only if the neighbours explain all of the utilization.
- While the whole GPU is idle, every holder is idle. No values for processes are needed.

Pure: no clock, no lock, no file.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from gpu_exporter.common.model.holders import HolderKey
from gpu_exporter.common.model.readings import Span, Split

TOUCHING_S = 1e-6  # for spans that follow each other: their common timestamp may differ as floats
NOTHING = 1e-9  # seconds or joules; sums of fractions leave smaller remainders
COVERED_MIN = 0.8  # share of a period: if less is known about the GPU itself, nothing can be compared
# A holder that is idle beside busy neighbours is proven by two witnesses: it is missing in the driver's list of
# processes,
# and the sum of that list agrees with the GPU's own utilization.
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


class Division:
    """Compares the work of processes on a shared unit, in one period, with the work of the whole unit."""

    def __init__(self, split: Split, spans: Iterable[Span]) -> None:
        """`spans`: the known activity of the whole unit, in this period and around it."""
        self.start, self.end = split.start, split.end
        known_s = busy_s = 0.0
        for span in spans:
            length = min(span.end, split.end) - max(span.start, split.start)
            if length > 0.0:
                known_s += length
                busy_s += length * span.ratio
        self._split = split
        self._is_covered = known_s >= COVERED_MIN * (split.end - split.start)
        self._mean = busy_s / known_s if known_s else 0.0
        self._sum = sum(split.ratios.values()) + (split.others or 0.0)

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
