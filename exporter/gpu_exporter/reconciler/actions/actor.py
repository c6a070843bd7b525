"""What a scheduler must offer to take GPUs back. Every call may raise MarkError."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from gpu_exporter.reconciler.actions.propose import Proposal

DONE, UNCONFIRMED = "done", "unconfirmed"


class Found(NamedTuple):
    """A live target that may be acted on. `kind`: which of the proposal's is to be done; `live`: as the actor read
    it; `undo`: how somebody takes it up again, a command.
    """

    kind: str
    live: Any
    undo: str


class Actor(Protocol):
    """One scheduler's way to act. What it did is written on the live object, with the act itself or before it.

    That is the memory: an object that says so is never acted on again, whatever happened to the process that did it.
    """

    scheduler: str

    def find(self, proposal: Proposal, kinds: Sequence[str], wall: float) -> Found:
        """Read what would be acted on; nothing is written. Raises Refused."""

    def act(self, proposal: Proposal, found: Found, wall: float) -> str:
        """Do it to what was found, unless that has changed since; then look whether it holds. DONE or UNCONFIRMED.

        Raises Refused.
        """
