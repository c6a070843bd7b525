"""The calls that each scheduler must offer to take GPUs back. Every call may raise MarkError.

An act has four steps: read the target, rehearse, act, check the live object. The journal is written between them. The
owner is told last, and only what the check found.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from gpu_exporter.reconciler.actions.journal import Entry
from gpu_exporter.reconciler.decision.surroundings import Reference
from gpu_exporter.reconciler.decision.target import Target

DONE, NOT_DONE, GONE, UNCLEAR = "done", "not_done", "gone", "unclear"


class Actor(Protocol):
    """One scheduler's way to act. The actor writes a note on the live object, together with the act or before it."""

    scheduler: str

    def read(self, reference: Reference, namespace: str, verbs: Sequence[str], idle_s: float, wall: float) -> Target:
        """The live target with everything that an act would end. Writes nothing. Raises Refused.

        `verbs`: those of ACTIONS that are allowed. `idle_s`: how long the whole target has been idle (seconds). An
        owner may have asked for a longer time.
        """

    def rehearse(self, target: Target) -> None:
        """Check without acting whether the act would have an effect, where the scheduler allows it. Raises Refused."""

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
