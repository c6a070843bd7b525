"""The driver's ring of utilization samples: which stretch of time does each entry cover?

An entry says when its period ended, not when it began. The period is learned from how far the stamps lie apart, so
that an entry that was lost leaves a hole and is not covered by the one after it.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections import deque
from collections.abc import Iterator, Sequence

from gpu_exporter.devices.protocol import UtilizationSample
from gpu_exporter.model.readings import UTILIZATION, Span

WALL_STEP_S = 1.0  # a wall clock that moved more than this against the monotonic one has been stepped
RING_AGE_MAX_S = 120.0  # a stamp that is older than any ring keeps is not wall time of this host: no source then
UNWATCHED_MAX_S = 0.05  # of a span: clocks of driver and host differ by less, a witness's silence by more
LATENESS = 1.1  # a cycle or sample that comes a tenth of a period late leaves no hole
SPACINGS = 32  # distances between stamps that the period is learned from
SAME_STAMP_S = 1e-6  # stamps are whole microseconds, and cross the border as a float


class RingPeriod:
    """How long one entry stands for, learned from the distances between stamps."""

    def __init__(self, longest_s: float) -> None:
        """`longest_s`: what an entry stands for while nothing is known, and at most."""
        self._longest_s = longest_s
        self._spacings: deque[float] = deque(maxlen=SPACINGS)
        self.seconds = longest_s

    def learn(self, spacings: Sequence[float]) -> None:
        """Take in more distances. Longer ones than a period can be are holes, and teach nothing."""
        fresh = [spacing for spacing in spacings if 0.0 < spacing <= LATENESS * self._longest_s]
        if not fresh:
            return
        self._spacings.extend(fresh)
        # Lost entries make distances longer, never shorter: the lower quartile holds while most entries are lost, and
        # the median of what lies near it evens out the jitter of the stamps.
        ordered = sorted(self._spacings)
        near = [spacing for spacing in ordered if spacing <= 1.5 * ordered[len(ordered) // 4]]
        self.seconds = min(self._longest_s, near[len(near) // 2])

    @property
    def is_learned(self) -> bool:
        return bool(self._spacings)


class DriverRing:
    """Turns the entries of one device's ring into spans, each entry once."""

    def __init__(self, longest_s: float) -> None:
        """`longest_s`: the longest period that the driver may have."""
        self.newest_wall = 0.0
        self.contradicted = False  # the last read brought work at a stamp that was already read as none
        self.answered = False  # the last read brought an entry that can be believed, be it the first, which has no span
        self.is_gapless = False  # the last read went on from the one before it without a hole
        self.length_s = 0.0  # what the ring keeps, as far as its answers have shown
        self._newest_ratio = 0.0
        self._period = RingPeriod(longest_s)
        self._longest_s = LATENESS * longest_s
        self._from = 0.0  # stamps up to this time are not believed

    @property
    def period_s(self) -> float:
        """How long one entry stands for."""
        return self._period.seconds

    def restart(self, wall: float) -> None:
        """The wall clock was stepped: what the ring holds was stamped in another time."""
        # A clock that went back meets its own stamps again, for as long as the ring keeps them.
        self._from = min(max(wall, self.newest_wall), wall + RING_AGE_MAX_S)
        self.newest_wall = wall
        self.contradicted = self.answered = self.is_gapless = False

    def read(self, samples: Sequence[UtilizationSample], monotonic: float, wall: float) -> tuple[Span, ...]:
        """Each entry covers (its stamp - the ring's period, its stamp], and nothing that an earlier one covered.

        Entries that follow one another without a hole and say the same are one span.
        """
        self.contradicted = self.answered = self.is_gapless = False
        if wall <= self._from:
            self.newest_wall = wall  # the clock went back: the ring still holds that time from before
            return ()
        if self._is_steady(samples, wall):
            span = Span(self.newest_wall + monotonic - wall, samples[-1].wall + monotonic - wall, samples[0].ratio)
            self.answered = self.is_gapless = True
            self.length_s = max(self.length_s, samples[-1].wall - samples[0].wall)
            self.newest_wall, self._newest_ratio = samples[-1].wall, span.ratio
            return (span,)
        entries = self._fold(samples, wall)
        self.is_gapless = self.newest_wall > 0.0 and bool(entries)
        stamps = [self.newest_wall, *(entry.wall for entry in entries)]
        self._period.learn([later - earlier for earlier, later in itertools.pairwise(stamps)])
        shift = monotonic - wall
        spans: list[Span] = []
        for entry in entries:
            if entry.wall > wall - RING_AGE_MAX_S and 0.0 <= entry.ratio <= 1.0:
                self.answered = True
                start = max(self.newest_wall, entry.wall - self._length_of(entry))
                self.is_gapless &= start == self.newest_wall
                if self.newest_wall > 0.0:
                    spans.append(Span(start + shift, entry.wall + shift, entry.ratio))
            else:
                self.is_gapless = False
            self.newest_wall, self._newest_ratio = entry.wall, entry.ratio
        if entries:
            kept_s = self._unbroken(samples)
            # After a hole the ring may be all that it answered: then it is shorter than the time since the last read.
            self.length_s = max(self.length_s, kept_s) if self.is_gapless else kept_s
        return tuple(spans)

    def _is_steady(self, samples: Sequence[UtilizationSample], wall: float) -> bool:
        """Whether these entries are all new, go on from the one before without a hole, and say the same share.

        That is so most of the time, and far quicker to see than to take the entries one by one.
        """
        if not samples or not self._period.is_learned or self.newest_wall <= 0.0:
            return False
        ratios = {sample.ratio for sample in samples}
        if len(ratios) > 1 or not 0.0 <= samples[0].ratio <= 1.0 or samples[0].span_s is not None:
            return False
        period = self._period.seconds
        stamps = [self.newest_wall, *(sample.wall for sample in samples)]
        apart = list(map(operator.sub, stamps[1:], stamps))
        is_new = apart[0] > period / 2 and min(apart) >= 0.0 and stamps[-1] <= wall + UNWATCHED_MAX_S
        return is_new and max(apart) <= min(self._longest_s, LATENESS * period) and stamps[1] > wall - RING_AGE_MAX_S

    def _unbroken(self, samples: Sequence[UtilizationSample]) -> float:
        """Seconds up to the newest entry in which no two stamps lie further apart than the longest period."""
        stamps = sorted(sample.wall for sample in samples)
        begin = stamps[-1]
        for stamp in reversed(stamps):
            if begin - stamp > self._longest_s:
                break
            begin = stamp
        return stamps[-1] - begin

    def _length_of(self, entry: UtilizationSample) -> float:
        """How long an entry stands for, in seconds."""
        known = entry.span_s if entry.span_s is not None else LATENESS * self._period.seconds
        return min(self._longest_s, known)

    def _fold(self, samples: Sequence[UtilizationSample], wall: float) -> list[UtilizationSample]:
        """New entries in the order of their stamps. Of entries for the same time the busiest counts, and one that is
        not a share makes that time unknown unless another one shows work.
        """
        entries: list[UtilizationSample] = []
        apart = 0.5 * self._period.seconds if self._period.is_learned else SAME_STAMP_S
        begin = self.newest_wall
        for sample in sorted(samples):
            if sample.wall > wall + WALL_STEP_S:
                continue
            if sample.wall > wall + UNWATCHED_MAX_S:
                break  # a clock that leads: to be read again when its time was watched
            near = SAME_STAMP_S if sample.span_s is not None else apart
            if self.newest_wall > 0.0 and abs(sample.wall - self.newest_wall) <= near:
                self.contradicted |= sample.ratio > 0.0 and self._newest_ratio == 0.0
            if sample.wall <= self.newest_wall:
                continue
            if entries and sample.wall - begin <= near:
                entries[-1] = sample._replace(ratio=_busier(entries[-1].ratio, sample.ratio))
            else:
                entries.append(sample)
                begin = sample.wall
        return entries


