"""Watches each group that became underused for an hour, and then gives its decision one outcome. Pure.

A group is a gang, or a single pod or job, so a Job of 64 pods is one decision. Decisions are counted, not marks. So a
site can judge a policy by its dry run.

A new idle run after the decision shows that work or unknown time ended the old run. It was work if the holder's longest
gap has grown, or if the break was shorter than the time between two cycles: a short unknown time ends no run.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeAlias

from gpu_exporter.common.config.rules import SECTION
from gpu_exporter.reconciler.decision.policy import UNDERUSED, Decision, merge_units
from gpu_exporter.reconciler.decision.surroundings import UNCLEAR
from gpu_exporter.reconciler.evidence.records import HolderName

REGRET_S = 3600.0  # work that begins later does not show that the decision was wrong
LATE_S = 900.0  # how long to wait for evidence that is missing at the end of the hour
END_SEEN_S = 300.0  # an ended holder counts as idle until its end if it was last seen idle within this time
SLACK_S = 60.0  # tolerance between the length of a run and the clocks of two hosts
UNKNOWN_S = 60.0  # ledger.idle_run_unknown_reset: unknown time up to this length does not end an idle run
HOLDERS_MAX = 5000  # holders watched at a time; every cycle asks the source for each of them
FATES_MAX = 50  # holders without series, per cycle, whose fate the scheduler is asked for
RIGHT, REGRET, UNKNOWN = OUTCOMES = ("right", "regret", "unknown")
DROPPED = WATCHES, TENANTS, ACTS, DAYS = ("watches", "tenants", "acts", "days")  # in this order, if a record is full
RUNS, ENDED, LOST = "runs", "ended", "lost"  # the fate of a holder without series, as its scheduler reports it
Key: TypeAlias = tuple[str, str, str]  # scheduler, namespace, and the name of a group or holder
AskFate: TypeAlias = Callable[[HolderName, str], str]


class Account(NamedTuple):
    """The record to which a decision belongs: the policy that decided, the class of the holder, and its tenant."""

    policy: str
    kind: str
    tenant: str


class OutcomeObserver(Protocol):
    """Counts decisions and their outcomes, by account. A Protocol, because Record imports this module."""

    def count_decision(self, account: Account) -> None:
        """Counts a group that became underused."""

    def count_outcome(self, account: Account, outcome: str) -> None:
        """Counts the outcome of a counted decision: one of OUTCOMES."""

    def count_dropped(self, what: str, number: int) -> None:
        """Counts parts of the record that were dropped because it was full. `what`: a word of DROPPED."""


class WatchStart(NamedTuple):
    """A holder at the start of its watch: its idle time, and its longest gap until then (seconds)."""

    incarnation: str
    idle_s: float
    gap_s: float


@dataclass(slots=True)
class Watch:
    """One group that became underused at `wall` (Unix seconds).

    `ended`: holders that are gone and did not work.

    `quiet`: by holder, the end of the time since `wall` in which it was seen idle without a gap (Unix seconds); 0 if
    the last observation shows a gap.

    `last`: by holder, the time of the last observed idle run (Unix seconds), and its length (seconds).
    """

    account: Account
    wall: float
    holders: dict[HolderName, WatchStart]
    ended: set[HolderName] = field(default_factory=set)
    quiet: dict[HolderName, float] = field(default_factory=dict)
    last: dict[HolderName, tuple[float, float]] = field(default_factory=dict)


class Watches:
    """Remembers the groups that are watched, and the groups that are underused."""

    def __init__(self, observer: OutcomeObserver) -> None:
        self._observer = observer
        self.open: dict[Key, Watch] = {}
        self.last_wall: float | None = None
        """Time of the last cycle with evidence (Unix seconds), in this process or in the previous one."""
        self._underused: dict[Key, frozenset[tuple[HolderName, str]]] | None = None

    def names(self) -> set[HolderName]:
        """Returns the watched holders, which the next query must name: a list of idle holders omits the others."""
        return {name for watch in self.open.values() for name in watch.holders.keys() - watch.ended}

    @property
    def watched(self) -> int:
        """The number of watched holders."""
        return sum(len(watch.holders) for watch in self.open.values())

    def is_open(self, decisions: Iterable[Decision]) -> bool:
        """Returns whether any group of these decisions is still watched."""
        return not self.open.keys().isdisjoint(map(key_of, decisions))

    def give_up(self, holders: int) -> None:
        """Stops watching at least this many holders, and counts the outcomes as unknown.

        The tenant with the most holders loses its newest watch first, so that no tenant can end the watches of others.
        """
        number = 0
        keys: defaultdict[str, list[Key]] = defaultdict(list)
        sizes: Counter[str] = Counter()
        for key, watch in self.open.items():
            keys[watch.account.tenant].append(key)
            sizes[watch.account.tenant] += len(watch.holders)
        while holders > 0 and self.open:
            tenant = max(sizes, key=sizes.__getitem__)
            watch = self.open.pop(keys[tenant].pop())
            holders, number = holders - len(watch.holders), number + 1
            sizes[tenant] -= len(watch.holders)
            self._observer.count_outcome(watch.account, UNKNOWN)
        if number:
            self._observer.count_dropped(WATCHES, number)

    def note(self, decisions: Sequence[Decision], wall: float, ask_fate: AskFate) -> None:
        """Updates the watches by the decisions of a cycle, before any brake. `wall`: time of their evidence (Unix
        seconds).

        `ask_fate`: returns the fate of a holder without series: RUNS, ENDED, or LOST if it was taken away or its fate
        is unknown.
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
        """Returns the outcome, "" while it is not known, and the new value of `left`.

        `left`: how many calls of `ask_fate` remain in this cycle.
        """
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
            if decision is not None:  # another holder has its name, so it is gone; how it ended is unknown
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
        """Begins to watch the groups that became underused since the last cycle."""
        groups: defaultdict[Key, list[Decision]] = defaultdict(list)
        for decision in decisions:
            groups[key_of(decision)].append(decision)
        before = self._underused
        underused: dict[Key, frozenset[tuple[HolderName, str]]] = {}
        for key, group in groups.items():
            identity = frozenset((decision.name, _incarnation(decision)) for decision in group)
            is_known = before is not None and before.get(key) == identity
            if all(decision.stage == UNDERUSED for decision in group):
                underused[key] = identity
                if key in self.open or is_known or (before is None and not self._is_new(group)):
                    continue
                account = account_of(group[0])
                self._observer.count_decision(account)
                holders = {
                    each.name: WatchStart(_incarnation(each), shortest_run(each), _longest_gap(each)) for each in group
                }
                self.open[key] = Watch(account, wall, holders)
        self.give_up(self.watched - HOLDERS_MAX)
        by_name = {decision.name: decision for decision in decisions}
        for key, identity in (before or {}).items():
            if key not in underused and all(_rests(by_name.get(name), of) for name, of in identity):
                underused[key] = identity  # if the group becomes underused again, this is no new decision
        self._underused = underused

    def _is_new(self, group: Sequence[Decision]) -> bool:
        """Returns whether a group became underused after the last cycle of the previous process."""
        if self.last_wall is None:
            return False
        became = [
            (each.idle_since_wall or each.observed_wall) + (each.windows.underused_s if each.windows else 0.0)
            for each in group
        ]
        return max(became) > self.last_wall


