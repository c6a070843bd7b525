"""Why a holder does not use its GPU, as far as the evidence shows it."""

from __future__ import annotations

from typing import NamedTuple

LOW, MEDIUM, HIGH = "low", "medium", "high"
ORDER = (HIGH, MEDIUM, LOW)
OF_TRAINING = frozenset(  # causes whose advice is on loading samples, batches and checkpoints: a server has none
    ("too_few_workers", "cpu_bound_input", "pinned_loaders", "small_file_io", "small_batch", "checkpointing")
)
PUBLISHED_MAX = 2  # as series, each of at least medium confidence; people see all causes


class Cause(NamedTuple):
    """One cause. `confidence`: low, medium or high. All texts are for people: `evidence` has the numbers, `against`
    what speaks against the cause, `advice` what to change, `gain` what others gained by it, with the source.
    """

    name: str
    confidence: str
    evidence: str
    against: str = ""
    advice: str = ""
    gain: str = ""


class Causes(NamedTuple):
    """The causes that were found, in the order of the rules. `needs`: what would have to be known to find others."""

    found: tuple[Cause, ...] = ()
    needs: tuple[str, ...] = ()

    @property
    def ranked(self) -> tuple[Cause, ...]:
        """The causes, the most certain first; of equal ones, the one that is judged first."""
        return tuple(sorted(self.found, key=lambda cause: ORDER.index(cause.confidence)))

    @property
    def published(self) -> tuple[Cause, ...]:
        """Those that become series."""
        return tuple(cause for cause in self.ranked if cause.confidence != LOW)[:PUBLISHED_MAX]
