"""How the activity and the energy of a shared GPU are divided among its holders.

What the driver says of single processes is not trusted by itself: a process that it leaves out may be one that works.
It counts as far as it explains what the whole GPU did. So for each period: the holders' shares, scaled down where they
are more than the GPU's own; nothing of anybody where they explain too little of it; and a holder is idle beside busy
neighbours only where the neighbours explain all of it. Time at which the whole GPU was idle is everybody's, without
asking anybody.

Pure: no clock, no lock, no file.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from gpu_exporter.model.holders import HolderKey
from gpu_exporter.model.readings import Span, Split

TOUCHING_S = 1e-6  # between spans that follow one another: stamps cross the border as floats
NOTHING = 1e-9  # of seconds or joules: what sums of fractions leave over
COVERED_MIN = 0.8  # of a period: where less of it is known of the GPU itself, nothing can be compared
# A holder that is idle beside busy neighbours rests on two witnesses: it is missing in the driver's list of processes,
# and the sum of that list agrees with the GPU's own utilization.
WITNESSES = 2


@dataclass(slots=True)
class Waiting:
    """A span of a unit that waits for its holders, and the seconds of full load that they have had of it."""

    span: Span
    booked_s: float = 0.0

    @property
    def unclaimed_s(self) -> float:
        """Seconds of full load that are nobody's."""
        rest_s = (self.span.end - self.span.start) * self.span.ratio - self.booked_s
        return rest_s if rest_s > NOTHING else 0.0


def merge_active(spans: Iterable[Waiting], split: Split) -> deque[Waiting]:
    """Merge the spans of a period that follow one another and have utilization. The driver reports processes by period
    only, and charging every holder for each span would cost CPU.
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
    """Energy drawn over (start, end], and what of it the holders have had."""

    start: float
    end: float
    joules: float
    booked_j: float = 0.0

    @property
    def unclaimed_j(self) -> float:
        """Joules that are nobody's."""
        rest_j = self.joules - self.booked_j
        return rest_j if rest_j > NOTHING else 0.0


class Division:
    """One period of a shared unit: what its holders' processes did, beside what the whole unit did."""

    def __init__(self, split: Split, spans: Iterable[Span]) -> None:
        """`spans`: what is known of the unit itself, of this period and around."""
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
        """Whether the processes that the driver lists account for all that the unit did."""
        return self._sum >= self._mean - self._split.slack

    def _is_holders(self) -> bool:
        """Whether all of it is the holders' own."""
        return self._split.others is None and self._sum > 0.0

    def part_of(self, key: HolderKey) -> float | None:
        """Which part of the unit's activity is this holder's, 0 to 1; None while that is not known."""
        if self._split.problem or not self._is_covered or key in self._split.unclear:
            return None
        ratio = self._split.ratios.get(key)
        if not self._is_explained():
            return None  # what is listed may be a fraction of what each did: 1 % of a GPU that works at 100 %
        if ratio is None:
            return 0.0 if self._is_holders() else None
        return ratio / max(self._sum, self._mean)

    def contradicts_rest(self, key: HolderKey) -> bool:
        """Whether the driver reports work of this holder, or of an unknown process, while the unit reports none."""
        return self._mean == 0.0 and (key in self._split.ratios or self._split.others is not None)

    def judge(self, span: Span, key: HolderKey) -> Span | None:
        """What a span, in which the unit was active, says of this holder; None when the activity may be its own."""
        part = self.part_of(key)
        if part is None:
            return None
        if part == 0.0:  # whatever the unit's witnesses saw, the neighbours did it
            return span._replace(ratio=0.0, other=(), witnesses=min(WITNESSES, span.witnesses))
        return span._replace(ratio=span.ratio * part)


def divide_joules(joules: float, rest_j: float, share: float, part: float | None) -> float:
    """What a holder has of the energy of a shared GPU: of what it draws at rest by its share, of the rest by its part
    of the activity.

    `rest_j`: what the GPU would have drawn at rest; `part` as in Division.part_of.
    """
    floor = min(joules, rest_j)
    return floor * share + (joules - floor) * (part or 0.0)
