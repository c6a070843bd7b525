"""Compares the clock of the reconciler with the clocks of the servers that provide timestamps.

A wish of an owner has an end time, and a mark has the time of its evidence. If the reconciler's clock is ahead, a wish
ends too early. If the clock is behind, old evidence looks fresh. So the reconciler decides nothing while its clock is
wrong.
"""

from __future__ import annotations

APART_MAX_S = 30.0  # as in the alert GpuNodeClockWrong; clocks that NTP synchronizes differ by less than a second
LATENT_MAX_S = 120.0  # for a PromQL API: VictoriaMetrics answers as of 30 s ago (-search.latencyOffset)


def describe_disagreement(ahead_s: float, whose: str, most_s: float = APART_MAX_S) -> str:
    """Describes the error and the remedy; "" while the clocks agree.

    `ahead_s`: how far the reconciler's clock is ahead (seconds); negative if it is behind.
    """
    if abs(ahead_s) <= most_s:
        return ""
    side = "ahead of" if ahead_s > 0 else "behind"
    return (
        f"the clock of the reconciler is {abs(ahead_s):.0f} s {side} the clock of {whose}. The reconciler "
        "makes no decisions until NTP has synchronized both"
    )


def ahead_of(moment: float, earliest: float, latest: float, resolution_s: float = 0.0) -> float:
    """Returns by how many seconds the reconciler's clock is ahead, at least; negative if it is behind; 0 if the clocks
    may agree.

    `moment`: the other clock's time, rounded down to `resolution_s`. It was read between `earliest` and `latest` of the
    reconciler's clock. All are Unix seconds.
    """
    if earliest > moment + resolution_s:
        return earliest - moment - resolution_s
    return min(0.0, latest - moment)
