"""The target of an action, and the reasons to refuse the action, for both schedulers. Pure.

The target is read right before the action. It lists every member that the action would end, with or without GPUs,
because each of them must be idle. Any unknown fact about the target prevents the action.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from gpu_exporter.common.config.values import ACTIONS
from gpu_exporter.reconciler.decision.policy import UNDERUSED, Decision
from gpu_exporter.reconciler.decision.surroundings import BATCH, INTERACTIVE, SERVING, UNCLEAR, Reference
from gpu_exporter.reconciler.evidence.records import HolderName

SUSPEND, DEACTIVATE, STOP, REQUEUE, CANCEL = ACTIONS
# The classes on which each action is allowed.
CLASSES_OF: Mapping[str, tuple[str, ...]] = {
    SUSPEND: (BATCH,),
    DEACTIVATE: (BATCH,),
    STOP: (INTERACTIVE,),
    REQUEUE: (BATCH,),
    CANCEL: (BATCH, INTERACTIVE),
}
CAREFUL = (SERVING, UNCLEAR, INTERACTIVE, BATCH)  # classes, from most to least careful


class Skipped(NamedTuple):
    """An action that is not done. `reason`: the reason in one word, a label value. `why`: the reason in a sentence,
    with the remedy.
    """

    reason: str
    why: str


class Part(NamedTuple):
    """A live pod, or component of a job, that the action would end.

    `incarnation`: the pod's UID, or the job's id, restart count and start.
    `units`: GPUs and MIG instances that its scheduler assigned; None if they cannot be counted.
    `role`: its role in the target, one of the keys of `wants`.
    `waits`: why it cannot work now; "" if it can.
    `kind`: the class in its own label, "" for no label.
    `wish`: its wish to keep the GPUs, in words.
    `start_wall`: when it was started (Unix seconds); 0 counts as very long ago.
    `grace_s`: how long it can run after it was told to end (seconds).
    """

    name: HolderName
    incarnation: str
    units: int | None
    role: str = ""
    waits: str = ""
    kind: str = ""
    wish: str = ""
    start_wall: float = 0.0
    grace_s: float = 0.0


class Target(NamedTuple):
    """The live object or job on which an action would be done.

    `verb`: the action, one of ACTIONS.
    `ends`: every member that the action ends.
    `wants`: by role, how many members the target keeps running; None if they cannot be counted.
    `strangers`: objects that are not members, but may end with the target or belong to it.
    `unread`: possible members that could not be read.
    `above`: objects that control the target, schedule it or depend on it.
    `wish`: its own wish to keep the GPUs, in words.
    `kind`: the class in its label, "" for no label.
    `note`: the note of an earlier action on it, "" for none.
    `obstacle`: why no action is possible now.
    `undo`: how an owner resumes it.
    `live`: the object as its actor read it.
    """

    reference: Reference
    namespace: str
    verb: str
    ends: tuple[Part, ...]
    wants: Mapping[str, int] | None
    strangers: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    above: str = ""
    wish: str = ""
    kind: str = ""
    note: str = ""
    obstacle: Skipped | None = None
    undo: str = ""
    live: Any = None

    @property
    def title(self) -> str:
        """The target's name for people, with its namespace."""
        return place(self.reference, self.namespace)

    @property
    def beside(self) -> tuple[Part, ...]:
        """The target's members without GPUs. GPU metrics show nothing about them."""
        return tuple(part for part in self.ends if part.units == 0)

    @property
    def grace_s(self) -> float:
        """How long the last of its members can run after it was told to end (seconds)."""
        return max((part.grace_s for part in self.ends), default=0.0)


def place(reference: Reference, namespace: str) -> str:
    """Returns the title with its namespace: `batch/v1/Job/train in ml`. A Slurm job has no namespace."""
    return f"{reference.title} in {namespace}" if namespace else reference.title


