"""What a scheduler must offer to take GPUs back. Every call may raise MarkError.

An act has four steps, and the journal is between them: read the target; rehearse; act; look what the object says now.
People are told last, of what was seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from gpu_exporter.reconciler.actions.journal import Entry
from gpu_exporter.reconciler.decision.surroundings import Reference
from gpu_exporter.reconciler.target import Target

DONE, NOT_DONE, GONE, UNCLEAR = "done", "not_done", "gone", "unclear"


class Actor(Protocol):
    """One scheduler's way to act. What it did is written on the live object, with the act itself or before it."""

    scheduler: str

    def read(self, reference: Reference, namespace: str, verbs: Sequence[str], idle_s: float, wall: float) -> Target:
        """The live target with everything that an act would end; nothing is written. Raises Refused.

        `verbs`: of ACTIONS, what is allowed. `idle_s`: how long all of it has been idle, which may be less than an
        owner asked for.
        """

    def rehearse(self, target: Target) -> None:
        """Find out, without doing it, whether the act would have its effect, as far as that goes. Raises Refused."""

    def open_entry(self, target: Target, ident: str, wall: float) -> Entry:
        """What the journal is to say of an act that is about to begin."""

    def act(self, target: Target, entry: Entry) -> None:
        """Do it to the target as it was read, unless that has changed since. Raises Refused, MarkError.

        Whether anything was done after a MarkError, MarkError.says_undone tells.
        """

    def look(self, entry: Entry) -> str:
        """What the object says now of what was begun: DONE, NOT_DONE, GONE, or UNCLEAR where it says nothing."""

    def tell(self, entry: Entry, text: str) -> None:
        """Tell its owner, once however often this is called: an Event, and a note on what was not patched itself."""
