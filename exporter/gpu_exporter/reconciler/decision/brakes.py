"""Brakes: conditions under which the reconciler sets no new marks, because one fault may have made many GPUs idle.

While a brake is active, every decision that would lead to a mark becomes `unknown`. So the reconciler sets no new mark,
and withdraws existing marks after `policy.unsupported_max`. Work on a GPU still ends a mark immediately. If too many
GPUs became idle together, the brake freezes only their holders.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from gpu_exporter.common.config.defaults import Policy
from gpu_exporter.common.durations import describe_duration
from gpu_exporter.reconciler.decision.policy import LABELLED, Decision, windows_of
from gpu_exporter.reconciler.evidence.records import Evidence, HolderName, Unseen, nothing_usual
from gpu_exporter.reconciler.evidence.usual import TOGETHER_S

CORRELATED, EXPORTERS, PAUSED, SOURCE = FREEZES = ("correlated", "exporters", "paused", "source")
TOGETHER_MIN = 8  # GPUs: in a small cluster, this many become idle together for other reasons too
SAME_S = 300.0  # two bursts that end within this time are the same: the first of them is remembered
NAMED_MAX = 5  # missing exporters that a text names
log = logging.getLogger(__name__)


class Freeze(NamedTuple):
    """An active brake. `text`: the reason in words. `names`: the frozen holders, each with its reason; None if all
    holders are frozen.
    """

    text: str
    names: Mapping[HolderName, str] | None = None


class Brakes:
    """Checks the brakes. Remembers bursts, and the texts that it has logged."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._said: dict[str, str] = {}  # by reason
        self._bursts: list[Burst] = []

    def check(self, evidence: Evidence, decisions: Sequence[Decision]) -> dict[str, Freeze]:
        """Returns the active brakes, by reason."""
        found = {
            CORRELATED: self._freeze_together(evidence, decisions),
            EXPORTERS: freeze_missing(evidence.unseen),
            PAUSED: Freeze(evidence.paused),
        }
        for reason, freeze in found.items():
            is_partial = freeze.names is not None  # other brakes are problems of the cycle
            if is_partial and freeze.text and freeze.text != self._said.get(reason):
                log.warning("frozen: %s", freeze.text)
            self._said[reason] = freeze.text
        return {reason: freeze for reason, freeze in found.items() if freeze.text}

    def _freeze_together(self, evidence: Evidence, decisions: Sequence[Decision]) -> Freeze:
        """As `freeze_together`, with the bursts of earlier cycles.

        A burst that is no longer one still counts: otherwise a number of GPUs near the limit, or a tenant that sets and
        removes an opt-out, would set and withdraw the marks of others again and again.
        """
        begun = begun_in(decisions, self._policy)
        # Also while the holders in it are unknown for a moment.
        since = evidence.wall - windows_of(self._policy).candidate_s - self._policy.freeze_max
        oldest = min((since, *(start for start, _ in begun)))
        self._bursts = [burst for burst in self._bursts if burst.last + TOGETHER_S >= oldest]
        found = find_bursts(begun, evidence.allocations, self._policy, evidence.usual_at)
        known = [*self._bursts, *found]
        for burst in found:
            if all(abs(burst.last - each.last) > SAME_S for each in self._bursts):
                self._bursts.append(burst)
        return freeze_together(begun, evidence.allocations, self._policy, known)


def freeze_missing(unseen: Collection[Unseen]) -> Freeze:
    """Returns the brake for missing exporters. It freezes the holders that they last showed and that have not ended."""
    if not unseen:
        return Freeze("")
    names = {each.name for each in unseen}
    exporters = sorted({each.exporter for each in unseen})
    more = f" and {len(exporters) - NAMED_MAX} more" if len(exporters) > NAMED_MAX else ""
    shown = "1 holder has" if len(names) == 1 else f"{len(names)} holders have"
    listed = ", ".join(exporters[:NAMED_MAX])
    ended = "its end is" if len(names) == 1 else "their ends are"
    text = f"no data from {listed}{more}, where {shown} not ended, or {ended} unknown"
    return Freeze(text, dict.fromkeys(names, text))


class Burst(NamedTuple):
    """The TOGETHER_S seconds before `last` (Unix seconds), in which too many GPUs became idle.

    `limit`: the most GPUs that may become idle together. `usual`: the usual number at that hour; None if unknown.
    """

    last: float
    limit: float
    usual: float | None

    def covers(self, since: float) -> bool:
        """Returns whether `since` (Unix seconds) lies in the burst, or at most TOGETHER_S before or after it."""
        return self.last - 2 * TOGETHER_S <= since <= self.last + TOGETHER_S

    @property
    def text(self) -> str:
        than = "" if self.usual is None else f" ({self.usual:g} are usual at that hour)"
        return f"more than {self.limit:g} GPUs became idle within {describe_duration(TOGETHER_S)}{than}"


