"""Coverage: the share of the held time in a window for which activity is known. Both sources compute it alike.

It is increase(gpu_allocation_observed_seconds_total) / increase(gpu_allocation_held_seconds_total) over the window.
While the exporter is down, held time grows and observed time does not, so gaps of an exporter lower the coverage.
Coverage is computed per series. If two series describe one unit, the smaller coverage counts.

If the samples do not cover the whole window, some unobserved time may be older than the first sample. All of it is
assumed to lie in the uncovered part of the window. So a day of good coverage does not hide two hours of bad coverage.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

SAMPLE_EACH_S = 60.0


def coverage(
    window_s: float, held: float, observed: float, held_in: float = 0.0, observed_in: float = 0.0
) -> float | None:
    """Returns a lower bound of the observed share, 0 to 1. It is exact if the increases cover the window or the
    holder's life.

    `held`, `observed`: totals (seconds).
    `held_in`, `observed_in`: the increase of these totals since the oldest sample in the window (seconds); 0 if there
    is only one sample. Returns None if no time was held, and for values that are not finite.
    """
    span = max(min(window_s, held), held_in)
    if not (all(map(math.isfinite, (held, observed, held_in, observed_in))) and span > 0):
        return None
    unknown_in = max(0.0, held_in - observed_in)
    unknown_before = min(max(0.0, held - observed - unknown_in), span - held_in)
    return max(0.0, 1.0 - (unknown_in + unknown_before) / span)


@dataclass(slots=True)
class Counters:
    """Totals of one allocation, one sample per minute, newest last: (held, observed), in seconds.

    The counter of held time serves as the clock, because it also grows while the exporter is down.
    """

    last_wall: float = 0.0
    samples: deque[tuple[float, float]] = field(default_factory=deque)

    def cover(self, window_s: float, held: float, observed: float, wall: float) -> float | None:
        """Adds the totals, and returns the coverage. `wall`: when they were read (Unix seconds)."""
        self.last_wall = wall
        if self.samples and (held < self.samples[-1][0] or observed < self.samples[-1][1]):
            self.samples.clear()  # the exporter has started new counters
        if not self.samples or held - self.samples[-1][0] >= SAMPLE_EACH_S:
            self.samples.append((held, observed))
        while len(self.samples) > 1 and self.samples[1][0] <= held - window_s:
            self.samples.popleft()
        held_then, observed_then = self.samples[0]
        return coverage(window_s, held, observed, held - held_then, observed - observed_then)
