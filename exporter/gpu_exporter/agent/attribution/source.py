"""The interface of a source of holders: it reports grants, each of one device to one holder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from gpu_exporter.common.errors import ForeignError
from gpu_exporter.common.model.holders import Grant


class SourceError(ForeignError):
    """The source did not answer, or its answer cannot be trusted. The text contains the place, the reason and the
    remedy.
    """


class SlowSource(SourceError):
    """The source did not answer in time."""


class CommandFailed(SourceError):
    """A command ended with an error status. `out`: its output before that, which may be a part of the answer."""

    def __init__(self, text: str, out: str) -> None:
        super().__init__(text)
        self.out = out


class Answer(NamedTuple):
    """One answer of a source.

    `problem`: what could not be parsed, so that some grants may be missing; then a GPU without a grant is not known to
    be free. `notice`: what people should know although no grant is missing. `conflicts`: grants that were dropped
    because the source itself contradicts them. `hides_users`: the scheduler hides users from other users. `offers`:
    every device that the scheduler may give, held or not, as grants without a holder; None if unknown. `is_late`:
    holders have started whose devices are not known yet, so a GPU without a grant is not known to be free. `as_of`:
    when the answer was true (monotonic seconds), None for this poll. `is_old`: the source did not answer this time, so
    the answer is an earlier one. `devices`: how many GPUs, or instances in their place, the scheduler counts for this
    node; None if unknown. `ended`: grants of holders that have ended since the last answer, each once, `confirmed` at
    their end. `missed`: how many more holders have ended whose devices are unknown.
    """

    grants: Sequence[Grant]
    problem: str = ""
    notice: str = ""
    conflicts: int = 0
    hides_users: bool = False
    offers: Sequence[Grant] | None = None
    is_late: bool = False
    as_of: float | None = None
    is_old: bool = False
    devices: int | None = None
    ended: Sequence[Grant] = ()
    missed: int = 0


class Source(Protocol):
    """A place that reports holders of devices. `name` is the label value of its series."""

    name: str

    def poll(self) -> Answer:
        """Every grant of this moment. Raises SourceError if there is no answer that can be trusted."""
