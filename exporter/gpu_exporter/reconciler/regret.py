"""How often a policy is wrong: holders that became underused, and those of them that worked again within an hour.

Decisions are counted and not marks, in a dry run too, so that a policy can be judged before it may write.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from gpu_exporter.clock import Clock
from gpu_exporter.config.rules import SECTION
from gpu_exporter.reconciler.evidence import HolderName
from gpu_exporter.reconciler.policy import UNDERUSED, Decision
from gpu_exporter.reconciler.surroundings import UNCLEAR

REGRET_S = 3600.0  # work that begins later says more of the next day than of the decision
SLACK_S = 60.0  # between what a run says and the clocks of two hosts
WATCHED_MAX = 2000  # each is asked for in every cycle


class RegretObserver(Protocol):
    """Counts, by the policy that decided and the class of the holder."""

    def count_underused(self, policy: str, kind: str) -> None:
        """A holder became underused."""

    def count_regret(self, policy: str, kind: str) -> None:
        """One of them worked again within REGRET_S."""


class _Watch(NamedTuple):
    """One holder since it became underused, at `wall` (Unix seconds); `until`: monotonic seconds."""

    incarnation: str | float | None
    until: float
    wall: float
    policy: str
    kind: str


class Regrets:
    """Remembers from one cycle to the next who became underused."""

    def __init__(self, observer: RegretObserver, clock: Clock) -> None:
        self._observer = observer
        self._clock = clock
        self._watches: dict[HolderName, _Watch] = {}
        # Who is underused, by incarnation; None before the first cycle: since when they are is not known.
        self._underused: dict[HolderName, str | float | None] | None = None

    def watched(self) -> set[HolderName]:
        """Whom to ask about: one that works is in no list of idle ones."""
        return set(self._watches)

    def note(self, decisions: Sequence[Decision]) -> None:
        """The decisions of a cycle, before any brake."""
        now, before = self._clock.monotonic(), self._underused
        self._watches = {name: watch for name, watch in self._watches.items() if now <= watch.until}
        underused: dict[HolderName, str | float | None] = {}
        for decision in decisions:
            name = decision.name
            incarnation = decision.incarnation or decision.start_wall  # of a job, when it began
            same = before is not None and name in before and before[name] == incarnation
            watch = self._watches.get(name)
            if watch is not None and watch.incarnation == incarnation and _worked_since(decision, watch.wall):
                self._observer.count_regret(watch.policy, watch.kind)
                del self._watches[name]
            elif decision.stage == UNDERUSED:
                underused[name] = incarnation
                if before is not None and not same:
                    self._begin(decision, now)
            elif same and (decision.stage == "exempt" or not decision.active):  # it is no other one when that ends
                underused[name] = incarnation
        self._underused = underused

    def _begin(self, decision: Decision, now: float) -> None:
        policy = decision.rule.name if decision.rule is not None else SECTION
        kind = decision.around.kind if decision.around is not None else UNCLEAR
        self._observer.count_underused(policy, kind)
        if len(self._watches) < WATCHED_MAX:
            self._watches[decision.name] = _Watch(
                decision.incarnation or decision.start_wall, now + REGRET_S, decision.observed_wall, policy, kind
            )


def _worked_since(decision: Decision, wall: float) -> bool:
    """Whether an idle run is younger than `wall`: not whether it is too short, which a new wish can make it."""
    elapsed_s = decision.observed_wall - wall
    runs = ((unit.idle_run_s, max(0.0, unit.sample_age_s or 0.0)) for unit in decision.units)
    return any(run is not None and run >= 0.0 and run + age + SLACK_S < elapsed_s for run, age in runs)
