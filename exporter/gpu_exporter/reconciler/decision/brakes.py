"""Brakes: conditions under which no new marks are set, because one fault elsewhere may have made many GPUs idle.

While a brake is active, every decision that would lead to a mark becomes `unknown`. So no new mark is set, and existing
marks are withdrawn after `policy.unsupported_max` without support. Work on a GPU still ends a mark at once. If most of
the GPUs that became idle together belong to one tenant or one pool, only that tenant or pool is frozen. Otherwise
everything is frozen.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from gpu_exporter.common.clock import Clock
from gpu_exporter.common.config.defaults import Policy
from gpu_exporter.common.durations import describe_duration
from gpu_exporter.reconciler.decision.outcomes import tenant_of
from gpu_exporter.reconciler.decision.policy import LABELLED, Decision, windows_of
from gpu_exporter.reconciler.evidence.records import Evidence, HolderName, nothing_usual, pools_of
from gpu_exporter.reconciler.evidence.usual import TOGETHER_S

CORRELATED, EXPORTERS, PAUSED, SOURCE = FREEZES = ("correlated", "exporters", "paused", "source")
TOGETHER_MIN = 8  # GPUs: in a small cluster as many become idle together for other reasons
ONE_IN_MIN = 3  # from this number of exporters on, one may be missing: a node in repair is no sign of a common fault
REMEMBERED_S = 3600.0  # exporters that were seen within this time count as missing
MOST_OF = 0.75  # share of the GPUs that became idle together: a pool with at least this share is the cause
SCOPES_MAX = 20  # tenants and pools that are frozen one by one; with more of them, everything is frozen
log = logging.getLogger(__name__)


class Freeze(NamedTuple):
    """An active brake. `text`: the reason in words. `names`: the holders that are frozen; None for all."""

    text: str
    names: frozenset[HolderName] | None = None


class Brakes:
    """Checks the brakes. Remembers how many exporters were seen."""

    def __init__(self, policy: Policy, clock: Clock) -> None:
        self._policy = policy
        self._clock = clock
        self._seen: deque[tuple[float, int]] = deque()  # time, exporters; numbers fall, so the first is the highest
        self._said = ""

    def check(self, evidence: Evidence, decisions: Sequence[Decision]) -> dict[str, Freeze]:
        """The active brakes, by reason."""
        pools = {holder.name: pools_of(holder) for holder in evidence.holders}
        found = {
            CORRELATED: freeze_together(decisions, pools, evidence.allocations, self._policy, evidence.usual_at),
            EXPORTERS: Freeze(self._exporters_lost(evidence.exporters)),
            PAUSED: Freeze(evidence.paused),
        }
        together = found[CORRELATED]
        if together.text != self._said and together.names is not None:  # other brakes are problems of the cycle
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
        return f"only {exporters} of the {most} exporters of the last {hour} are seen: there may be a wider fault"


def freeze_together(
    decisions: Sequence[Decision],
    pools: Mapping[HolderName, frozenset[str]],
    allocations: int,
    policy: Policy,
    usual_at: Callable[[float], float | None] = nothing_usual,
) -> Freeze:
    """The brake for too many GPUs that became idle together. Its text is "" if there are not too many.

    `pools`: by holder, the resources or partitions of its GPUs.

    The largest tenant counts for at most as many GPUs as the second largest, so that one tenant cannot freeze others.
    If the number is then within the limit, the largest tenant is frozen only if its own GPUs exceed the limit. The
    other tenants are checked without it. If several tenants are affected, the pool with at least MOST_OF of the GPUs is
    frozen. The rest is checked without this pool. If the rest exceeds the limit too, everything is frozen.
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
                texts.append(f"{alone.text}. They belong to {tenant}, so only this tenant is frozen")
            left = [each for each in left if tenant_of(each) != tenant]
        elif pool and not frozen_pool and of_pool >= MOST_OF * found.gpus:
            frozen_pool = pool
            texts.append(f"{found.text}. They belong to {pool}, so only this pool is frozen")
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
    """GPUs that became idle at about the same time.

    `limit`: a number above this limit indicates a fault. `text`: the finding in words.
    """

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
    """The GPUs that became idle at about the same time, if there are too many; otherwise None.

    Too many may mean e.g. a failure of their storage. The limit is the smaller of two numbers: `policy.freeze_share` of
    the allocated GPUs, and `policy.freeze_usual` times the usual number at that hour. It is at least TOGETHER_MIN. The
    GPUs of the largest group do not count toward the limit, because all GPUs of a job become idle at once when it ends
    its work. Idle runs older than the candidate window plus `policy.freeze_max` do not count either. By then a fault
    would have been repaired, or the users have gone home.
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
    largest: list[tuple[int, str]] = []  # a heap of group sizes; an outdated size is removed when it is on top
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
    than = "" if usual is None else f" ({usual:g} are usual at that hour)"
    text = f"{worst} of {allocations} GPUs became idle within {span}, in several groups{than}, maybe by one fault"
    limit = max(TOGETHER_MIN, _limit(at, allocations, policy, usual_at))
    return Together(worst, limit, [decision for _, _, _, decision in begun[those[0] : those[1]]], text)


def _limit(since: float, allocations: int, policy: Policy, usual_at: Callable[[float], float | None]) -> float:
    """The number of GPUs that may become idle together at this time.

    Queries the source only if the share allows more than TOGETHER_MIN.
    """
    limit = policy.freeze_share * allocations
    usual = usual_at(since) if limit > TOGETHER_MIN else None
    return limit if usual is None else min(limit, policy.freeze_usual * usual)


def hold(decisions: Sequence[Decision], frozen: Mapping[str, Freeze]) -> list[Decision]:
    """The decisions under these brakes: a frozen holder that would be marked becomes `unknown`."""
    return [_held(decision, frozen) if decision.stage in LABELLED else decision for decision in decisions]


def _held(decision: Decision, frozen: Mapping[str, Freeze]) -> Decision:
    why = [each.text for each in frozen.values() if each.names is None or decision.name in each.names]
    if not why:
        return decision
    return decision._replace(stage="unknown", reason=f"{decision.reason}, but {'; '.join(why)}", idle_since_wall=None)
