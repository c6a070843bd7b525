"""The mark that a decision sets on a live object, and what every scheduler must offer to carry it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar

from gpu_exporter.plain import utc
from gpu_exporter.reconciler.decision.policy import LABEL, Decision
from gpu_exporter.reconciler.decision.surroundings import Surveyor
from gpu_exporter.reconciler.evidence.records import HolderName, title

log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")
PREFIX = LABEL.partition("/")[0] + "/"
EXEMPT_UNTIL = PREFIX + "exempt-until"  # an owner's wish to keep idle GPUs


class Mark(NamedTuple):
    """A mark of ours on a live pod or job.

    `incarnation`: the pod's UID, or the job's id, restart count and start. `ended`: the holder no longer runs. `live`:
    the object as its scheduler listed it, for this marker's `check`. `observed_wall`: until when evidence supported it,
    as the object says (Unix seconds); None when it does not say. `users_id`: as in HolderEvidence.
    """

    name: HolderName
    stage: str
    incarnation: str
    ended: bool = False
    live: Any = None
    observed_wall: float | None = None
    users_id: str = ""

    @property
    def title(self) -> str:
        """The holder as people know it."""
        return title(self.name, self.users_id)


class MarkError(Exception):
    """A mark could not be read or written. `result` is its label value in gpu_reconciler_writes_total.

    replaced: the object is another one by now, or gone. conflict: it changed meanwhile. throttled: the server asks for
    patience. error: anything else. All but `replaced` are tried again by the next cycle, none within this one.
    """

    def __init__(self, result: str, text: str, patience_s: float = 0.0, status: int = 0) -> None:
        """`patience_s`: for how long the server asks to be left alone. `status`: of its answer by HTTP, 0 for none."""
        super().__init__(text)
        self.result = result
        self.patience_s = patience_s
        self.status = status

    @property
    def says_undone(self) -> bool:
        """Whether the answer shows that the write had no effect. A lost answer, and one of 5xx, does not."""
        return self.result != "error" or 400 <= self.status < 500


class Refused(Exception):
    """The live object does not fit the evidence, or must not be marked. `reason` is one word, a label value."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class Marker(Surveyor, Protocol):
    """One scheduler's live objects. Every call but `survey` may raise MarkError."""

    scheduler: str
    rest_s: float
    """For so long its scheduler is to be left alone, from the beginning of the last list: it was slow. 0 when not."""
    foreign: int
    """Objects in the last list with a label that the reconciler did not set; it leaves them alone."""

    @property
    def odd(self) -> Mapping[tuple[str, str], int]:
        """How often an object was left out of a list, by its kind and a reason in one word."""

    def list_marks(self) -> Sequence[Mark]:
        """Every mark of ours, on whatever object it is."""

    def check(self, mark: Mark, decision: Decision, wall: float) -> None:
        """Compare the object that carries the mark, as it was listed, with the evidence. Raises Refused."""

    def check_alone(self, mark: Mark, decision: Decision | None, needed_s: float, wall: float) -> None:
        """Likewise without usable evidence: whether the object may carry a mark at all. Raises Refused.

        `decision`: the unknown one, if the holder has series at all. `needed_s`: how long it must have been able to
        work.
        """

    def inspect(self, decision: Decision, wall: float) -> None:
        """Read the live object and compare it, as `write` does, without writing. Raises Refused."""

    def label(self, decision: Decision) -> str:
        """The mark as `write` would set it, for people."""

    def write(self, decision: Decision, wall: float) -> str:
        """Read the live object, compare it likewise, set the mark; the field that carries it. Raises Refused."""

    def renew(self, mark: Mark, decision: Decision) -> None:
        """Write the evidence and its time to the object that carries the mark, which keeps its stage. Raises Refused.

        The object must be as it was listed: what its owner has written there since is not overwritten.
        """

    def withdraw(self, mark: Mark, reason: str, wall: float) -> None:
        """Remove the mark from this incarnation, and from no other."""


def sum_odd(markers: Iterable[Marker]) -> Counter[tuple[str, str]]:
    """How often objects were left out by all of them, as Marker.odd."""
    counts: Counter[tuple[str, str]] = Counter()
    for marker in markers:
        counts.update(marker.odd)
    return counts


def guard(function: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """Call; what one live object causes, unforeseen, becomes a MarkError, and costs no other its withdrawal."""
    try:
        return function(*arguments, **options)
    except (MarkError, Refused):
        raise
    except Exception as exc:
        log.exception("unforeseen")
        raise MarkError("error", f"unforeseen {type(exc).__name__}: {exc}") from exc


def timestamp(wall: float) -> str:
    """RFC 3339 in UTC, to the second."""
    return utc(wall).strftime("%Y-%m-%dT%H:%M:%SZ")
