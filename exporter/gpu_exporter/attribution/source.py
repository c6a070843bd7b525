"""What a source of claims is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from gpu_exporter.model import Claim


class SourceError(Exception):
    """The source did not answer, or not believably. The text says where, why, and what to do."""


class Source(Protocol):
    """One place that knows who holds devices. `name` is the label value of its series."""

    name: str

    def poll(self) -> Sequence[Claim]:
        """Every claim of this moment. Raises SourceError when there is no answer to believe."""
