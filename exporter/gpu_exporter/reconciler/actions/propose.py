"""Proposes actions on holders that are marked underused: one proposal for each target. Pure.

A proposal has only actions that the site allows, and never a Deployment, a server or a pod without a controller as
target. A proposal only names the target. The live target later shows whether the action is possible.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from gpu_exporter.common.config.defaults import Actions
from gpu_exporter.common.durations import format_duration
from gpu_exporter.reconciler.decision.policy import UNDERUSED, Decision
from gpu_exporter.reconciler.decision.surroundings import Reference
from gpu_exporter.reconciler.decision.target import CLASSES_OF, REQUEUE, Skipped, place
from gpu_exporter.reconciler.evidence.records import HolderName


class Proposal(NamedTuple):
    """The possible actions on one target.

    `possible`: some of ACTIONS. `decisions`: the decisions on the underused holders of the target.
    """

    target: Reference
    namespace: str
    possible: tuple[str, ...]
    decisions: tuple[Decision, ...]

    @property
    def first(self) -> Decision:
        """The first decision. It stands for values that all decisions have in common."""
        return self.decisions[0]

    @property
    def title(self) -> str:
        """The target with its namespace, for people."""
        return place(self.target, self.namespace)

    @property
    def owner(self) -> str:
        """The owner of the target: a namespace, or the user of a job. Not the account, which any user may name."""
        whose = self.namespace or self.first.owner.partition("/")[0] or self.title
        return f"{self.first.name.scheduler} {whose}"

    @property
    def names(self) -> frozenset[HolderName]:
        return frozenset(decision.name for decision in self.decisions)

    @property
    def members(self) -> frozenset[HolderName]:
        around = (decision.around for decision in self.decisions)
        return self.names.union(member.name for each in around if each is not None for member in each.members)

    @property
    def since_wall(self) -> float:
        """The time since which all holders have been idle (Unix seconds)."""
        return max(decision.idle_since_wall or decision.observed_wall for decision in self.decisions)

    @property
    def gpus(self) -> int:
        return sum(decision.held or len(decision.units) for decision in self.decisions)


class Spared(NamedTuple):
    """A group on which the reconciler does not act, with the reason."""

    title: str
    skipped: Skipped
    decisions: tuple[Decision, ...]


def allowed_kinds(text: str) -> tuple[str, ...]:
    """Returns the actions that the setting actions.kinds names."""
    return tuple(text.replace(",", " ").split())


def propose(decisions: Iterable[Decision], verbs: Sequence[str]) -> tuple[list[Proposal], list[Spared]]:
    """Returns the proposals for holders that are marked underused, longest idle first, and the spared groups.

    `verbs`: actions that the site allows.
    """
    groups: defaultdict[tuple[str, str, Reference | str], list[Decision]] = defaultdict(list)
    for decision in decisions:
        target = decision.around.target if decision.around is not None else None
        groups[decision.name.scheduler, decision.name.namespace, target or decision.name.name].append(decision)
    found: list[Proposal] = []
    spared: list[Spared] = []
    for key in sorted(groups, key=str):
        group = groups[key]
        answer = _propose(group, verbs)
        if isinstance(answer, Skipped):
            around = group[0].around
            target = around.target if around is not None else None
            title = place(target, group[0].name.namespace) if target is not None else group[0].title
            spared.append(Spared(title, answer, tuple(group)))
        else:
            found.append(answer)
    return sorted(found, key=lambda proposal: proposal.since_wall), spared


def what_may_follow(decision: Decision, settings: Actions) -> str:
    """Describes the action that may follow for an underused holder; "" for other stages, and if actions are off."""
    if settings.mode == "none" or decision.stage != UNDERUSED:
        return ""
    answer = _allowed(decision, allowed_kinds(settings.kinds))
    if isinstance(answer, Skipped):
        return f"the reconciler does not act on it: {answer.why}"
    target, possible = answer
    once = f"once its owner has been warned for {format_duration(settings.warned_for)} and all other conditions hold"
    shadow = " (in mode shadow, the reconciler only counts it)" if settings.mode == "shadow" else ""
    return f"{' or '.join(possible)} {target.title}, {once}{shadow}; docs/actions.md"


def _propose(decisions: Sequence[Decision], verbs: Sequence[str]) -> Proposal | Skipped:
    """Returns the proposal for the holders of one group, or the reason why no action is proposed."""
    answers = [_allowed(decision, verbs) for decision in decisions]
    if held := [answer for answer in answers if isinstance(answer, Skipped)]:
        return held[0]
    (target, possible), *more = [answer for answer in answers if not isinstance(answer, Skipped)]
    if any(answer[1] != possible for answer in more):
        return Skipped("class", "its members are of different classes")
    proposal = Proposal(target, decisions[0].name.namespace, possible, tuple(decisions))
    if others := proposal.members - proposal.names:
        return Skipped("members", f"not all of its members are marked underused: {min(others)} is not")
    return proposal


def _allowed(decision: Decision, verbs: Sequence[str]) -> tuple[Reference, tuple[str, ...]] | Skipped:
    """Returns the target of a holder and the possible actions. Does not check other members of its group."""
    around = decision.around
    if around is None:
        return Skipped("unknown", "its surroundings are not known")
    if around.target is None:
        return Skipped("kind", f"the reconciler never acts on {around.group or 'a pod without a controller'}")
    allowed = tuple(verb for verb in around.possible if verb in verbs)
    if not allowed:
        return Skipped("kind", f"actions.kinds allows none of {', '.join(around.possible)}")
    fitting = tuple(verb for verb in allowed if around.kind in CLASSES_OF[verb])
    if not fitting:
        return Skipped("class", f"no allowed action applies to its class, {around.kind}")
    if REQUEUE in fitting:
        fitting = (REQUEUE,)  # a job that may be requeued is never cancelled instead
    if held := next((around.held[verb] for verb in fitting if verb in around.held), None):
        return Skipped(*held)
    return around.target, fitting
