"""Converts the driver's ring buffer of utilization samples into spans (times with known activity).

The stamp of an entry is the end of its period, not the start. The length of a period is learned from the distances
between stamps, so that an entry covers no more than one period. The time of a lost entry remains unknown.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections import deque
from collections.abc import Iterator, Sequence

from gpu_exporter.agent.devices.protocol import UtilizationSample
from gpu_exporter.common.model.readings import UTILIZATION, Span

WALL_STEP_S = 1.0  # a wall clock that moved more than this against the monotonic clock has been stepped
RING_AGE_MAX_S = 120.0  # no ring keeps older stamps: such a stamp is not wall time of this host and is ignored
UNWATCHED_MAX_S = 0.05  # longer than the clocks of driver and host differ, shorter than a gap between witnesses
LATENESS = 1.1  # a cycle or sample that comes a tenth of a period late leaves no hole
SPACINGS = 32  # number of distances between stamps that the period is learned from
SAME_STAMP_S = 1e-6  # stamps are whole microseconds, and are passed as a float


class RingPeriod:
    """The seconds that one entry covers, learned from the distances between stamps."""

    def __init__(self, longest_s: float) -> None:
        """`longest_s`: the most seconds that an entry can cover. The period has this length until it is learned."""
        self._longest_s = longest_s
        self._spacings: deque[float] = deque(maxlen=SPACINGS)
        self.seconds = longest_s

    def learn(self, spacings: Sequence[float]) -> None:
        """Learns from distances between stamps, in seconds. Ignores holes: distances longer than any period."""
        fresh = [spacing for spacing in spacings if 0.0 < spacing <= LATENESS * self._longest_s]
        if not fresh:
            return
        self._spacings.extend(fresh)
        # Lost entries make distances longer, never shorter: the lower quartile is right even if most entries are lost.
        # The median of the distances near the quartile evens out the jitter of the stamps.
        ordered = sorted(self._spacings)
        near = [spacing for spacing in ordered if spacing <= 1.5 * ordered[len(ordered) // 4]]
        self.seconds = min(self._longest_s, near[len(near) // 2])

    @property
    def is_learned(self) -> bool:
        return bool(self._spacings)


class DriverRing:
    """Converts the entries of one device's ring buffer into spans. Uses each entry once."""

    def __init__(self, longest_s: float) -> None:
        """`longest_s`: the most seconds that one entry of the driver may cover."""
        self.newest_wall = 0.0
        self.contradicted = False  # the last read showed work at a stamp that was read as 0 before
        self.answered = False  # the last read had a plausible entry, even if it is the first, which has no span
        self.is_gapless = False  # the last read continued the one before it without a hole
        self.length_s = 0.0  # seconds for which the ring keeps entries, learned from its answers
        self._newest_ratio = 0.0
        self._period = RingPeriod(longest_s)
        self._longest_s = LATENESS * longest_s
        self._from = 0.0  # stamps up to this time are ignored

    @property
    def period_s(self) -> float:
        """The seconds that one entry covers."""
        return self._period.seconds

    def restart(self, wall: float) -> None:
        """Discards the present entries of the ring, because the wall clock jumped after they were stamped."""
        # If the clock was set back, the ring may still keep old stamps that are in the future now.
        self._from = min(max(wall, self.newest_wall), wall + RING_AGE_MAX_S)
        self.newest_wall = wall
        self.contradicted = self.answered = self.is_gapless = False

    def read(self, samples: Sequence[UtilizationSample], monotonic: float, wall: float) -> tuple[Span, ...]:
        """Converts the new entries to spans (times with known activity).

        An entry covers one period up to its stamp, without the time of earlier entries. Consecutive entries with the
        same value and without a hole become one span.
        """
        self.contradicted = self.answered = self.is_gapless = False
        if wall <= self._from:
            self.newest_wall = wall  # the clock was set back: the ring still has entries of this time from before
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
            # After a hole the ring may have lost entries: it keeps less than the time since the last read.
            self.length_s = max(self.length_s, kept_s) if self.is_gapless else kept_s
        return tuple(spans)

    def _is_steady(self, samples: Sequence[UtilizationSample], wall: float) -> bool:
        """Returns whether all entries are new, follow the last one without a hole, and have the same value.

        This is the usual case, and `read` then need not convert single entries, which is much slower.
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
        """Returns the seconds without a hole up to the newest entry. A hole is longer than the longest period."""
        stamps = sorted(sample.wall for sample in samples)
        begin = stamps[-1]
        for stamp in reversed(stamps):
            if begin - stamp > self._longest_s:
                break
            begin = stamp
        return stamps[-1] - begin

    def _length_of(self, entry: UtilizationSample) -> float:
        known = entry.span_s if entry.span_s is not None else LATENESS * self._period.seconds
        return min(self._longest_s, known)

    def _fold(self, samples: Sequence[UtilizationSample], wall: float) -> list[UtilizationSample]:
        """Returns the new entries in the order of their stamps.

        If several entries have the same time, the busiest counts. An entry outside 0 to 1 makes its time unknown,
        unless another entry of that time shows work.
        """
        entries: list[UtilizationSample] = []
        apart = 0.5 * self._period.seconds if self._period.is_learned else SAME_STAMP_S
        begin = self.newest_wall
        for sample in sorted(samples):
            if sample.wall > wall + WALL_STEP_S:
                continue
            if sample.wall > wall + UNWATCHED_MAX_S:
                break  # the driver's clock is ahead: read the entry again later
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
    """Returns the higher of two ratios. An invalid value outranks 0, because it may mean work."""
    shares = [ratio for ratio in (one, other) if 0.0 <= ratio <= 1.0]
    if len(shares) == 2 or (shares and shares[0] > 0.0):
        return max(shares)
    return one if not 0.0 <= one <= 1.0 else other


def pieces(span: Span, longest_s: float) -> Iterator[Span]:
    """Splits a span of many entries into equal parts of at most `longest_s` seconds."""
    number = max(1, math.ceil((span.end - span.start) / longest_s))
    edges = [span.start + (span.end - span.start) * i / number for i in range(number)] + [span.end]
    return (span._replace(start=start, end=end) for start, end in itertools.pairwise(edges))


def agreeing(spans: Sequence[Span], rate_at: float, longest_s: float) -> tuple[Span, ...]:
    """Corrects the spans if the driver reported a utilization above 0 at `rate_at` (monotonic seconds).

    The reported value covers up to `longest_s` before `rate_at`. A span of 0 in this time counts as idle only if
    another span there shows work, which explains the value. The last span in this time never counts as idle.
    """
    recent = [span for span in spans if span.end > rate_at - longest_s]
    doubtful = recent[-1:] if any(span.ratio > 0.0 for span in recent) else recent
    return tuple(span._replace(other=(UTILIZATION,)) if span in doubtful else span for span in spans)
