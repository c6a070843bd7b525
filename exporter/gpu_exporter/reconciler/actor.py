"""The calls that each scheduler must offer to take GPUs back. Every call may raise MarkError.

An act has four steps: read the target, rehearse, act, check the live object. The journal is written between them. The
owner is told last, and only what the check found.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from gpu_exporter.reconciler.decision.surroundings import Reference
from gpu_exporter.reconciler.decision.target import Target, place

DONE, NOT_DONE, GONE, UNCLEAR = "done", "not_done", "gone", "unclear"


class Entry(NamedTuple):
    """One act.

    `wall`: when it began (Unix seconds). `target`: the object that it ends. `lever`: the object that it changes, which
    is the target or Kueue's Workload. `note`: the text that it writes on both. `since_wall`: since when the GPUs were
    idle (Unix seconds). `record`: policy, class and tenant, as in Account. `holders`: names of the holders that it
    ends, up to a limit. `waited_for`: GPUs that were waited for, by pool. `told`: the result, "" while it is unknown.
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
    holders: tuple[str, ...] = ()
    waited_for: tuple[tuple[str, float], ...] = ()
    told: str = ""

    @property
    def title(self) -> str:
        """The target with its namespace, for people."""
        return place(self.target, self.namespace)


class Actor(Protocol):
    """One scheduler's way to act. The actor writes a note on the live object, together with the act or before it."""

    scheduler: str

    def read(self, reference: Reference, namespace: str, verbs: Sequence[str], idle_s: float, wall: float) -> Target:
        """The live target with everything that an act would end. Writes nothing. Raises Refused.

        `verbs`: those of ACTIONS that are allowed. `idle_s`: how long the whole target has been idle (seconds). An
        owner may have asked for a longer time.
        """

    def rehearse(self, target: Target) -> None:
        """Check whether the act would have an effect, if the scheduler has a dry run. Do not act. Raises Refused."""

    def open_entry(self, target: Target, ident: str, wall: float) -> Entry:
        """The journal entry of an act that is about to begin."""

    def act(self, target: Target, entry: Entry) -> None:
        """Act on the target, unless it has changed since it was read. Raises Refused, MarkError.

        After a MarkError, `MarkError.says_undone` shows whether the act had no effect for certain.
        """

    def look(self, entry: Entry) -> str:
        """The result of an act by the live object: DONE, NOT_DONE, GONE, or UNCLEAR where the object shows neither."""

    def tell(self, entry: Entry, text: str) -> None:
        """Tell the owner: an Event, and a note on the target where the act patched another object.

        Further calls for the same entry change nothing.
        """