def _busier(one: float, other: float) -> float:
    """The higher share; a value that is not a share prevails over none, since it may stand for work."""
    shares = [ratio for ratio in (one, other) if 0.0 <= ratio <= 1.0]
    if len(shares) == 2 or (shares and shares[0] > 0.0):
        return max(shares)
    return one if not 0.0 <= one <= 1.0 else other


def pieces(span: Span, longest_s: float) -> Iterator[Span]:
    """A span of many entries in equal parts of at most `longest_s` seconds."""
    number = max(1, math.ceil((span.end - span.start) / longest_s))
    edges = [span.start + (span.end - span.start) * i / number for i in range(number)] + [span.end]
    return (span._replace(start=start, end=end) for start, end in itertools.pairwise(edges))


def agreeing(spans: Sequence[Span], rate_at: float, longest_s: float) -> tuple[Span, ...]:
    """The driver reports work beside its ring: zeros of the time that this rate, read at `rate_at`, stands for are not
    idle, unless other entries of that time explain it; the newest is not idle in any case.
    """
    recent = [span for span in spans if span.end > rate_at - longest_s]
    doubtful = recent[-1:] if any(span.ratio > 0.0 for span in recent) else recent
    return tuple(span._replace(other=(UTILIZATION,)) if span in doubtful else span for span in spans)
