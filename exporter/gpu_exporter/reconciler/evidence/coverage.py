"""Coverage: the share of the time held, over a window, for which activity is known. One meaning for both sources.

It is increase(gpu_allocation_observed_seconds_total) / increase(gpu_allocation_held_seconds_total) over the window.
Held goes on while the exporter is away, observed does not, so the absence of an exporter that comes and goes is seen.
It is taken of each series by itself; of two that speak for one unit the smaller one counts.

Where samples do not reach back over the whole window, the rest of it is taken to have been as little observed as the
totals allow. A holder that was watched well for a day and badly in the last two hours is not covered by its day.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

SAMPLE_EACH_S = 60.0


def coverage(
    window_s: float, held: float, observed: float, held_in: float = 0.0, observed_in: float = 0.0
) -> float | None:
    """Lower bound of the observed share, 0 to 1; exact once the increases cover the window or the holder's life.

    `held`, `observed`: totals (seconds). `held_in`, `observed_in`: how much they grew since the oldest sample in the
    window, 0 when there is one sample only. None without any time held, and for numbers that
    are not finite.
    """
    span = max(min(window_s, held), held_in)
    if not (all(map(math.isfinite, (held, observed, held_in, observed_in))) and span > 0):
        return None
    unknown_in = max(0.0, held_in - observed_in)
    unknown_before = min(max(0.0, held - observed - unknown_in), span - held_in)
    return max(0.0, 1.0 - (unknown_in + unknown_before) / span)


@dataclass(slots=True)
class Counters:
    """Totals of one allocation, a sample a minute, newest last: (held, observed), in seconds.

    The counter of held time is the clock: it goes on while the exporter is away.
    """

    last_wall: float = 0.0
    samples: deque[tuple[float, float]] = field(default_factory=deque)

    def cover(self, window_s: float, held: float, observed: float, wall: float) -> float | None:
        """Take note of the totals at `wall` (Unix seconds), which only says when they were last seen; the coverage."""
        self.last_wall = wall
        if self.samples and (held < self.samples[-1][0] or observed < self.samples[-1][1]):
            self.samples.clear()  # the counters of another run of the exporter
        if not self.samples or held - self.samples[-1][0] >= SAMPLE_EACH_S:
            self.samples.append((held, observed))
        while len(self.samples) > 1 and self.samples[1][0] <= held - window_s:
            self.samples.popleft()
        held_then, observed_then = self.samples[0]
        return coverage(window_s, held, observed, held - held_then, observed - observed_then)
