"""Marks on live objects, and the calls with which every scheduler sets and removes them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar

from gpu_exporter.common.errors import AnswerError, ForeignError
from gpu_exporter.common.plain import describe_bug, utc
from gpu_exporter.reconciler.decision.policy import LABEL, Decision
from gpu_exporter.reconciler.decision.surroundings import Surveyor
from gpu_exporter.reconciler.evidence.records import HolderName, title

log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")
PREFIX = LABEL.partition("/")[0] + "/"
EXEMPT_UNTIL = PREFIX + "exempt-until"  # an owner's wish to keep idle GPUs


class Mark(NamedTuple):
    """A mark of the reconciler on a live pod or job.

    `incarnation`: the pod's UID, or the job's id, restart count and start.
    `ended`: the holder no longer runs.
    `live`: the object as its scheduler listed it. Only the marker that listed the object uses this.
    `observed_wall`: the last time at which evidence supported the mark, as written on the object (Unix seconds); None
    if missing.
    `users_id`: for array tasks and components of heterogeneous jobs, the id that users write; "" for all others.
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
        """The holder's name for people."""
        return title(self.name, self.users_id)


class MarkError(ForeignError):
    """A mark could not be read or written. `result`: its label value in gpu_reconciler_writes_total.

    replaced: the object is gone, or another object has its name.
    conflict: the object has changed in the meantime.
    throttled: the server asks for fewer requests.
    error: anything else.
    This cycle retries nothing. The next cycle retries all but `replaced`.
    """

    def __init__(self, result: str, text: str, patience_s: float = 0.0, status: int = 0) -> None:
        """`patience_s`: seconds in which the server must get no request. `status`: HTTP status, 0 without an answer."""
        super().__init__(text)
        self.result = result
        self.patience_s = patience_s
        self.status = status

    @property
    def says_undone(self) -> bool:
        """Whether the write certainly had no effect; false after a lost answer or a 5xx status."""
        return self.result != "error" or 400 <= self.status < 500


class Refused(ForeignError):
    """The live object contradicts the evidence, or must not be marked. `reason`: one word, a label value."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class Marker(Surveyor, Protocol):
    """The marks on live objects of one scheduler. Every call except `survey` may raise MarkError."""

    scheduler: str
    rest_s: float
    """Seconds after the start of the last list in which a slow scheduler must get no requests; 0 if it is not slow."""
    foreign: int
    """Objects in the last list whose mark label the reconciler did not set. The reconciler ignores them."""

    @property
    def odd(self) -> Mapping[tuple[str, str], int]:
        """The number of objects that each kind of list omitted, by kind and reason in one word."""

    def list_marks(self) -> Sequence[Mark]:
        """Lists every mark of the reconciler on any object."""

    def check(self, mark: Mark, decision: Decision, wall: float) -> None:
        """Compares the evidence with the marked object as it was listed. Raises Refused."""

    def check_alone(self, mark: Mark, decision: Decision | None, needed_s: float, wall: float) -> None:
        """Checks, without usable evidence, whether the listed object may carry a mark at all. Raises Refused.

        `decision`: the decision with stage `unknown`; None if the holder has no series. `needed_s`: how long the holder
        must have been able to work (seconds).
        """

    def inspect(self, decision: Decision, wall: float) -> None:
        """Reads the live object and compares it as `write` does, but writes nothing. Raises Refused."""

    def label(self, decision: Decision) -> str:
        """Returns the mark that `write` would set, for people."""

    def write(self, decision: Decision, wall: float) -> str:
        """Reads the live object, compares it as `check` does, and sets the mark. Returns the field. Raises Refused."""

    def renew(self, mark: Mark, decision: Decision) -> None:
        """Writes the new evidence and its time on the marked object. The mark keeps its stage. Raises Refused.

        Nothing is written if the object has changed since it was listed, so no change by its owner is overwritten.
        """

    def withdraw(self, mark: Mark, reason: str, wall: float) -> None:
        """Removes the mark, only from this incarnation of the object."""


def sum_odd(markers: Iterable[Marker]) -> Counter[tuple[str, str]]:
    """Returns the sum of Marker.odd over all markers."""
    counts: Counter[tuple[str, str]] = Counter()
    for marker in markers:
        counts.update(marker.odd)
    return counts


def guard(function: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """Calls a function. An unexpected exception becomes a MarkError, so that one object does not affect others."""
    try:
        return function(*arguments, **options)
    except (MarkError, Refused, AnswerError):
        raise
    except Exception as exc:
        log.exception("internal error in a step for one object; other objects are not affected")
        raise MarkError("error", describe_bug(exc)) from exc


def timestamp(wall: float) -> str:
    """Returns Unix seconds as RFC 3339 text in UTC, without fractions of a second."""
    return utc(wall).strftime("%Y-%m-%dT%H:%M:%SZ")
