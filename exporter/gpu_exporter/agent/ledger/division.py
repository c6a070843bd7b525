"""Divides the activity and the energy of a shared GPU among its holders.

The driver's list of processes may omit a process that works. So the exporter compares the list with the utilization of
the whole GPU. Rules for each period:

- If the holders' shares add up to more than the GPU's utilization, the shares are scaled down.
- If the shares explain too little of the utilization, none of them is used.
- A period that cannot be divided is unknown for every holder. It ends a holder's idle run only if the work may be the
  holder's own: the list contains its process, or the unit did more than the list explains. An unreadable list ends no
  idle run while a neighbour works.
- A holder is idle beside busy neighbours only if the neighbours explain all of the utilization.
- While the whole GPU is idle, every holder is idle, even without a list of processes.

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
COVERED_MIN = 0.8  # share of a period: if less of the GPU's own activity is known, nothing is compared
# If the list leaves more slacks of the utilization unexplained, it omits a process that works.
HIDDEN_SLACKS = 2
LOST_SLACK = 0.05  # as SLACK in attribution/usage.py
# If more lists of one unit fail within this time, the holder that works may be the reason.
# At one failed list of 300, in periods of 5 s, chance alone exceeds this once in two days.
LOST_MAX, LOST_OVER_S = 3, 600.0
LISTED_S = 60.0  # how long the listed work explains later work whose list cannot be read
# Two witnesses prove that a holder is idle beside busy neighbours: the driver's list lacks its processes, and the sum
# of the list agrees with the GPU's own utilization.
WITNESSES = 2


@dataclass(slots=True)
class Waiting:
    """A span that waits until a poll shows the holders of its unit. A span is a time with known activity.

    `booked_s`: seconds of full load that the ledger has already counted for holders.
    """

    span: Span
    booked_s: float = 0.0

    @property
    def unclaimed_s(self) -> float:
        """Seconds of full load that are not charged to any holder."""
        rest_s = (self.span.end - self.span.start) * self.span.ratio - self.booked_s
        return rest_s if rest_s > NOTHING else 0.0


def merge_active(spans: Iterable[Waiting], split: Split) -> deque[Waiting]:
    """Merges consecutive spans with utilization, within one period, to save CPU time.

    Nothing is lost: the driver reports the work of processes only for whole periods.
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
    """Energy that a GPU drew over (start, end]. `booked_j`: joules that are already charged to holders."""

    start: float
    end: float
    joules: float
    booked_j: float = 0.0

    @property
    def unclaimed_j(self) -> float:
        """Joules that are not charged to any holder."""
        rest_j = self.joules - self.booked_j
        return rest_j if rest_j > NOTHING else 0.0


class Listed:
    """The work of a shared unit's processes in the last minute, as the driver's lists show it."""

    def __init__(self) -> None:
        self._periods: deque[tuple[float, float, float]] = deque()  # end, mean utilization, highest utilization
        self._lost: list[float] = []  # ends of the last active periods without a list

    def note(self, end: float, mean: float, peak: float) -> None:
        """Adds a period whose list of processes explains the unit's utilization."""
        self._periods.append((end, mean, peak))
        while self._periods[0][0] < end - LISTED_S:
            self._periods.popleft()

    def note_lost(self, end: float) -> bool:
        """Adds an active period whose list could not be read. Returns True if too many lists could not be read lately
        (LOST_MAX).
        """
        self._lost = [*(at for at in self._lost if end - at <= LOST_OVER_S), end]
        return len(self._lost) > LOST_MAX

    def mean_before(self, at: float) -> float:
        """Returns the highest mean utilization of a period in the minute before `at`; 0 without a period."""
        return max((mean for end, mean, _ in self._periods if at - LISTED_S <= end <= at + TOUCHING_S), default=0.0)

    def explain(self, span: Span) -> bool:
        """Returns whether the listed processes reached this span's utilization at some time in the minute before it."""
        at = span.start
        peaks = [peak for end, _, peak in self._periods if at - LISTED_S <= end <= at + TOUCHING_S]
        return bool(peaks) and span.ratio <= max(peaks) + LOST_SLACK


class Division:
    """Compares the work of a shared unit's processes in one period with the utilization of the whole unit."""

    def __init__(self, split: Split, spans: Iterable[Span], listed: Listed) -> None:
        """Adds this period to `listed`, which holds the periods before it.

        `spans`: the known activity of the whole unit, in this period and around it.
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
        """Returns whether the work in this period may be this holder's own."""
        split = self._split
        if key in split.ratios:
            return True
        if self.active_until <= self.start or self.part_of(key) == 0.0:
            return split.others is not None and self._mean == 0.0
        if split.problem:  # the list could not be read
            return not self._before or self._mean > self._before + split.slack
        # An empty list proves nothing: it may omit the only process that works.
        return not self._sum or split.others is not None or self._mean - self._sum > HIDDEN_SLACKS * split.slack

    def _is_explained(self) -> bool:
        """Returns whether the listed processes account for all utilization of the unit."""
        return self._sum >= self._mean - self._split.slack

    def _is_holders(self) -> bool:
        """Returns whether all listed work belongs to holders. False if no work is listed."""
        return self._split.others is None and self._sum > 0.0

    def part_of(self, key: HolderKey) -> float | None:
        """Returns the holder's part of the unit's activity, 0 to 1, or None if unknown."""
        if self._split.problem or not self._is_covered or key in self._split.unclear:
            return None
        ratio = self._split.ratios.get(key)
        if not self._is_explained():
            return None  # the list may show only a fraction of each process's work: 1 % of a GPU that works at 100 %
        if ratio is None:
            return 0.0 if self._is_holders() else None
        return ratio / max(self._sum, self._mean)

    def contradicts_rest(self, key: HolderKey) -> bool:
        """Returns whether this holder's processes, or unowned processes, worked while the unit reports no work."""
        return self._mean == 0.0 and (key in self._split.ratios or self._split.others is not None)

    def judge(self, span: Span, key: HolderKey) -> Span | None:
        """Returns the holder's part of a span in which the unit was active, or None if the part is unknown."""
        part = self.part_of(key)
        if part is None:
            return None
        if part == 0.0:  # the neighbours caused the activity that the unit's witnesses saw
            return span._replace(ratio=0.0, other=(), witnesses=min(WITNESSES, span.witnesses))
        return span._replace(ratio=span.ratio * part)


def divide_joules(joules: float, rest_j: float, share: float, part: float | None) -> float:
    """Returns the holder's joules of a shared GPU's energy.

    The holder gets `share` of the energy at rest (`rest_j`), and `part` (Division.part_of) of the other energy.
    """
    floor = min(joules, rest_j)
    return floor * share + (joules - floor) * (part or 0.0)
