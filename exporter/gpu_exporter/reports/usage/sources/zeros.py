"""How much of a window a unit was at zero. The first pass decides most windows, the second counts blocks of time."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping
from enum import Enum
from typing import NamedTuple, TypeAlias

from gpu_exporter.reports.history.asking import Labels, WindowSpan
from gpu_exporter.reports.usage.model import FLOORS

Values: TypeAlias = Mapping[float, float]  # by the start of a window
Table: TypeAlias = dict[Labels, Values]
Windows: TypeAlias = Mapping[Labels, Collection[float]]  # starts of windows, by series
# In windows with some activity, only whole blocks of time without any count as idle. So pauses between the steps of a
# loop or between two requests are not idle. A block has two samples or more, and a window a whole number of blocks.
BLOCKS_S = (120.0, 180.0, 240.0, 300.0, 360.0, 450.0, 600.0, 720.0, 900.0, 1200.0, 1800.0, 3600.0)
BLOCK_S = BLOCKS_S[0]
MOST_OF_BLOCK = 0.75  # of its samples


class FirstPass(NamedTuple):
    """The samples of one metric in each window, by series.

    - `least`, `most`, `mean`: smallest, largest and mean value, 0 to 1.
    - `engine`: the largest engine activity. `engine_counts`: number of its samples.
    - `is_engine`: the metric itself is the engine activity, as for MIG instances, which have no utilization.
    - `intervals`: scrape intervals in seconds, by target. `video`: windows in which a video engine worked.
    """

    metric: str
    is_engine: bool
    counts: Table
    least: Table
    most: Table
    mean: Table
    engine: Table
    engine_counts: Table
    intervals: Mapping[tuple[str, ...], Values]
    video: Windows


class Kind(Enum):
    """The zeros of a window. NEVER: no sample is zero. ALWAYS: all samples are zero. SOME: some are, or all are while
    the engine activity was above the floor at times.
    """

    NEVER = "never"
    ALWAYS = "always"
    SOME = "some"


class Zeros(NamedTuple):
    """Shares of the window, 0 to 1. `at_floors`: time at zero with engine activity at or below each of FLOORS; empty if
    this activity is unknown. `bare`: time at utilization 0.
    """

    at_floors: tuple[float, ...]
    bare: float


NO_ZEROS = Zeros((0.0,) * len(FLOORS), 0.0)


def classify(base: FirstPass, floor: float, labels: Labels, start: float) -> Kind | None:
    """Returns the kind of this window. None if its smallest and largest samples are unknown. A sample below 0 is
    invalid.
    """
    least, most = base.least.get(labels, {}).get(start), base.most.get(labels, {}).get(start)
    if least is None or most is None or least < 0.0:
        return None
    if base.is_engine:
        return Kind.ALWAYS if most <= floor else Kind.NEVER if least > FLOORS[-1] else Kind.SOME
    if least > 0.0:
        return Kind.NEVER
    is_noisy = base.engine.get(labels, {}).get(start, 0.0) > floor
    return Kind.SOME if most > 0.0 or is_noisy else Kind.ALWAYS


def judge(
    base: FirstPass, kind: Kind, labels: Labels, start: float, counted: Mapping[Labels, Mapping[float, Zeros]]
) -> Zeros | None:
    """Returns the zeros of a window, None if they are unknown. `kind`: from `classify`. `counted`: results of the
    second pass.
    """
    if kind is Kind.NEVER:
        return NO_ZEROS
    if kind is Kind.SOME:
        return counted.get(labels, {}).get(start)
    most = base.most[labels][start] if base.is_engine else base.engine.get(labels, {}).get(start)
    # Below the floor. The second pass counts nothing for lower floors.
    return Zeros(() if most is None else tuple(float(most <= each) for each in FLOORS), 1.0)


def choose_block(units: int, span_s: float, longest: float, blocks_max: int) -> float:
    """Returns the length of a block in seconds: at least two of the longest scrape intervals, and longer for many
    units.
    """
    least = max(2.0 * longest, units * span_s / blocks_max)
    return next((each for each in BLOCKS_S if each >= least), BLOCKS_S[-1])


def count_zeros(
    most: Values,
    engine: Values | None,
    samples: Values,
    intervals: Values,
    span: WindowSpan,
    block: float,
    floor: float,
) -> dict[float, Zeros]:
    """Counts the zeros in each window of one series.

    - `most`, `engine`: the largest utilization and the largest engine activity of each block, by its start. `engine` is
      None without engine activity, and the same object as `most` if the metric is the engine activity.
    - `samples`: number of engine samples in each window. `intervals`: seconds between two samples.
    - `block`: length of a block in seconds. `floor`: one of FLOORS. Up to this floor, only blocks with most of their
      samples count, because a holder that starts or ends in a block was there for only a part of it.
    """
    windows: defaultdict[float, list[float]] = defaultdict(list)
    for at in most:
        windows[span.start + (at - span.start) // span.window * span.window].append(at)
    found = {}
    for start, blocks in windows.items():
        if start not in intervals:
            continue
        at_floors: tuple[float, ...] = ()
        bare = blocks if most is engine else [at for at in blocks if most[at] == 0.0]
        if engine is not None:
            values = {at: value for at in bare if (value := engine.get(at)) is not None}
            in_full = block / intervals[start]
            edges = {at for at in blocks if _is_edge(at, most, span, block)}
            parts, lost = _find_parts(len(blocks) * in_full - samples.get(start, 0.0), in_full, edges)
            counts = [
                max(0, sum(value <= each and at not in parts for at, value in values.items()) - lost)
                if each <= floor
                else sum(value <= each for value in values.values())
                for each in FLOORS
            ]
            at_floors = tuple(count / len(blocks) for count in counts)
        is_same = most is engine
        found[start] = Zeros(at_floors, at_floors[FLOORS.index(floor)] if is_same else len(bare) / len(blocks))
    return found


def _is_edge(at: float, most: Values, span: WindowSpan, block: float) -> bool:
    """Returns whether the series begins or ends in this block."""
    return (at - block >= span.start and at - block not in most) or (at + block < span.end and at + block not in most)


def _find_parts(missing: float, in_full: float, edges: set[float]) -> tuple[set[float], int]:
    """Finds the blocks that lack many of their samples. Returns those whose place is known, and the largest possible
    number of the others.

    `missing`: samples that all blocks of a window lack together. `in_full`: samples of a complete block. `edges`:
    blocks in which the series begins or ends.
    """
    allowed = math.floor((1.0 - MOST_OF_BLOCK) * in_full + 0.01)
    short = round(missing)
    if short <= allowed:
        return set(), 0
    return edges, 0 if missing < len(edges) * in_full else short // (allowed + 1)
