"""Replays a policy on the life of one gang, with the reconciler's own decisions. Pure.

The live reconciler decides every minute. Here a decision is made only when a stage can change (`moments`), which gives
the same result. Decisions count as in gpu_reconciler_underused_total: once when a gang becomes underused, and again
only after a unit has worked. Limits and brakes do not count, because they delay only marks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gpu_exporter.reconciler.decision.outcomes import REGRET_S
from gpu_exporter.reconciler.decision.policy import (
    COVERAGE_SLACK,
    HOST_HOLD_S,
    LABELLED,
    MARKED,
    UNDERUSED,
    Decision,
    decide,
)
from gpu_exporter.reconciler.decision.rulebook import Rulebook
from gpu_exporter.reconciler.decision.settle import settle
from gpu_exporter.reconciler.evidence.records import START_SLACK_S, Evidence, HolderName
from gpu_exporter.reports.backtest.lives import LEFT, LOST, OPEN, UNSEEN, HolderLife, PastGang, Tenure, crossings

# The fate of a decision:
# - returned, later: the gang worked again within REGRET_S, or later in its life.
# - idle: it was seen idle for REGRET_S, and not at work later. ended: it ended by itself within REGRET_S, idle.
# - taken: as ended, but its controller made another pod, or the job ran again: it was preempted, evicted or failed.
# - lost: its node vanished. unknown: no source saw it for a part of REGRET_S. open: the history ends before.
RETURNED, LATER, IDLE, ENDED, TAKEN, NODE_LOST, UNKNOWN, AT_END = FATES = (
    *("returned", "later", "idle", "ended", "taken", "lost", "unknown", "open"),
)
AGAIN_S = 3600.0  # a pod that its controller makes within this time replaces the one that ended
AFTER_S = 0.5  # after a share has passed a limit, rounding no longer hides it


class Replayed(NamedTuple):
    """One decision: a gang became underused at `wall` (Unix seconds).

    - `lives`: the members that held units. `rule`: name of the policy that decided, "" for the settings `policy.*`.
    - `since`, `idle_until`: begin and end of the time in which all units were idle (Unix seconds). `fate`: one of
      FATES.
    - `back_s`: seconds from the decision until a unit worked, None if none did. `is_seen`: the source has data about
      the time after the decision, so that None means no work.
    """

    wall: float
    gang: PastGang
    lives: tuple[HolderLife, ...]
    rule: str
    idle_until: float
    fate: str
    back_s: float | None
    since: float = 0.0
    is_seen: bool = True


class Replay(NamedTuple):
    """The decisions on a gang.

    - `warned`: when it became a candidate, so that its owner would have been warned (Unix seconds).
    - `begun`: the first decisions of these candidates, each with the begin of its idle time (Unix seconds).
    - `spared`: by time, why a gang that was idle for long enough did not become underused, in one word.
    """

    decisions: list[Replayed]
    warned: list[float]
    spared: dict[float, str]
    begun: list[tuple[float, Decision]]


class Replayer:
    """Replays one policy on gangs, with idle times at one floor."""

    def __init__(self, book: Rulebook, floor: int, *, is_trusted: bool = False, is_brief: bool = False) -> None:
        """`floor`: index in model.FLOORS. `is_trusted`: treats every measured zero as idle time. `is_brief`: finds
        decisions only, without candidates.
        """
        self.book, self._floor, self._is_trusted = book, floor, is_trusted
        policies, site = book.policies, book.site
        self._least_s = book.loosest.underused_after if is_brief else book.loosest.candidate_after
        times = {p.candidate_after for p in policies} | {p.underused_after for p in policies}
        times |= {p.interactive_after for p in policies} | {site.host_delay_max, site.waiting_max}
        self._times = sorted(times)
        self._graces = {p.startup_grace for p in policies}
        self._gaps = [(p.underused_after, p.gap_max) for p in policies]
        self._shares = sorted({p.coverage_min - slack for p in policies for slack in (0.0, COVERAGE_SLACK)})

    def stages(
        self, gang: PastGang, wall: float, before: dict[HolderName, str]
    ) -> tuple[list[HolderLife], list[Decision]]:
        """Returns the members that hold units at `wall` (Unix seconds), and the decisions on them. Replaces `before`,
        the last stage of each member, by the new stages.
        """
        alive = [life for life in gang.lives if any(each.start <= wall < each.end for each in life.tenures)]
        marks = {name: stage for name, stage in before.items() if stage in MARKED}
        before.clear()
        if not alive:
            return [], []
        window_s = self.book.site.underused_after
        holders = tuple(
            each.evidence(wall, self._floor, window_s, marks.get(each.name, ""), is_trusted=self._is_trusted)
            for each in alive
        )
        evidence = Evidence(wall, holders)
        around = dict.fromkeys((each.name for each in alive), gang.surroundings(alive))
        decisions = settle(evidence, decide(evidence, self.book.loosest), around, self.book)
        before |= {decision.name: decision.stage for decision in decisions}
        return alive, decisions

    def replay(self, gang: PastGang) -> Replay:
        """Returns the decisions on a gang over its whole life."""
        found = Replay([], [], {}, [])
        before: dict[HolderName, str] = {}
        members: frozenset[tuple[HolderName, float]] = frozenset()
        is_decided = is_warned = False
        for wall in self.moments(gang):
            alive, decisions = self.stages(gang, wall, before)
            now = frozenset((each.name, each.start) for each in alive)
            if now != members or any(each.active for each in decisions):
                is_decided, is_warned, members = False, False, now
            if decisions and not is_warned and any(each.stage in ("candidate", UNDERUSED) for each in decisions):
                found.warned.append(wall)
                few = (each._replace(units=each.units[:1] * len(each.units), reason="") for each in decisions)
                found.begun.extend((each.idle_since_wall, each) for each in few if each.idle_since_wall is not None)
                is_warned = True
            if decisions and not is_decided and all(each.stage == UNDERUSED for each in decisions):
                rule = decisions[0].rule
                found.decisions.append(self.follow(gang, tuple(alive), wall, rule.name if rule else ""))
                is_decided = True
            elif decisions and not is_decided and (why := _spared(decisions)):
                found.spared[wall] = why
        return found

    def moments(self, gang: PastGang) -> Iterator[float]:
        """Yields the times at which a stage of the gang can change (Unix seconds). Omits times in which no unit has
        been idle for long enough for any stage.
        """
        least = self._least_s
        long = {
            id(tenure): [run for run in tenure.runs[self._floor] if run.seconds >= least]
            for life in gang.lives
            for tenure in life.tenures
        }
        idle = sorted((run.start + least, run.end) for runs in long.values() for run in runs)
        if not idle:
            return
        moments: set[float] = set()
        for life in gang.lives:
            longest = {gap for each in life.tenures for _, gap in each.record_gaps(self._floor)}
            gaps = {max(own, min(2.0 * gap, most)) for own, most in self._gaps for gap in longest}
            for tenure in life.tenures:
                for run in long[id(tenure)]:
                    moments |= {run.start, run.end, *(run.start + each for each in (*self._times, *gaps))}
                moments |= {tenure.start, tenure.end, *(tenure.start + each for each in self._graces)}
                moments |= {edge for span in (*tenure.gaps, *tenure.doubts) for edge in span}
                moments |= {edge + shift for work in tenure.host_work for edge in work for shift in (0.0, HOST_HOLD_S)}
                for wall in crossings(tenure, self.book.site.underused_after, self._shares):
                    moments |= {wall, wall + AFTER_S}
        starts = iter(idle)
        until, start = -math.inf, next(starts, None)
        for wall in sorted(moments):
            while start is not None and start[0] <= wall:
                until = max(until, start[1])
                start = next(starts, None)
            if wall <= until:
                yield wall

    def follow(self, gang: PastGang, alive: tuple[HolderLife, ...], wall: float, rule: str) -> Replayed:
        """Returns the decision of policy `rule` on these members at `wall` (Unix seconds), with its fate."""
        holds = [(life, each) for life in alive for each in life.tenures if each.start <= wall < each.end]
        ends = [run for _, each in holds if (run := each.run_at(wall, self._floor)) is not None]
        works = [at for _, each in holds if (at := each.first_work(wall, self._floor)) is not None]
        # A pod that is moved to another unit is another holder; a job that runs again is another run.
        back_s = min(works) - wall if works else None
        idle_until = min((run.end for run in ends), default=wall)
        since = max((run.start for run in ends), default=wall)
        fate = self._fate(gang, holds, wall, back_s)
        is_seen = back_s is not None or not any(
            each.ended in (LOST, UNSEEN) or self._is_unseen(each, wall, each.end) for _, each in holds
        )
        return Replayed(wall, gang, alive, rule, idle_until, fate, back_s, since, is_seen)

    def _is_unseen(self, tenure: Tenure, wall: float, end: float) -> bool:
        """Returns whether a part of this time was seen by no source."""
        run = tenure.run_at(wall, self._floor)
        return tenure.unseen_s(wall, end) > 0.0 or (run is not None and run.end < end and run.ended == UNSEEN)

    def _fate(
        self, gang: PastGang, holds: Sequence[tuple[HolderLife, Tenure]], wall: float, back_s: float | None
    ) -> str:
        if back_s is not None and back_s <= REGRET_S:
            return RETURNED
        until = wall + REGRET_S
        end = min(until, *(each.end for _, each in holds))
        if any(self._is_unseen(each, wall, end) for _, each in holds):
            return UNKNOWN
        if back_s is not None:
            return LATER
        life, first = min(holds, key=lambda hold: hold[1].end)
        if first.end >= until:
            return IDLE
        if first.ended == OPEN:
            return AT_END
        if first.ended in (LOST, UNSEEN):
            return NODE_LOST if first.ended == LOST else UNKNOWN
        return TAKEN if first.ended == LEFT and _is_replaced(gang, life) else ENDED


def _is_replaced(gang: PastGang, life: HolderLife) -> bool:
    """Returns whether the controller made another pod, or the job ran again, soon after the end of this life."""
    return any(life.end - START_SLACK_S <= start <= life.end + AGAIN_S for start in gang.starts)


def _spared(decisions: Sequence[Decision]) -> str:
    """Returns in one word why a gang that was idle for long enough is not underused. "" if it was not."""
    for each in decisions:
        if each.stage in LABELLED and each.kept:
            return each.kept
        if each.windows and each.stage in ("exempt", "serving", "waiting", "unknown") and each.units:
            runs = [unit.idle_run_s or 0.0 for unit in each.units]
            if min(runs) >= each.windows.underused_s:
                return each.stage
    return ""
