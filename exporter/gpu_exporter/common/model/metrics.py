"""Metrics: families, their ranges, and samples."""

from __future__ import annotations

from typing import NamedTuple


class Range(NamedTuple):
    """The values that a quantity can have, both ends included, in its base unit."""

    low: float
    high: float

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high


class Family(NamedTuple):
    """One metric family as data, for the renderers and the generated reference page.

    `labels`: the labels in addition to those that the kind of family implies (`gpu` and `uuid` on device families).
    `generations`: the products that have the family; empty means every supported product. `plausible`: the valid range
    of a value from the driver; other values are discarded as sentinels or faults. `unbounded`: why a collector's family
    has no such range.
    """

    name: str
    help: str
    labels: tuple[str, ...] = ()
    source: str = ""
    generations: str = ""
    plausible: Range | None = None
    unbounded: str = ""

    @property
    def type(self) -> str:
        """The type by the name: only counters end in _total (prometheus.io/docs/practices/naming)."""
        return "counter" if self.name.endswith("_total") else "gauge"


class Sample(NamedTuple):
    """One value of a family; `labels` are the values of `family.labels`, in that order."""

    family: Family
    labels: tuple[str, ...]
    value: float
