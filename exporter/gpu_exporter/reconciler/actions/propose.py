"""What could be done to the holders that are marked underused: one proposal for each group that they are all of. Pure.

Only what can be taken up again, or what the site allows by name: a Deployment, a server or a bare pod is never touched.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from gpu_exporter.config.values import ACTIONS
from gpu_exporter.defaults import Actions
from gpu_exporter.durations import format_duration
from gpu_exporter.reconciler.evidence import HolderName
from gpu_exporter.reconciler.policy import UNDERUSED, Decision
from gpu_exporter.reconciler.surroundings import BATCH, INTERACTIVE, Surroundings

SUSPEND, DEACTIVATE, STOP, REQUEUE, CANCEL = ACTIONS
# Kinds of groups by (API group, kind), with what may be done to them. A Job that Kueue has admitted is deactivated
# instead of suspended, since Kueue would start it again; only its live object says that it is one.
POSSIBLE: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("batch", "Job"): (SUSPEND, DEACTIVATE),
    ("jobset.x-k8s.io", "JobSet"): (SUSPEND, DEACTIVATE),
    **{
        ("kubeflow.org", f"{kind}Job"): (SUSPEND, DEACTIVATE)
        for kind in ("MPI", "PyTorch", "TF", "XGBoost", "Paddle", "JAX")
    },
    ("kubeflow.org", "Notebook"): (STOP,),
}
CLASS_OF = {SUSPEND: BATCH, DEACTIVATE: BATCH, STOP: INTERACTIVE, REQUEUE: BATCH}  # whom each may be done to


class Target(NamedTuple):
    """What is acted on: a group of pods, as API group, version, kind and name say, or a job."""

    group: str
    version: str
    kind: str
    name: str

    @property
    def title(self) -> str:
        """As the annotation `owner` of a mark has it: batch/v1/Job/train; `job 42`."""
        if not self.kind:
            return f"job {self.name}"
        return "/".join(part for part in (self.group, self.version, self.kind, self.name) if part)


class Proposal(NamedTuple):
    """What may be done to `target`, of ACTIONS, which ends all of these holders, and no others that hold GPUs."""

    possible: tuple[str, ...]
    target: Target
    decisions: tuple[Decision, ...]

    @property
    def first(self) -> Decision:
        """The one that stands for all of them where they have everything in common."""
        return self.decisions[0]

    @property
    def title(self) -> str:
        """The target as people know it, with its namespace."""
        return place(self.first, self.target.title)

    @property
    def names(self) -> frozenset[HolderName]:
        return frozenset(decision.name for decision in self.decisions)

    @property
    def since_wall(self) -> float:
        """Since when all of them have been idle (Unix seconds)."""
        return max(decision.idle_since_wall or decision.observed_wall for decision in self.decisions)

    @property
    def gpus(self) -> int:
        return sum(decision.held or len(decision.units) for decision in self.decisions)


class Held(NamedTuple):
    """Nothing is done to these holders. `reason`: one word, a label value; `why`: in words, with the remedy."""

    title: str
    reason: str
    why: str


def place(decision: Decision, title: str) -> str:
    """`batch/v1/Job/train in ml`; a job needs no place."""
    return f"{title} in {decision.name.namespace}" if decision.name.namespace and "/" in title else title


def allowed_kinds(text: str) -> tuple[str, ...]:
    """The setting actions.kinds."""
    return tuple(text.replace(",", " ").split())


def propose(decisions: Iterable[Decision], kinds: Sequence[str]) -> tuple[list[Proposal], list[Held]]:
    """What could be done to holders that are underused, and marked so, the longest idle first; what not, and why.

    `kinds`: what the site allows.
    """
    groups: defaultdict[tuple[str, str, str], list[Decision]] = defaultdict(list)
    held: list[Held] = []
    for decision in decisions:
        group = decision.around.group if decision.around is not None else ""
        groups[decision.name.scheduler, decision.name.namespace, group or decision.name.name].append(decision)
    found: list[Proposal] = []
    for key in sorted(groups):
        answer = _propose(groups[key], kinds)
        if isinstance(answer, Held):
            held.append(answer)
        else:
            found.append(answer)
    return sorted(found, key=lambda proposal: proposal.since_wall), held


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


def _propose(decisions: Sequence[Decision], kinds: Sequence[str]) -> Proposal | Held:
    """What could be done to the holders of one group."""
    answers = [_allowed(decision, kinds) for decision in decisions]
    if held := [answer for answer in answers if isinstance(answer, Held)]:
        return held[0]
    (target, possible), *more = [answer for answer in answers if not isinstance(answer, Held)]
    title = place(decisions[0], target.title)
    if any(answer != (target, possible) for answer in more):
        return Held(title, "class", "its members are of different classes")
    names = {decision.name for decision in decisions}
    around = [decision.around for decision in decisions if decision.around is not None]
    if others := {member.name for each in around for member in each.members} - names:
        return Held(title, "members", f"not all that it holds is marked underused: {min(others)} is not")
    return Proposal(possible, target, tuple(decisions))


def _allowed(decision: Decision, kinds: Sequence[str]) -> tuple[Target, tuple[str, ...]] | Held:
    """What would be acted on for a holder, and how, whatever others of its group do."""
    around = decision.around
    if around is None:
        return Held(decision.title, "unknown", "what surrounds it is not known")
    target, possible = _target(decision, around)
    if target is None:
        return Held(decision.title, "kind", f"nothing is ever done to {around.group or 'a pod without a controller'}")
    title = place(decision, target.title)
    allowed = tuple(kind for kind in possible if kind in kinds)
    if not allowed:
        return Held(title, "kind", f"actions.kinds allows none of {', '.join(possible)}")
    fitting = tuple(kind for kind in allowed if CLASS_OF.get(kind, around.kind) == around.kind)
    if not fitting or around.kind not in (BATCH, INTERACTIVE):
        return Held(title, "class", f"its class is {around.kind}")
    return target, fitting


def _target(decision: Decision, around: Surroundings) -> tuple[Target | None, tuple[str, ...]]:
    if decision.name.scheduler == "slurm":
        # Components of a heterogeneous job stand and fall together, which neither command does for one of them.
        alone = not around.members
        return (Target("", "", "", decision.users_id or decision.name.name) if alone else None), (REQUEUE, CANCEL)
    parts = around.group.split("/")
    if len(parts) != 4 or (parts[0], parts[2]) not in POSSIBLE:
        return None, ()
    return Target(*parts), POSSIBLE[parts[0], parts[2]]
