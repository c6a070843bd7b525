"""What came of each decision: a group that became underused is watched for an hour, and has one outcome. Pure.

A group is a gang, or a pod or job by itself: a Job of 64 pods is one decision. Decisions are counted and not marks, in
a dry run too, so that a policy can be judged before it may write.

An idle run that is younger than the decision was ended by work or by unknown time. Only work makes the longest gap of a
holder grow, and unknown time ends a run only when it lasts for longer than the time between two cycles.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeAlias

from gpu_exporter.config.rules import SECTION
from gpu_exporter.reconciler.decision.policy import UNDERUSED, Decision, merge_units
from gpu_exporter.reconciler.decision.surroundings import UNCLEAR
from gpu_exporter.reconciler.evidence.records import HolderName

REGRET_S = 3600.0  # work that begins later says more of the next day than of the decision
LATE_S = 900.0  # evidence that is missing at the end of the hour is waited for so long
END_SEEN_S = 300.0  # a holder that ended was idle until then if it was seen so within so long
SLACK_S = 60.0  # between what a run says and the clocks of two hosts
UNKNOWN_S = 60.0  # ledger.idle_run_unknown_reset: unknown time that is no longer ends no idle run
HOLDERS_MAX = 5000  # that are watched, each of which is asked for in every cycle
FATES_MAX = 50  # holders that have no series any more, of which a cycle asks how they ended
RIGHT, REGRET, UNKNOWN = OUTCOMES = ("right", "regret", "unknown")
RUNS, ENDED, LOST = "runs", "ended", "lost"  # what a scheduler says of a holder that has no series any more
Key: TypeAlias = tuple[str, str, str]  # scheduler, namespace, and a group or holder
AskFate: TypeAlias = Callable[[HolderName, str], str]


class Account(NamedTuple):
    """To whose record a decision belongs: the policy that decided, the class of the holder, its tenant."""

    policy: str
    kind: str
    tenant: str


class Observer(Protocol):
    """Counts, by account."""

    def count_decision(self, account: Account) -> None:
        """A group became underused."""

    def count_outcome(self, account: Account, outcome: str) -> None:
        """One of OUTCOMES, for one that was counted."""


class RecordObserver(Observer, Protocol):
    """Shows people what the record counts."""

    def restore(self, policy: str, kind: str, decisions: int, outcomes: Mapping[str, int]) -> None:
        """What was counted before this process."""

    def forget(self) -> None:
        """Another process counts now."""


class Start(NamedTuple):
    """A holder when it is first watched: for how long it had been idle, and its longest gap until then (seconds)."""

    incarnation: str
    idle_s: float
    gap_s: float


@dataclass(slots=True)
class Watch:
    """One group since it became underused, at `wall` (Unix seconds).

    `ended`: those of the holders that are gone and did not work. `quiet`: when each was last observed to have been idle
    since then (Unix seconds), 0 where it was not. `last`: when its idle run was last seen, and how long that was.
    """

    account: Account
    wall: float
    holders: dict[HolderName, Start]
    ended: set[HolderName] = field(default_factory=set)
    quiet: dict[HolderName, float] = field(default_factory=dict)
    last: dict[HolderName, tuple[float, float]] = field(default_factory=dict)


class Watches:
    """Remembers the groups whose hour is not over, and which groups are underused."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self.open: dict[Key, Watch] = {}
        self.last_wall: float | None = None
        """When the last cycle with evidence was (Unix seconds), of this process or of the one before it."""
        self._underused: dict[Key, frozenset[tuple[HolderName, str]]] | None = None

    def names(self) -> set[HolderName]:
        """Whom to ask about: one that works is in no list of idle ones."""
        return {name for watch in self.open.values() for name in watch.holders.keys() - watch.ended}

    def is_open(self, decisions: Iterable[Decision]) -> bool:
        """Whether the hour of any group of these is not over yet."""
        return not self.open.keys().isdisjoint(map(key_of, decisions))

    def note(self, decisions: Sequence[Decision], wall: float, ask_fate: AskFate) -> None:
        """The decisions of a cycle on evidence of `wall` (Unix seconds), before any brake. `ask_fate`: what became of a
        holder that has no series: RUNS, ENDED, or LOST if it was taken away or that is unknown.
        """
        by_name = {decision.name: decision for decision in decisions}
        left = FATES_MAX
        for key, watch in list(self.open.items()):
            outcome, left = self._follow(watch, by_name, wall, ask_fate, left)
            if outcome:
                del self.open[key]
                self._observer.count_outcome(watch.account, outcome)
        self._begin_all(decisions, wall)
        self.last_wall = wall

    def _follow(
        self, watch: Watch, by_name: Mapping[HolderName, Decision], wall: float, ask_fate: AskFate, left: int
    ) -> tuple[str, int]:
        """The outcome, "" while it is not known; `left`: how many fates may still be asked for."""
        is_over = wall >= watch.wall + REGRET_S
        is_whole = True
        for name in sorted(watch.holders.keys() - watch.ended):
            decision, start = by_name.get(name), watch.holders[name]
            if decision is not None and _incarnation(decision) == start.incarnation:
                if _worked(decision, watch, start):
                    return REGRET, left
                is_quiet = _idle_since(decision, watch.wall)
                watch.quiet[name] = wall if is_quiet else 0.0
                is_whole = is_whole and is_quiet
                continue
            is_whole = False
            if decision is not None:  # another one has its name, so this one is gone; how it ended is unknown
                return UNKNOWN, left
            if left > 0:
                left -= 1
                fate = ask_fate(name, start.incarnation)
                if fate == ENDED and wall - watch.quiet.get(name, watch.wall) <= END_SEEN_S:
                    watch.ended.add(name)
                elif fate != RUNS:
                    return UNKNOWN, left
        if len(watch.ended) == len(watch.holders):
            return RIGHT, left
        if is_over and is_whole:
            return RIGHT, left
        return (UNKNOWN if wall >= watch.wall + REGRET_S + LATE_S else ""), left

    def _begin_all(self, decisions: Sequence[Decision], wall: float) -> None:
        """Begin to watch the groups that became underused since the last cycle."""
        groups: defaultdict[Key, list[Decision]] = defaultdict(list)
        for decision in decisions:
            groups[key_of(decision)].append(decision)
        before = self._underused
        underused: dict[Key, frozenset[tuple[HolderName, str]]] = {}
        watched = sum(len(watch.holders) for watch in self.open.values())
        for key, group in groups.items():
            identity = frozenset((decision.name, _incarnation(decision)) for decision in group)
            is_known = before is not None and before.get(key) == identity
            if all(decision.stage == UNDERUSED for decision in group):
                underused[key] = identity
                if key in self.open or is_known or (before is None and not self._is_new(group)):
                    continue
                account = account_of(group[0])
                self._observer.count_decision(account)
                if watched + len(group) > HOLDERS_MAX:
                    self._observer.count_outcome(account, UNKNOWN)
                    continue
                watched += len(group)
                holders = {
                    each.name: Start(_incarnation(each), shortest_run(each), _longest_gap(each)) for each in group
                }
                self.open[key] = Watch(account, wall, holders)
        by_name = {decision.name: decision for decision in decisions}
        for key, identity in (before or {}).items():
            if key not in underused and all(_rests(by_name.get(name), of) for name, of in identity):
                underused[key] = identity  # it is no other decision when it comes back
        self._underused = underused

    def _is_new(self, group: Sequence[Decision]) -> bool:
        """Whether a group became underused after the last cycle of the process before this one."""
        if self.last_wall is None:
            return False
        became = [
            (each.idle_since_wall or each.observed_wall) + (each.windows.underused_s if each.windows else 0.0)
            for each in group
        ]
        return max(became) > self.last_wall


