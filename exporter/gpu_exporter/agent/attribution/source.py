"""The interface of a source, e.g. the kubelet. A source reports grants. Each grant gives one device to one holder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from gpu_exporter.common.errors import ForeignError
from gpu_exporter.common.model.holders import Grant


class SourceError(ForeignError):
    """The source did not answer, or its answer cannot be trusted. The text contains the place, the reason and the
    remedy. `counted`: as in Answer, if a file of the scheduler shows it.
    """

    counted = 0


class SlowSource(SourceError):
    """The source did not answer in time."""


class CommandFailed(SourceError):
    """A command ended with an error status. `out`: its output until then, which may be a part of the answer."""

    def __init__(self, text: str, out: str) -> None:
        super().__init__(text)
        self.out = out


class Answer(NamedTuple):
    """One answer of a source.

    - `problem`: a message about data that cannot be parsed. Grants may be missing: a GPU without a grant may be held.
    - `notice`: a message for people that affects no grant.
    - `conflicts`: number of grants that were dropped because the source contradicts itself.
    - `hides_users`: the scheduler hides users from other users.
    - `offers`: every device that the scheduler may allocate, held or not, as grants without a holder; None if unknown.
    - `is_late`: holders have started, but their devices are not known yet. A GPU without a grant may be held.
    - `as_of`: time of the answer (monotonic seconds), None for the present poll.
    - `is_old`: the source failed, and this is an earlier answer.
    - `devices`: number of GPUs (with MIG, of instances) that the scheduler counts for this node; None if unknown.
    - `counted`: the same number without a second witness, 0 if unknown. It proves only that the node should have a GPU.
    - `closed`: the scheduler's state of this node if it has closed the node, e.g. "drained"; "" otherwise, and while it
      is unknown. `closed_reason`: an administrator's text about the state.
    - `ended`: grants of holders that have ended since the last answer, each once; `confirmed` is the time of the end.
    - `missed`: number of other holders that have ended, and whose devices or times are unknown.
    - `reported`: every holder whose end this source has reported, as texts for the state file.
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
    counted: int = 0
    closed: str = ""
    closed_reason: str = ""
    ended: Sequence[Grant] = ()
    missed: int = 0
    reported: Sequence[str] = ()


class Source(Protocol):
    """The interface of a source. `name`: its value of the label `source` in metrics."""

    name: str

    def poll(self) -> Answer:
        """Returns all present grants. Raises SourceError if the source has no answer that can be trusted."""
