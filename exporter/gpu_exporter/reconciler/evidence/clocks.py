"""Compares the clock of the reconciler with the clocks of the servers that provide timestamps.

A wish of an owner has an end time, and a mark has the time of its evidence. If the reconciler's clock is ahead, a wish
ends too early. If it is behind, old evidence looks fresh. So the reconciler decides nothing while its clock is wrong.
"""

from __future__ import annotations

APART_MAX_S = 30.0  # as in the alert GpuNodeClockWrong; clocks that NTP synchronizes differ by less than a second
LATENT_MAX_S = 120.0  # for a PromQL API: VictoriaMetrics answers as of 30 s ago (-search.latencyOffset)


def describe_disagreement(ahead_s: float, whose: str, most_s: float = APART_MAX_S) -> str:
    """The error and the remedy; "" while the clocks agree.

    `ahead_s`: how far the reconciler's clock is ahead (seconds); negative if it is behind.
    """
    if abs(ahead_s) <= most_s:
        return ""
    side = "ahead of" if ahead_s > 0 else "behind"
    return (
        f"the clock of the reconciler is {abs(ahead_s):.0f} s {side} that of {whose}: synchronize both by NTP; until "
        "then the reconciler decides nothing"
    )


def ahead_of(moment: float, earliest: float, latest: float, resolution_s: float = 0.0) -> float:
    """The least number of seconds by which the reconciler's clock is ahead; negative if it is behind; 0 if both may
    agree.

    `moment`: the time of the other clock, rounded down to `resolution_s`. It was read while the reconciler's clock
    showed a time between `earliest` and `latest`. All are Unix seconds.
    """
    if earliest > moment + resolution_s:
        return earliest - moment - resolution_s
    return min(0.0, latest - moment)
