"""The mark that a decision leaves on a live object, and what every scheduler must offer to carry it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any, NamedTuple, Protocol

from gpu_exporter.reconciler.evidence import HolderName
from gpu_exporter.reconciler.policy import LABEL, Decision

PREFIX = LABEL.partition("/")[0] + "/"


class Mark(NamedTuple):
    """A mark of ours that stands on a live pod or job.

    `incarnation`: the pod's UID, or the job's id, restart count and start. `ended`: the holder runs no more. `live`:
    the object as its scheduler listed it, for this marker's `check`.
    """

    name: HolderName
    stage: str
    incarnation: str
    ended: bool = False
    live: Any = None


class MarkError(Exception):
    """A mark could not be read or written. `result` is its label value in gpu_reconciler_writes_total.

    replaced: the object is another one by now, or gone. conflict: it changed meanwhile. throttled: the server asks for
    patience. error: anything else. All but `replaced` are tried again by the next cycle, none within this one.
    """

    def __init__(self, result: str, text: str) -> None:
        super().__init__(text)
        self.result = result


class Refused(Exception):
    """The live object does not fit the evidence, or must not be marked. `reason` is one word, a label value."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class Marker(Protocol):
    """One scheduler's live objects. Every call may raise MarkError."""

    scheduler: str

    def list_marks(self) -> Sequence[Mark]:
        """Every mark of ours, wherever it stands."""

    def check(self, mark: Mark, decision: Decision, wall: float) -> None:
        """Compare the object that carries the mark, as it was listed, with the evidence. Raises Refused."""

    def write(self, decision: Decision, wall: float) -> None:
        """Read the live object, compare it likewise, set or renew the mark. Raises Refused."""

    def withdraw(self, mark: Mark, reason: str, wall: float) -> None:
        """Remove the mark from this incarnation, and from no other."""


def timestamp(wall: float) -> str:
    """RFC 3339 in UTC, to the second."""
    return datetime.fromtimestamp(wall, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
