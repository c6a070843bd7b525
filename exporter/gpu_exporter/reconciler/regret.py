"""How often a policy is wrong: holders that became underused, and those of them that worked again within an hour.

Decisions are counted and not marks, in a dry run too, so that a policy can be judged before it may write.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from gpu_exporter.clock import Clock
from gpu_exporter.reconciler.evidence import HolderName
from gpu_exporter.reconciler.policy import UNDERUSED, Decision
from gpu_exporter.reconciler.surroundings import UNCLEAR

REGRET_S = 3600.0  # work that begins later says more of the next day than of the decision
WATCHED_MAX = 2000  # each is asked for in every cycle
SECTION = "policy"  # the name of what decides where no policy of the list does


class RegretObserver(Protocol):
    """Counts, by the policy that decided and the class of the holder."""

    def count_underused(self, policy: str, kind: str) -> None:
        """A holder became underused."""

    def count_regret(self, policy: str, kind: str) -> None:
        """One of them worked again within REGRET_S."""


class _Watch(NamedTuple):
    incarnation: str | float | None
    until: float
    policy: str
    kind: str


class Regrets:
    """Remembers from one cycle to the next who became underused."""

    def __init__(self, observer: RegretObserver, clock: Clock) -> None:
        self._observer = observer
        self._clock = clock
        self._watches: dict[HolderName, _Watch] = {}
        self._underused: set[HolderName] | None = None  # None before the first cycle: since when they are is not known

    def watched(self) -> set[HolderName]:
        """Whom to ask about: one that works is in no list of idle ones."""
        return set(self._watches)

    def note(self, decisions: Sequence[Decision]) -> None:
        """The decisions of a cycle."""
        now = self._clock.monotonic()
        self._watches = {name: watch for name, watch in self._watches.items() if now <= watch.until}
        underused = {decision.name for decision in decisions if decision.stage == UNDERUSED}
        for decision in decisions:
            watch = self._watches.get(decision.name)
            incarnation = decision.incarnation or decision.start_wall  # of a job, when it began
            if watch is not None and decision.active and watch.incarnation == incarnation:
                self._observer.count_regret(watch.policy, watch.kind)
                del self._watches[decision.name]
            elif (
                decision.stage == UNDERUSED
                and self._underused is not None
                and decision.name not in self._underused
                and (watch is None or watch.incarnation != incarnation)
            ):
                policy = decision.rule.name if decision.rule is not None else SECTION
                kind = decision.around.kind if decision.around is not None else UNCLEAR
                self._observer.count_underused(policy, kind)
                if len(self._watches) < WATCHED_MAX:
                    self._watches[decision.name] = _Watch(incarnation, now + REGRET_S, policy, kind)
        self._underused = underused
