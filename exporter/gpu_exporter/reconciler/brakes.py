"""When nothing new is marked, because what looks idle is more likely a fault somewhere else.

While a brake holds, every decision that would leave a mark is `unknown`: nothing new is marked, and marks that stand go
when they have been without support for `policy.unsupported_max`. Work still ends a mark at once.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush

from gpu_exporter.clock import Clock
from gpu_exporter.defaults import Policy
from gpu_exporter.durations import describe_duration
from gpu_exporter.reconciler.evidence import Evidence, nothing_usual
from gpu_exporter.reconciler.policy import LABELLED, Decision, windows_of
from gpu_exporter.reconciler.usual import TOGETHER_S

CORRELATED, EXPORTERS, PAUSED, SOURCE = FREEZES = ("correlated", "exporters", "paused", "source")
TOGETHER_MIN = 8  # GPUs: a small cluster has so many for other reasons
ONE_IN_MIN = 3  # of so many exporters one may be away: a node that is repaired says nothing of the others
REMEMBERED_S = 3600.0  # exporters that were there within so long are missed


class Brakes:
    """Remembers how many exporters there were."""

    def __init__(self, policy: Policy, clock: Clock) -> None:
        self._policy = policy
        self._clock = clock
        self._seen: deque[tuple[float, int]] = deque()  # with falling numbers, so that the first one is the highest

    def check(self, evidence: Evidence, decisions: Sequence[Decision]) -> dict[str, str]:
        """The brakes that hold now: by reason, what was seen, in words."""
        found = {
            CORRELATED: idle_together(decisions, evidence.allocations, self._policy, evidence.usual_at),
            EXPORTERS: self._exporters_lost(evidence.exporters),
            PAUSED: evidence.paused,
        }
        return {reason: text for reason, text in found.items() if text}

    def _exporters_lost(self, exporters: int) -> str:
        now = self._clock.monotonic()
        while self._seen and self._seen[-1][1] <= exporters:
            self._seen.pop()
        self._seen.append((now, exporters))
        while now - self._seen[0][0] > REMEMBERED_S:
            self._seen.popleft()
        most = self._seen[0][1]
        is_one = most - exporters == 1 and most >= ONE_IN_MIN
        if is_one or exporters >= (1.0 - self._policy.freeze_exporters) * most:
            return ""
        hour = describe_duration(REMEMBERED_S)
        return f"{exporters} exporters are seen, {most} were within the last {hour}: what else is wrong is not known"


def idle_together(
    decisions: Iterable[Decision],
    allocations: int,
    policy: Policy,
    usual_at: Callable[[float], float | None] = nothing_usual,
) -> str:
    """What is wrong when too many GPUs became idle at about the same time, as when their storage fails; "" else.

    Too many are more than `policy.freeze_share` of the GPUs held, or than `policy.freeze_usual` times what is usual at
    that hour, whichever is less, and never TOGETHER_MIN or fewer. Of several holders in one group only those of the
    others count: a job that ends its work idles all of its GPUs at once. After `policy.freeze_max` it is no fault any
    more that anyone will repair, or everybody has gone home.
    """
    begun: list[tuple[float, str, int]] = []
    for decision in decisions:
        since = decision.idle_since_wall
        if decision.stage not in LABELLED or since is None:
            continue
        windows = decision.windows or windows_of(policy)
        if decision.observed_wall - since < windows.candidate_s + policy.freeze_max:
            group = decision.around.group if decision.around is not None else ""
            begun.append((since, f"{decision.name.namespace} {group or decision.name.name}", len(decision.units)))
    begun.sort()
    by_group: defaultdict[str, int] = defaultdict(int)
    largest: list[tuple[int, str]] = []  # a heap of sizes that groups had: what is on top is true, or is taken off
    total, first, worst, at = 0, 0, 0, 0.0
    for since, group, units in begun:
        by_group[group] += units
        heappush(largest, (-by_group[group], group))
        total += units
        while since - begun[first][0] > TOGETHER_S:
            _, old, gone = begun[first]
            by_group[old] -= gone
            heappush(largest, (-by_group[old], old))
            total -= gone
            first += 1
        while -largest[0][0] != by_group[largest[0][1]]:
            heappop(largest)
        others = total + largest[0][0]
        if total > worst and others > TOGETHER_MIN and others > _limit(since, allocations, policy, usual_at):
            worst, at = total, since
    if not worst:
        return ""
    span = describe_duration(TOGETHER_S)
    usual = usual_at(at)
    than = "" if usual is None else f", {usual:g} are usual at that hour"
    return f"{worst} of {allocations} GPUs became idle within {span}, in several groups{than}: one fault?"


def _limit(since: float, allocations: int, policy: Policy, usual_at: Callable[[float], float | None]) -> float:
    """How many GPUs may have become idle together at this time. The source is asked for what few of them exceed."""
    limit = policy.freeze_share * allocations
    usual = usual_at(since) if limit > TOGETHER_MIN else None
    return limit if usual is None else min(limit, policy.freeze_usual * usual)


def hold(decisions: Sequence[Decision], frozen: dict[str, str]) -> list[Decision]:
    """The decisions while these brakes hold."""
    if not frozen:
        return list(decisions)
    why = "; ".join(frozen.values())
    return [
        decision._replace(stage="unknown", reason=f"{decision.reason}, but {why}", idle_since_wall=None)
        if decision.stage in LABELLED
        else decision
        for decision in decisions
    ]
