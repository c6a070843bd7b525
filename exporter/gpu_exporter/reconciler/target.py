"""What an act would end, and why it may not be done: one value for both schedulers, read right before the act. Pure.

The invariant: what an act ends lies inside what was judged, and every member of it was seen idle, now. So a target
lists every member that the act would end, with GPUs or without, and whatever is not known of it holds the act.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from gpu_exporter.config.values import ACTIONS
from gpu_exporter.reconciler.decision.policy import UNDERUSED, Decision
from gpu_exporter.reconciler.decision.surroundings import BATCH, INTERACTIVE, SERVING, UNCLEAR, Reference
from gpu_exporter.reconciler.evidence.records import HolderName

SUSPEND, DEACTIVATE, STOP, REQUEUE, CANCEL = ACTIONS
# To which classes each may be done.
CLASSES_OF: Mapping[str, tuple[str, ...]] = {
    SUSPEND: (BATCH,),
    DEACTIVATE: (BATCH,),
    STOP: (INTERACTIVE,),
    REQUEUE: (BATCH,),
    CANCEL: (BATCH, INTERACTIVE),
}
CAREFUL = (SERVING, UNCLEAR, INTERACTIVE, BATCH)  # classes, the one first that asks for most care


class Held(NamedTuple):
    """Nothing is done. `reason`: one word, a label value; `why`: in words, with the remedy."""

    reason: str
    why: str


class Part(NamedTuple):
    """One pod or component of a job that the act would end, alive now.

    `incarnation`: the pod's UID, or the job's id, restart count and start. `units`: GPUs and MIG instances that its
    scheduler gave it, 0 for none; None where that cannot be counted. `role`: what it is to the target, as `wants` names
    it. `waits`: why it cannot work now. `kind`: the class that its own label says, "" for none. `wish`: why it is to be
    left alone. `start_wall`: since when it exists (Unix seconds), 0 for longer than anything that is asked of it.
    """

    name: HolderName
    incarnation: str
    units: int | None
    role: str = ""
    waits: str = ""
    kind: str = ""
    wish: str = ""
    start_wall: float = 0.0


class Target(NamedTuple):
    """A live object or job that an act would be done to.

    `verb`: of ACTIONS, what would be done. `ends`: every member that this ends. `wants`: how many members of each role
    it keeps running, None where that cannot be counted. `strangers`: what may end with it, or belongs to it, and is
    none of its members. `unread`: what may be a member and could not be read. `above`: what controls or schedules it,
    or depends on it. `wish`: why it is to be left alone itself. `kind`: the class that its label says, "" for none.
    `note`: what is written on it about an earlier act, "" for nothing. `obstacle`: why it cannot be acted on now.
    `undo`: the command that takes it up again. `live`: as its actor read it.
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
    obstacle: Held | None = None
    undo: str = ""
    live: Any = None

    @property
    def title(self) -> str:
        """As people know it, with its namespace."""
        return place(self.reference, self.namespace)

    @property
    def beside(self) -> tuple[Part, ...]:
        """Its members without GPUs, of which metrics of GPUs say nothing."""
        return tuple(part for part in self.ends if part.units == 0)


def place(reference: Reference, namespace: str) -> str:
    """`batch/v1/Job/train in ml`; a job needs no place."""
    return f"{reference.title} in {namespace}" if namespace else reference.title


def why_not(
    target: Target, decisions: Mapping[HolderName, Decision], verbs: Collection[str], notes: Collection[str]
) -> Held | None:
    """Why nothing may be done to a target; None where all that it would end is underused, or has no GPU.

    `decisions`: on holders that are underused, and marked so. `verbs`: of ACTIONS, what the site allows. `notes`: what
    our own journal says was written on objects.
    """
    if target.obstacle is not None:
        return target.obstacle
    if target.note:
        if target.note in notes:
            return Held("acted", f"it was acted on before ({target.note})")
        return Held("noted", f"it says that it was acted on ({target.note}), and the journal does not: an opt-out")
    if target.above:
        return Held("above", f"{target.above}")
    if target.verb not in verbs:
        return Held("kind", f"actions.kinds does not allow to {target.verb} it")
    return _membership(target) or _idleness(target, decisions) or _care(target, decisions)


def _membership(target: Target) -> Held | None:
    """Whether it is known what would end, and all of that is there."""
    if target.unread:
        return Held("unread", f"what may belong to it cannot be read: {target.unread[0]}{_more(target.unread)}")
    if target.strangers:
        return Held("stranger", f"{target.strangers[0]}{_more(target.strangers)}")
    if target.wants is None:
        return Held("uncounted", "how many members it wants cannot be counted")
    there = Counter(part.role for part in target.ends)
    for role, wanted in sorted(target.wants.items()):
        if there[role] < wanted:
            which = f" of {role}" if role else ""
            return Held("waiting", f"it waits for {wanted - there[role]} of {wanted} members{which}")
    if waiting := next((part for part in target.ends if part.waits), None):
        return Held("waiting", f"{waiting.name} {waiting.waits}")
    return None


def _idleness(target: Target, decisions: Mapping[HolderName, Decision]) -> Held | None:
    """Whether the members that hold GPUs now are exactly the holders that were decided on."""
    holders = {part.name: part for part in target.ends if part.units != 0}
    if not holders:
        return Held("members", "it has no member that holds GPUs")
    if others := decisions.keys() - holders.keys():
        return Held("changed", f"{min(others)} does not belong to it, or holds no GPU now")
    for name, part in sorted(holders.items()):
        decision = decisions.get(name)
        if decision is None or decision.stage != UNDERUSED:
            return Held("members", f"not all that it holds is marked underused: {name} is not")
        if decision.incarnation and decision.incarnation != part.incarnation:
            return Held("replaced", f"{name} is another one than the evidence is of")
        if part.units is not None and part.units != decision.held:  # also of replicas: what ends is not taken back
            return Held("members", f"{name} was given {part.units} GPUs, {decision.held} are seen")
    return None


def _care(target: Target, decisions: Mapping[HolderName, Decision]) -> Held | None:
    """Whether its class allows it, and no owner asked to keep it.

    What its members show counts, unless its own label says otherwise. Labels of members may only ask for more care.
    """
    around = [each.around for each in decisions.values() if each.around is not None]
    shown = [target.kind] if target.kind else [each.shown for each in around]
    said = [*(each.kind for each in around), *(part.kind for part in target.ends if part.kind)]
    kind = min([*shown, *said], key=CAREFUL.index, default=UNCLEAR)
    if kind not in CLASSES_OF[target.verb]:
        return Held("class", f"its class is {kind}")
    if wish := target.wish or next((part.wish for part in target.ends if part.wish), ""):
        return Held("exempt", wish)
    return None


def _more(found: Collection[str]) -> str:
    return f", and {len(found) - 1} more" if len(found) > 1 else ""