def key_of(decision: Decision) -> Key:
    """The group of a holder: its gang, or itself."""
    around = decision.around
    group = around.group if around is not None and around.members else ""
    return decision.name.scheduler, decision.name.namespace, group or decision.name.name


def account_of(decision: Decision) -> Account:
    """To whose record a decision belongs."""
    policy = decision.rule.name if decision.rule is not None else SECTION
    return Account(policy, decision.around.kind if decision.around is not None else UNCLEAR, tenant_of(decision))


def tenant_of(decision: Decision) -> str:
    """The namespace of a pod; of a job its account, as the exporter shows it, else its user."""
    return decision.name.namespace or decision.owner.rpartition("/")[2]


def shortest_run(decision: Decision) -> float:
    """For how long all units of a holder have been idle (seconds); 0 where that is not known."""
    return min((unit.idle_run_s or 0.0 for unit in merge_units(decision.units)), default=0.0)


def _incarnation(decision: Decision) -> str:
    """The pod's UID; of a job, when it began."""
    return decision.incarnation or (f"{decision.start_wall:.0f}" if decision.start_wall is not None else "")


def _rests(decision: Decision | None, incarnation: str) -> bool:
    """Whether a holder that was underused has not worked since, whatever its stage is now."""
    if decision is None or _incarnation(decision) != incarnation:
        return False
    return decision.stage == "exempt" or not decision.active


def _idle_since(decision: Decision, wall: float) -> bool:
    """Whether every unit was observed idle for all the time since `wall` (Unix seconds)."""
    elapsed_s = decision.observed_wall - wall
    return all(
        unit.idle_run_s is not None and unit.sample_age_s is not None and unit.idle_run_s + SLACK_S >= elapsed_s
        for unit in decision.units
    )


def _longest_gap(decision: Decision) -> float:
    return max((unit.longest_gap_s for unit in decision.units), default=0.0)


def _worked(decision: Decision, watch: Watch, start: Start) -> bool:
    """Whether a unit of this holder worked since it is watched: its idle run ended, and not for want of knowledge."""
    gap_s = _longest_gap(decision)
    if gap_s > start.gap_s and gap_s + SLACK_S >= start.idle_s:
        return True
    runs = [unit for unit in decision.units if unit.idle_run_s is not None and unit.idle_run_s >= 0.0]
    if not runs:
        return False
    shortest = min(runs, key=lambda unit: unit.idle_run_s or 0.0)
    run_s = (shortest.idle_run_s or 0.0) + max(0.0, shortest.sample_age_s or 0.0)
    before = watch.last.get(decision.name)
    watch.last[decision.name] = decision.observed_wall, run_s
    if run_s + SLACK_S >= decision.observed_wall - watch.wall:
        return False
    if start.gap_s + SLACK_S >= start.idle_s:
        return True  # it had had a longer gap, which another one does not make grow
    passed_s = math.inf if before is None else decision.observed_wall - before[0]
    return before is not None and passed_s <= UNKNOWN_S and run_s + SLACK_S / 2 < before[1] + passed_s
