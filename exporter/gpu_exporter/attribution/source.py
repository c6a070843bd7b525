"""What a source of holders is: it yields grants, each of one device to one holder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from gpu_exporter.model.holders import Grant


class SourceError(Exception):
    """The source did not answer, or not believably. The text says where, why, and what to do."""


class SlowSource(SourceError):
    """The source did not answer in time."""


class CommandFailed(SourceError):
    """A command ended with an error status. `out`: what it printed before, which may be a part of its answer."""

    def __init__(self, text: str, out: str) -> None:
        super().__init__(text)
        self.out = out


class Answer(NamedTuple):
    """What a source said.

    `problem`: what was not understood, so that some grants may be missing; then a GPU without a grant is not known to
    be free. `notice`: what people should know although no grant is missing. `conflicts`: grants that were dropped since
    the source itself contradicts them. `hides_users`: the scheduler hides who runs what. `offers`: every device that
    the scheduler may give, held or not, as grants without a holder; None where that is not known. `is_late`: holders
    have begun whose devices are not known yet, so a GPU without a grant is not known to be free. `as_of`: when what the
    source says was true (monotonic seconds), None where that is this poll; `is_old`: it did not answer this time, and
    that is why. `devices`: how many GPUs, or instances in their place, the scheduler counts for this node; None where
    it does not say. `ended`: grants of holders that have ended since the last answer, each once, `confirmed` at their
    end; `missed`: how many more have, of which it is not known what they held.
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
    """One place that knows who holds devices. `name` is the label value of its series."""

    name: str

    def poll(self) -> Answer:
        """Every grant of this moment. Raises SourceError when there is no answer to believe."""
