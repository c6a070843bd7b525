"""Metrics: families, their ranges, and samples."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

MetricType: TypeAlias = Literal["counter", "gauge"]


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
    of a value from the driver; a value outside is a sentinel or a fault and is discarded. `unbounded`: why a family of
    a collector has no such range.
    """

    name: str
    type: MetricType
    help: str
    labels: tuple[str, ...] = ()
    source: str = ""
    generations: str = ""
    plausible: Range | None = None
    unbounded: str = ""


class Sample(NamedTuple):
    """One value of a family; `labels` are the values of `family.labels`, in that order."""

    family: Family
    labels: tuple[str, ...]
    value: float
