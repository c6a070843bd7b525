"""Whether our clock agrees with the clocks of the servers that say when things were.

Owners write until when they keep their GPUs, and marks say when the evidence was read. Under a clock that is ahead a
wish ends too early; under one that is behind old evidence looks fresh. So nothing is decided by such a clock.
"""

from __future__ import annotations

APART_MAX_S = 30.0  # as in the alert GpuNodeClockWrong; clocks that are kept by NTP differ by less than a second
LATENT_MAX_S = 120.0  # of a source of queries: VictoriaMetrics answers as of 30 s ago (-search.latencyOffset)


def describe_disagreement(ahead_s: float, whose: str, most_s: float = APART_MAX_S) -> str:
    """What is wrong and what to do, "" while the clocks agree. `ahead_s`: of ours, negative where it is behind."""
    if abs(ahead_s) <= most_s:
        return ""
    side = "ahead of" if ahead_s > 0 else "behind"
    return (
        f"the clock of the reconciler is {abs(ahead_s):.0f} s {side} that of {whose}: set both by NTP; nothing is "
        "decided meanwhile"
    )


def ahead_of(moment: float, earliest: float, latest: float, resolution_s: float = 0.0) -> float:
    """How far our clock is ahead at the least, negative where it is behind; 0 where both may agree.

    `moment`: what the other clock said, cut to `resolution_s`, at some time of ours from `earliest` to `latest`.
    """
    if earliest > moment + resolution_s:
        return earliest - moment - resolution_s
    return min(0.0, latest - moment)
