"""Why a holder does not use its GPU, as far as the evidence shows it."""

from __future__ import annotations

from typing import NamedTuple

LOW, MEDIUM, HIGH = "low", "medium", "high"
ORDER = (HIGH, MEDIUM, LOW)
PUBLISHED_MAX = 2  # as series, each of at least medium confidence; people see all causes


class Cause(NamedTuple):
    """One cause. `confidence`: low, medium or high. All texts are for people: `evidence` has the numbers, `against`
    what speaks against the cause, `advice` what to change, `gain` what others gained by it, with the source. `values`:
    the numbers of meanings.py, at most three, as `numbers` makes them.
    """

    name: str
    confidence: str
    evidence: str
    against: str = ""
    advice: str = ""
    gain: str = ""
    values: tuple[tuple[str, float], ...] = ()


def numbers(**known: float | None) -> tuple[tuple[str, float], ...]:
    """The known numbers of a cause by quantity, in base units, with three digits; a share in whole per cent."""
    return tuple(
        (name, round(value, 2) if name.endswith("_ratio") else float(f"{value:.3g}"))
        for name, value in sorted(known.items())
        if value is not None
    )


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
