"""The interface through which the reconciler takes GPUs back. Every call may raise MarkError.

An action has five steps: read the target, rehearse, act, check the live object, and watch until everything that it ends
is gone. The journal is written between these steps. Only an action that the check confirmed is told to its owner.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from gpu_exporter.reconciler.decision.surroundings import Reference
from gpu_exporter.reconciler.decision.target import Target, place

DONE, NOT_DONE, GONE, UNCLEAR = "done", "not_done", "gone", "unclear"
ENDING = "ending"  # result of an action that the live object shows, while something that it ends still exists


class Ended(NamedTuple):
    """A pod or a component of a job that an action ends.

    `name`: the pod's name, or the job's id. `incarnation`: the pod's UID, or the job's id, restart count and start.
    `nodes`: the nodes whose exporters showed it as a holder.
    """

    name: str
    incarnation: str
    nodes: tuple[str, ...] = ()


class Entry(NamedTuple):
    """One action.

    `wall`: when it began (Unix seconds).
    `target`: the object that the action ends.
    `lever`: the object that the action changes: the target, or Kueue's Workload.
    `note`: the text that the action writes on both.
    `since_wall`: the time since which the GPUs were idle (Unix seconds).
    `record`: the policy, class and tenant that the decision counts for.
    `ends`: everything that the action ends; empty after the result is known.
    `waited_for`: by pool, the GPUs that others waited for; only pools whose demand the action still reduces. `told`: ""
    while the effect is unknown; ENDING while some of `ends` still exist; then the result.
    `until_wall`: when an open action becomes unconfirmed (Unix seconds).
    """

    ident: str
    wall: float
    scheduler: str
    namespace: str
    verb: str
    target: Reference
    lever: Reference
    note: str
    gpus: int = 0
    since_wall: float = 0.0
    undo: str = ""
    record: tuple[str, str, str] = ("", "", "")
    ends: tuple[Ended, ...] = ()
    waited_for: tuple[tuple[str, float], ...] = ()
    told: str = ""
    until_wall: float = 0.0

    @property
    def title(self) -> str:
        """The target with its namespace, for people."""
        return place(self.target, self.namespace)

    @property
    def is_open(self) -> bool:
        """Whether its result is still unknown."""
        return self.told in ("", ENDING)


class Actor(Protocol):
    """The actions of one scheduler. An actor writes a note on the live object before the action or together with it."""

    scheduler: str

    def read(self, reference: Reference, namespace: str, verbs: Sequence[str], idle_s: float, wall: float) -> Target:
        """Reads the live target, with everything that an action would end. Writes nothing. Raises Refused.

        `verbs`: the actions that the site allows. `idle_s`: how long the whole target has been idle (seconds); an owner
        may have asked for a longer time.
        """

    def rehearse(self, target: Target) -> None:
        """Checks by the scheduler's dry run, if there is one, whether the action would work. Raises Refused."""

    def open_entry(self, target: Target, ident: str, wall: float) -> Entry:
        """Returns the journal entry of an action that is about to begin."""

    def act(self, target: Target, entry: Entry) -> None:
        """Acts on the target, unless it has changed since it was read. Raises Refused, MarkError.

        After a MarkError, `MarkError.says_undone` is true if the action certainly had no effect.
        """

    def look(self, entry: Entry) -> str:
        """Reads the result of an action from the live object: DONE, NOT_DONE, GONE, or UNCLEAR if the object shows none
        of these.
        """

    def read_left(self, entry: Entry) -> str:
        """Describes the first of `entry.ends` that its scheduler still shows; "" if all are gone."""

    def tell(self, entry: Entry, text: str) -> None:
        """Notifies the owner by an Event. If the action patched another object, also writes a note on the target.

        Further calls for the same entry change nothing.
        """
