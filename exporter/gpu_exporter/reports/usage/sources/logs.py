"""Reads the use of GPUs from log files and recordings.

A file names no holder. The user has chosen the file, so all of its time counts as held by an unknown holder. A server
is different: it shows all GPUs of a site, and GPUs at zero may be free.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import NamedTuple

from gpu_exporter.reports.usage.cells import NOT_KNOWN, WINDOW_S, Cell, Unit
from gpu_exporter.reports.usage.model import IDLE, UNPROVEN
from gpu_exporter.reports.usage.sources.gauges import LOW
from gpu_exporter.reports.usage.sources.zeros import BLOCK_S

GAP = 3.0  # intervals: a longer time between two rows is a gap


class Stretch(NamedTuple):
    """The time from `start` to `end` (Unix seconds). `ratio`: its utilization, 0 to 1, None if unknown. `zero`: IDLE or
    UNPROVEN (model.py) if the time counts as this part, otherwise "".
    """

    start: float
    end: float
    ratio: float | None
    zero: str = ""


def of_gauge(times: Sequence[float], ratios: Sequence[float | None]) -> Iterator[Stretch]:
    """Yields the stretches of a GPU from readings of its utilization. `times`: Unix seconds, ascending. `ratios`: 0 to
    1.

    A reading covers the time since the previous reading, except after a gap. As in gauges.py, zeros alone prove
    nothing. Only a run of zeros of at least BLOCK_S and two intervals counts, so that short pauses between steps do not
    count.
    """
    steps = [after - before for before, after in pairwise(times)]
    if not steps:
        return
    # Not the mean of two: where rows of two GPUs alternate, the result is one of their intervals.
    interval = statistics.median_low(steps)
    read = [
        Stretch(before, after, ratio)
        for (before, after), ratio in zip(pairwise(times), ratios[1:], strict=True)
        if after - before <= GAP * interval
    ]
    for is_zero, run in groupby(read, key=lambda each: each.ratio == 0.0):
        stretches = list(run)
        if is_zero and sum(each.end - each.start for each in stretches) >= max(BLOCK_S, 2.0 * interval):
            stretches = [each._replace(zero=UNPROVEN) for each in stretches]
        yield from stretches


def with_unknown(stretches: Iterable[Stretch], start: float, end: float) -> Iterator[Stretch]:
    """Yields the stretches between `start` and `end` in order of time. Fills the time between them with unknown
    stretches.
    """
    at = start
    for each in sorted(stretches, key=lambda each: each[:2]):
        begin, until = max(each.start, at), min(each.end, end)
        if until <= begin:
            continue
        if begin > at:
            yield Stretch(at, begin, None)
        yield each._replace(start=begin, end=until)
        at = until
    if at < end:
        yield Stretch(at, end, None)


@dataclass(slots=True)
class _Hour:
    samples: int = 0
    idle: float = 0.0
    unproven: float = 0.0
    unknown: float = 0.0
    active: float = 0.0
    busy: float = 0.0

    def add(self, stretch: Stretch, seconds: float) -> None:
        if stretch.ratio is None:
            self.unknown += seconds
            return
        self.samples += 1
        self.busy += stretch.ratio * seconds
        if stretch.zero == IDLE:
            self.idle += seconds
        elif stretch.zero == UNPROVEN:
            self.unproven += seconds
        else:
            self.active += seconds

    def cell(self, unit: Unit, start: float) -> Cell:
        known = self.idle + self.unproven + self.active
        is_low = self.busy < LOW * self.active
        return Cell(
            unit,
            NOT_KNOWN,
            start,
            known + self.unknown,
            self.samples,
            used=0.0 if is_low else self.active,
            low=self.active if is_low else 0.0,
            idle=self.idle,
            unproven=self.unproven,
            unknown=self.unknown,
            busy=self.busy,
            known=known,
        )


class LogTime:
    """Adds up the time of all GPUs of all files. If two files contain the same time of a GPU, only the first one
    counts.
    """

    def __init__(self) -> None:
        self.twice_s = 0.0
        """GPU-seconds that an earlier file contains too, and that do not count again"""
        self._hours: defaultdict[Unit, defaultdict[float, _Hour]] = defaultdict(lambda: defaultdict(_Hour))
        self._covered: defaultdict[Unit, list[tuple[float, float]]] = defaultdict(list)  # in the order of time

    def add(self, unit: Unit, stretches: Iterable[Stretch]) -> None:
        """Adds the stretches of one unit in one file, in order of time."""
        before = self._covered[unit]
        fresh: list[tuple[float, float]] = []
        for each in stretches:
            for start, end in _outside(before, each.start, each.end):
                self._count(unit, each._replace(start=start, end=end))
                if fresh and fresh[-1][1] == start:
                    fresh[-1] = fresh[-1][0], end
                else:
                    fresh.append((start, end))
                self.twice_s -= end - start
            self.twice_s += each.end - each.start
        self._covered[unit] = sorted([*before, *fresh])

    def _count(self, unit: Unit, stretch: Stretch) -> None:
        start = stretch.start
        while start < stretch.end:
            hour = start // WINDOW_S * WINDOW_S
            end = min(stretch.end, hour + WINDOW_S)
            self._hours[unit][hour].add(stretch, end - start)
            start = end

    @property
    def units(self) -> int:
        """The number of units that have any time."""
        return len(self._hours)

    @property
    def hours(self) -> tuple[float, float]:
        """The start of the first hour and the end of the last hour (Unix seconds). Needs a unit that has any time."""
        found = [hour for each in self._hours.values() for hour in (min(each), max(each))]
        return min(found), max(found) + WINDOW_S

    @property
    def first_and_last(self) -> tuple[float, float]:
        """The first and the last moment of any unit, in whole Unix seconds. Needs a unit that has any time."""
        times = [each for each in self._covered.values() if each]
        return round(min(each[0][0] for each in times)), round(max(each[-1][1] for each in times))

    @property
    def gap_s(self) -> float:
        """GPU-seconds between the first and the last reading of a unit that are in no file."""
        return sum(
            each[-1][1] - each[0][0] - sum(end - start for start, end in each)
            for each in self._covered.values()
            if each
        )

    def cells(self) -> Iterator[Cell]:
        for unit, hours in sorted(self._hours.items()):
            for start, hour in sorted(hours.items()):
                yield hour.cell(unit, start)


def _outside(covered: Sequence[tuple[float, float]], start: float, end: float) -> Iterator[tuple[float, float]]:
    """Yields the parts of a time that are not in `covered`, whose times are sorted and do not overlap."""
    for at in range(max(0, bisect_right(covered, (start, math.inf)) - 1), len(covered)):
        begin, until = covered[at]
        if begin >= end:
            break
        if start < begin:
            yield start, begin
        start = max(start, until)
    if start < end:
        yield start, end
