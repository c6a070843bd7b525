"""What a source of claims is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from gpu_exporter.model import Claim


class SourceError(Exception):
    """The source did not answer, or not believably. The text says where, why, and what to do."""


class Answer(NamedTuple):
    """What a source said. `problem`: what it said that was not understood, so that some claims may be missing; then a
    GPU without a claim is not known to be free. `hides_users`: the site hides who runs what (Slurm's PrivateData).
    """

    claims: Sequence[Claim]
    problem: str = ""
    hides_users: bool = False


class Source(Protocol):
    """One place that knows who holds devices. `name` is the label value of its series."""

    name: str

    def poll(self) -> Answer:
        """Every claim of this moment. Raises SourceError when there is no answer to believe."""