def key_of(decision: Decision) -> Key:
    """Returns the key of a holder's group: its gang, or the holder itself."""
    around = decision.around
    group = around.group if around is not None and around.members else ""
    return decision.name.scheduler, decision.name.namespace, group or decision.name.name


def account_of(decision: Decision) -> Account:
    """Returns the record to which a decision belongs."""
    policy = decision.rule.name if decision.rule is not None else SECTION
    return Account(policy, decision.around.kind if decision.around is not None else UNCLEAR, tenant_of(decision))


def tenant_of(decision: Decision) -> str:
    """Returns the tenant of a holder. For a pod: the team or person that its namespace names, else the namespace. For a
    job: its account, or its user if the exporter does not publish accounts.
    """
    named = decision.around.tenant if decision.around is not None else ""
    return named or decision.name.namespace or decision.owner.rpartition("/")[2]


def shortest_run(decision: Decision) -> float:
    """Returns seconds for which all units of a holder have been idle; 0 if unknown."""
    return min((unit.idle_run_s or 0.0 for unit in merge_units(decision.units)), default=0.0)


def _incarnation(decision: Decision) -> str:
    """Returns the pod's UID; for a job, its start time."""
    return decision.incarnation or (f"{decision.start_wall:.0f}" if decision.start_wall is not None else "")


def _rests(decision: Decision | None, incarnation: str) -> bool:
    """Returns whether a holder that was underused has done no work since then. Its present stage does not matter."""
    if decision is None or _incarnation(decision) != incarnation:
        return False
    return decision.stage == "exempt" or not decision.active


def _idle_since(decision: Decision, wall: float) -> bool:
    """Returns whether every unit was observed as idle for the whole time since `wall` (Unix seconds)."""
    elapsed_s = decision.observed_wall - wall
    return all(
        unit.idle_run_s is not None and unit.sample_age_s is not None and unit.idle_run_s + SLACK_S >= elapsed_s
        for unit in decision.units
    )


def _longest_gap(decision: Decision) -> float:
    return max((unit.longest_gap_s for unit in decision.units), default=0.0)


def _worked(decision: Decision, watch: Watch, start: WatchStart) -> bool:
    """Returns whether work ended the idle run of a unit after the watch began. Unknown time can end an idle run too."""
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
        return True  # its longest gap was longer before, so a new gap cannot let it grow
    passed_s = math.inf if before is None else decision.observed_wall - before[0]
    return before is not None and passed_s <= UNKNOWN_S and run_s + SLACK_S / 2 < before[1] + passed_s