def begun_in(decisions: Sequence[Decision], policy: Policy) -> list[tuple[float, Decision]]:
    """Returns the decisions that a burst can delay, each with the start of its idle run (Unix seconds).

    Any tenant can cause a burst, so a burst delays a mark by at most `policy.freeze_max`. By then, a fault would be
    repaired.
    """
    return [
        (decision.idle_since_wall, decision)
        for decision in decisions
        if decision.stage in LABELLED
        and decision.idle_since_wall is not None
        and not decision.has_lasted(_most_s(decision, policy))
    ]


def freeze_together(
    begun: Sequence[tuple[float, Decision]], allocations: int, policy: Policy, bursts: Sequence[Burst]
) -> Freeze:
    """Returns the brake on the holders that became idle in a burst. Its text is "" without such holders.

    The cause may be a failure of their storage. `begun`: as `begun_in` returns it.
    """
    names: dict[HolderName, str] = {}
    gpus = 0
    for since, decision in begun:
        burst = next((burst for burst in bursts if burst.covers(since)), None)
        if burst is not None:
            most = describe_duration(_most_s(decision, policy))
            why = f"{burst.text}, perhaps because of one fault"
            names[decision.name] = f"{why}; it is marked after at most {most} of idle time"
            gpus += len(decision.units)
    return Freeze(f"{gpus} of {allocations} GPUs became idle at about the same time" if names else "", names)


def _most_s(decision: Decision, policy: Policy) -> float:
    """Returns the idle time after which a burst no longer delays the mark of a holder (seconds)."""
    return (decision.windows or windows_of(policy)).candidate_s + policy.freeze_max


def find_bursts(
    begun: Iterable[tuple[float, Decision]],
    allocations: int,
    policy: Policy,
    usual_at: Callable[[float], float | None] = nothing_usual,
) -> list[Burst]:
    """Returns the bursts, by time: too many GPUs became idle within TOGETHER_S.

    `begun`: for each holder, when its idle run began (Unix seconds).

    The limit is the smaller of two numbers: `policy.freeze_share` of the allocated GPUs, and `policy.freeze_usual`
    times the usual number at that hour. The limit is at least TOGETHER_MIN. The GPUs of the largest group do not count,
    because all GPUs of a job become idle together when its work ends.
    """
    rows: list[tuple[float, str, int]] = []
    for since, decision in begun:
        group = decision.around.group if decision.around is not None else ""
        rows.append((since, f"{decision.name.namespace} {group or decision.name.name}", len(decision.units)))
    rows.sort()
    bursts: list[Burst] = []
    by_group: defaultdict[str, int] = defaultdict(int)
    largest: list[tuple[int, str]] = []  # a heap of group sizes; an outdated size is removed when it is on top
    total, first = 0, 0
    for index, (since, group, units) in enumerate(rows):
        by_group[group] += units
        heappush(largest, (-by_group[group], group))
        total += units
        while since - rows[first][0] > TOGETHER_S:
            _, old, gone = rows[first]
            by_group[old] -= gone
            heappush(largest, (-by_group[old], old))
            total -= gone
            first += 1
        while -largest[0][0] != by_group[largest[0][1]]:
            heappop(largest)
        others = total + largest[0][0]
        if others > TOGETHER_MIN and others > (limit := _limit(since, allocations, policy, usual_at)):
            bursts.append(Burst(since, max(TOGETHER_MIN, limit), usual_at(since)))
            by_group.clear()  # later runs need a burst of their own, so none grows with each late run
            largest.clear()
            total, first = 0, index + 1
    return bursts


def _limit(since: float, allocations: int, policy: Policy, usual_at: Callable[[float], float | None]) -> float:
    """Returns the number of GPUs that may become idle together at this time.

    Queries the source only if the share allows more than TOGETHER_MIN.
    """
    limit = policy.freeze_share * allocations
    usual = usual_at(since) if limit > TOGETHER_MIN else None
    return limit if usual is None else min(limit, policy.freeze_usual * usual)


def hold(decisions: Sequence[Decision], frozen: Mapping[str, Freeze]) -> list[Decision]:
    """Applies the brakes to decisions: a frozen holder that would be marked becomes `unknown`."""
    return [_held(decision, frozen) if decision.stage in LABELLED else decision for decision in decisions]


def _held(decision: Decision, frozen: Mapping[str, Freeze]) -> Decision:
    why = [each.text if each.names is None else each.names.get(decision.name, "") for each in frozen.values()]
    if not (why := [text for text in why if text]):
        return decision
    return decision._replace(stage="unknown", reason=f"{decision.reason}, but {'; '.join(why)}", idle_since_wall=None)
