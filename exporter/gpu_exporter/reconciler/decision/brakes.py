"""When nothing new is marked, because what looks idle is more likely a fault somewhere else.

While a brake holds, every decision that would leave a mark is `unknown`: nothing new is marked, and marks that stand go
when they have been without support for `policy.unsupported_max`. Work still ends a mark at once. GPUs that became idle
together freeze what they are evidence for: their one tenant, else their one pool, else everything.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from gpu_exporter.clock import Clock
from gpu_exporter.defaults import Policy
from gpu_exporter.durations import describe_duration
from gpu_exporter.reconciler.decision.outcomes import tenant_of
from gpu_exporter.reconciler.decision.policy import LABELLED, Decision, windows_of
from gpu_exporter.reconciler.evidence.records import Evidence, HolderName, nothing_usual, pools_of
from gpu_exporter.reconciler.evidence.usual import TOGETHER_S

CORRELATED, EXPORTERS, PAUSED, SOURCE = FREEZES = ("correlated", "exporters", "paused", "source")
TOGETHER_MIN = 8  # GPUs: a small cluster has so many for other reasons
ONE_IN_MIN = 3  # of so many exporters one may be away: a node that is repaired says nothing of the others
REMEMBERED_S = 3600.0  # exporters that were there within so long are missed
MOST_OF = 0.75  # a pool that has so many of the GPUs that became idle together is what failed
SCOPES_MAX = 20  # tenants and pools with a fault of their own; with more, everything has one
log = logging.getLogger(__name__)


class Freeze(NamedTuple):
    """A brake that holds. `text`: what was seen, in words. `names`: the holders that it is about; None for all."""

    text: str
    names: frozenset[HolderName] | None = None


class Brakes:
    """Remembers how many exporters there were."""

    def __init__(self, policy: Policy, clock: Clock) -> None:
        self._policy = policy
        self._clock = clock
        self._seen: deque[tuple[float, int]] = deque()  # with falling numbers, so that the first one is the highest
        self._said = ""

    def check(self, evidence: Evidence, decisions: Sequence[Decision]) -> dict[str, Freeze]:
        """The brakes that hold now, by reason."""
        pools = {holder.name: pools_of(holder) for holder in evidence.holders}
        found = {
            CORRELATED: freeze_together(decisions, pools, evidence.allocations, self._policy, evidence.usual_at),
            EXPORTERS: Freeze(self._exporters_lost(evidence.exporters)),
            PAUSED: Freeze(evidence.paused),
        }
        together = found[CORRELATED]
        if together.text != self._said and together.names is not None:  # others say theirs with every cycle
            log.warning("frozen: %s", together.text)
        self._said = together.text
        return {reason: freeze for reason, freeze in found.items() if freeze.text}

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


def freeze_together(
    decisions: Sequence[Decision],
    pools: Mapping[HolderName, frozenset[str]],
    allocations: int,
    policy: Policy,
    usual_at: Callable[[float], float | None] = nothing_usual,
) -> Freeze:
    """The holders that GPUs which became idle together are evidence against, and what was seen; no text for nothing.

    `pools`: of each holder, the resources or partitions that its GPUs are of. The largest tenant counts for no more
    than the next one: what one tenant does is no evidence against others. Where that leaves too few, the largest is
    frozen if its own GPUs are too many, and the others are looked at without it. Of several tenants the pool is frozen
    that most of the GPUs are of, and the others are looked at without that; where they too are too many, everything is.
    """
    tenants: set[str] = set()
    frozen_pool = ""
    texts: list[str] = []
    left: Sequence[Decision] = decisions
    for _ in range(SCOPES_MAX):
        found = idle_together(left, allocations, policy, usual_at)
        if found is None:
            break
        (tenant, largest), (_, next_one) = [*_gpus_by(found.decisions, _tenants_of).most_common(2), ("", 0)][:2]
        pool, of_pool = [*_gpus_by(found.decisions, lambda each: pools.get(each.name, ())).most_common(1), ("", 0)][0]
        if found.gpus - largest + next_one <= found.limit:
            own = [each for each in left if tenant_of(each) == tenant]
            alone = idle_together(own, allocations, policy, usual_at)
            if alone is not None:
                tenants.add(tenant)
                texts.append(f"{alone.text} They are of {tenant}, which alone is frozen")
            left = [each for each in left if tenant_of(each) != tenant]
        elif pool and not frozen_pool and of_pool >= MOST_OF * found.gpus:
            frozen_pool = pool
            texts.append(f"{found.text} They are of {pool}, which alone is frozen")
            left = [each for each in left if pool not in pools.get(each.name, ())]
        else:
            return Freeze(found.text)
    else:
        return Freeze("; ".join(texts[:1]))
    if not texts:
        return Freeze("", frozenset())
    names = (
        each.name
        for each in decisions
        if tenant_of(each) in tenants or (frozen_pool and frozen_pool in pools.get(each.name, frozenset()))
    )
    return Freeze("; ".join(texts), frozenset(names))


def _tenants_of(decision: Decision) -> tuple[str]:
    return (tenant_of(decision),)


def _gpus_by(decisions: Iterable[Decision], keys_of: Callable[[Decision], Iterable[str]]) -> Counter[str]:
    tally: Counter[str] = Counter()
    for decision in decisions:
        tally.update(dict.fromkeys(keys_of(decision), len(decision.units)))
    return tally


class Together(NamedTuple):
    """GPUs that became idle at about the same time. `limit`: more than so many are a fault. `text`: in words."""

    gpus: int
    limit: float
    decisions: Sequence[Decision]
    text: str


def idle_together(
    decisions: Iterable[Decision],
    allocations: int,
    policy: Policy,
    usual_at: Callable[[float], float | None] = nothing_usual,
) -> Together | None:
    """The GPUs that became idle at about the same time when they are too many, as when their storage fails.

    Too many are more than `policy.freeze_share` of the GPUs held, or than `policy.freeze_usual` times what is usual at
    that hour, whichever is less, and never TOGETHER_MIN or fewer. Of several holders in one group only those of the
    others count: a job that ends its work idles all of its GPUs at once. After `policy.freeze_max` it is no fault any
    more that anyone will repair, or everybody has gone home.
    """
    begun: list[tuple[float, str, int, Decision]] = []
    for decision in decisions:
        since = decision.idle_since_wall
        if decision.stage not in LABELLED or since is None:
            continue
        windows = decision.windows or windows_of(policy)
        if decision.observed_wall - since < windows.candidate_s + policy.freeze_max:
            group = decision.around.group if decision.around is not None else ""
            whose = f"{decision.name.namespace} {group or decision.name.name}"
            begun.append((since, whose, len(decision.units), decision))
    begun.sort(key=lambda each: each[:3])
    by_group: defaultdict[str, int] = defaultdict(int)
    largest: list[tuple[int, str]] = []  # a heap of sizes that groups had: what is on top is true, or is taken off
    total, first = 0, 0
    worst, at, those = 0, 0.0, (0, 0)
    for index, (since, group, units, _) in enumerate(begun):
        by_group[group] += units
        heappush(largest, (-by_group[group], group))
        total += units
        while since - begun[first][0] > TOGETHER_S:
            _, old, gone, _ = begun[first]
            by_group[old] -= gone
            heappush(largest, (-by_group[old], old))
            total -= gone
            first += 1
        while -largest[0][0] != by_group[largest[0][1]]:
            heappop(largest)
        others = total + largest[0][0]
        if total > worst and others > TOGETHER_MIN and others > _limit(since, allocations, policy, usual_at):
            worst, at, those = total, since, (first, index + 1)
    if not worst:
        return None
    span = describe_duration(TOGETHER_S)
    usual = usual_at(at)
    than = "" if usual is None else f", {usual:g} are usual at that hour"
    text = f"{worst} of {allocations} GPUs became idle within {span}, in several groups{than}: one fault?"
    limit = max(TOGETHER_MIN, _limit(at, allocations, policy, usual_at))
    return Together(worst, limit, [decision for _, _, _, decision in begun[those[0] : those[1]]], text)


def _limit(since: float, allocations: int, policy: Policy, usual_at: Callable[[float], float | None]) -> float:
    """How many GPUs may have become idle together at this time. The source is asked for what few of them exceed."""
    limit = policy.freeze_share * allocations
    usual = usual_at(since) if limit > TOGETHER_MIN else None
    return limit if usual is None else min(limit, policy.freeze_usual * usual)


def hold(decisions: Sequence[Decision], frozen: Mapping[str, Freeze]) -> list[Decision]:
    """The decisions while these brakes hold."""
    return [_held(decision, frozen) if decision.stage in LABELLED else decision for decision in decisions]


def _held(decision: Decision, frozen: Mapping[str, Freeze]) -> Decision:
    why = [each.text for each in frozen.values() if each.names is None or decision.name in each.names]
    if not why:
        return decision
    return decision._replace(stage="unknown", reason=f"{decision.reason}, but {'; '.join(why)}", idle_since_wall=None)