def why_not(
    target: Target, decisions: Mapping[HolderName, Decision], verbs: Collection[str], notes: Collection[str]
) -> Skipped | None:
    """Returns the reason why no action is allowed on a target, None if the action is allowed.

    Every member that the action would end must be underused or have no GPU.

    `decisions`: the decisions on holders that are marked underused.
    `verbs`: the actions of ACTIONS that the site allows.
    `notes`: notes of the actions in the reconciler's journal.
    """
    if target.obstacle is not None:
        return target.obstacle
    if target.note:
        if target.note in notes:
            return Skipped("acted", f"the reconciler has acted on it before ({target.note})")
        return Skipped(
            "noted",
            (
                f"its note ({target.note}) names an action that the journal does not know, so the note counts "
                "as an opt-out"
            ),
        )
    if target.above:
        return Skipped("above", f"{target.above}")
    if target.verb not in verbs:
        return Skipped("kind", f"actions.kinds does not list {target.verb}")
    return _membership(target) or _idleness(target, decisions) or _care(target, decisions)


def _membership(target: Target) -> Skipped | None:
    """Returns the reason why members of the target are unknown or missing; None if all are known and present."""
    if target.unread:
        return Skipped("unread", f"a possible member cannot be read: {target.unread[0]}{_more(target.unread)}")
    if target.strangers:
        return Skipped("stranger", f"{target.strangers[0]}{_more(target.strangers)}")
    if target.wants is None:
        return Skipped("uncounted", "the number of members that it needs is unknown")
    there = Counter(part.role for part in target.ends)
    for role, wanted in sorted(target.wants.items()):
        if there[role] < wanted:
            which = f" of {role}" if role else ""
            return Skipped("waiting", f"it waits for {wanted - there[role]} of {wanted} members{which}")
    if waiting := next((part for part in target.ends if part.waits), None):
        return Skipped("waiting", f"{waiting.name} {waiting.waits}")
    return None


def _idleness(target: Target, decisions: Mapping[HolderName, Decision]) -> Skipped | None:
    """Returns the reason why the members with GPUs differ from the underused holders; None if they are the same."""
    holders = {part.name: part for part in target.ends if part.units != 0}
    if not holders:
        return Skipped("members", "it has no member that holds GPUs")
    if others := decisions.keys() - holders.keys():
        return Skipped("changed", f"{min(others)} does not belong to the target, or holds no GPU now")
    for name, part in sorted(holders.items()):
        decision = decisions.get(name)
        if decision is None or decision.stage != UNDERUSED:
            return Skipped("members", f"not all of its members are marked underused: {name} is not")
        if decision.incarnation and decision.incarnation != part.incarnation:
            return Skipped("replaced", f"the evidence is about an earlier {name}")
        if part.units is not None and part.units != decision.held:  # for replicas too: an end cannot be undone
            return Skipped(
                "members", f"exporters report {decision.held} GPUs for {name}, but its scheduler allocated {part.units}"
            )
    return None


def _care(target: Target, decisions: Mapping[HolderName, Decision]) -> Skipped | None:
    """Returns the reason why the class or an owner's wish forbids the action; None if neither does.

    The label of the target sets its class. Without this label, the class of its members counts. A label of a member can
    only make the class more careful.
    """
    around = [each.around for each in decisions.values() if each.around is not None]
    shown = [target.kind] if target.kind else [each.shown for each in around]
    said = [*(each.kind for each in around), *(part.kind for part in target.ends if part.kind)]
    kind = min([*shown, *said], key=CAREFUL.index, default=UNCLEAR)
    if kind not in CLASSES_OF[target.verb]:
        return Skipped("class", f"{target.verb} does not apply to its class, {kind}")
    if wish := target.wish or next((part.wish for part in target.ends if part.wish), ""):
        return Skipped("exempt", wish)
    return None


def _more(found: Collection[str]) -> str:
    return f", and {len(found) - 1} more" if len(found) > 1 else ""
