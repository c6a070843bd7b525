"""What could be done to the holders that are marked underused: one proposal for each target that they have. Pure.

Only what can be taken up again, or what the site allows by name: a Deployment, a server or a bare pod is never touched.
A proposal says whom to look at. What may be done is said by the target itself, once it is read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from gpu_exporter.defaults import Actions
from gpu_exporter.durations import format_duration
from gpu_exporter.reconciler.decision.policy import UNDERUSED, Decision
from gpu_exporter.reconciler.decision.surroundings import Reference
from gpu_exporter.reconciler.evidence.records import HolderName
from gpu_exporter.reconciler.target import CLASSES_OF, Held, place


class Proposal(NamedTuple):
    """What may be done to `target`, of ACTIONS, on whose account these holders are underused."""

    target: Reference
    namespace: str
    possible: tuple[str, ...]
    decisions: tuple[Decision, ...]

    @property
    def first(self) -> Decision:
        """The one that stands for all of them where they have everything in common."""
        return self.decisions[0]

    @property
    def title(self) -> str:
        """The target as people know it, with its namespace."""
        return place(self.target, self.namespace)

    @property
    def names(self) -> frozenset[HolderName]:
        return frozenset(decision.name for decision in self.decisions)

    @property
    def members(self) -> frozenset[HolderName]:
        """The holders, and all that any hint says belong to them."""
        around = (decision.around for decision in self.decisions)
        return self.names.union(member.name for each in around if each is not None for member in each.members)

    @property
    def since_wall(self) -> float:
        """Since when all of them have been idle (Unix seconds)."""
        return max(decision.idle_since_wall or decision.observed_wall for decision in self.decisions)

    @property
    def gpus(self) -> int:
        return sum(decision.held or len(decision.units) for decision in self.decisions)


class Spared(NamedTuple):
    """A group to which nothing is done, and why."""

    title: str
    held: Held
    decisions: tuple[Decision, ...]


def allowed_kinds(text: str) -> tuple[str, ...]:
    """The setting actions.kinds."""
    return tuple(text.replace(",", " ").split())


def propose(decisions: Iterable[Decision], verbs: Sequence[str]) -> tuple[list[Proposal], list[Spared]]:
    """What could be done to holders that are underused, and marked so, the longest idle first; what not, and why.

    `verbs`: what the site allows.
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
        if isinstance(answer, Held):
            around = group[0].around
            target = around.target if around is not None else None
            title = place(target, group[0].name.namespace) if target is not None else group[0].title
            spared.append(Spared(title, answer, tuple(group)))
        else:
            found.append(answer)
    return sorted(found, key=lambda proposal: proposal.since_wall), spared


def what_may_follow(decision: Decision, settings: Actions) -> str:
    """What the site lets be done to an underused holder, for people; "" where it lets nothing be done to anybody."""
    if settings.mode == "none" or decision.stage != UNDERUSED:
        return ""
    answer = _allowed(decision, allowed_kinds(settings.kinds))
    if isinstance(answer, Held):
        return f"nothing is done to it: {answer.why}"
    target, possible = answer
    once = f"once its owner has been warned for {format_duration(settings.warned_for)} and all else holds"
    shadow = " (mode shadow: it is only counted)" if settings.mode == "shadow" else ""
    return f"{' or '.join(possible)} {target.title}, {once}{shadow}; docs/actions.md"


def _propose(decisions: Sequence[Decision], verbs: Sequence[str]) -> Proposal | Held:
    """What could be done to the holders of one group."""
    answers = [_allowed(decision, verbs) for decision in decisions]
    if held := [answer for answer in answers if isinstance(answer, Held)]:
        return held[0]
    (target, possible), *more = [answer for answer in answers if not isinstance(answer, Held)]
    if any(answer[1] != possible for answer in more):
        return Held("class", "its members are of different classes")
    proposal = Proposal(target, decisions[0].name.namespace, possible, tuple(decisions))
    if others := proposal.members - proposal.names:
        return Held("members", f"not all that it holds is marked underused: {min(others)} is not")
    return proposal


def _allowed(decision: Decision, verbs: Sequence[str]) -> tuple[Reference, tuple[str, ...]] | Held:
    """What would be acted on for a holder, and how, whatever others of its group do."""
    around = decision.around
    if around is None:
        return Held("unknown", "what surrounds it is not known")
    if around.target is None:
        return Held("kind", f"nothing is ever done to {around.group or 'a pod without a controller'}")
    allowed = tuple(verb for verb in around.possible if verb in verbs)
    if not allowed:
        return Held("kind", f"actions.kinds allows none of {', '.join(around.possible)}")
    fitting = tuple(verb for verb in allowed if around.kind in CLASSES_OF[verb])
    if not fitting:
        return Held("class", f"its class is {around.kind}")
    return around.target, fitting
