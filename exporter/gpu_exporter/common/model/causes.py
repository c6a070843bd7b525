"""The causes of low use of a GPU, as far as the evidence shows them."""

from __future__ import annotations

from typing import NamedTuple

LOW, MEDIUM, HIGH = "low", "medium", "high"
ORDER = (HIGH, MEDIUM, LOW)
PUBLISHED_MAX = 2  # as series, each of at least medium confidence; people see all causes


class Cause(NamedTuple):
    """One cause. The texts are for people.

    `confidence`: low, medium or high. `evidence`: the numbers. `against`: the facts against this cause. `advice`: the
    change to make, None for the advice in meanings.py. `gain`: the gain that others measured after this change, with
    the source. `values`: at most three numbers for meanings.py, from `numbers`.
    """

    name: str
    confidence: str
    evidence: str
    against: str = ""
    advice: str | None = None
    gain: str = ""
    values: tuple[tuple[str, float], ...] = ()


def numbers(**known: float | None) -> tuple[tuple[str, float], ...]:
    """Returns the known numbers of a cause as pairs of name and value, in base units, with three digits; shares in
    whole per cent.
    """
    return tuple(
        (name, round(value, 2) if name.endswith("_ratio") else float(f"{value:.3g}"))
        for name, value in sorted(known.items())
        if value is not None
    )


class Causes(NamedTuple):
    """The causes that were found, in the order of the rules. `needs`: the missing data that other causes would need."""

    found: tuple[Cause, ...] = ()
    needs: tuple[str, ...] = ()

    @property
    def ranked(self) -> tuple[Cause, ...]:
        """The causes, the most certain first; with equal confidence, in the order of the rules."""
        return tuple(sorted(self.found, key=lambda cause: ORDER.index(cause.confidence)))

    @property
    def published(self) -> tuple[Cause, ...]:
        """The causes that become series in Prometheus."""
        return tuple(cause for cause in self.ranked if cause.confidence != LOW)[:PUBLISHED_MAX]
