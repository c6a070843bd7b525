"""How much of a window a unit was at zero. The first pass decides most windows, the second counts blocks of time."""

from __future__ import annotations

import math
from bisect import bisect_right
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


def classify(base: FirstPass, floor: float, labels: Labels) -> dict[float, Kind | None]:
    """Returns the kind of each window of a series. None if its smallest and largest samples are unknown. A sample below
    0 is invalid.
    """
    least, most = base.least.get(labels, {}), base.most.get(labels, {})
    engine = base.engine.get(labels, {})
    is_engine, found = base.is_engine, dict[float, Kind | None]()
    for start in base.counts[labels]:
        low, high = least.get(start), most.get(start)
        if low is None or high is None or low < 0.0:
            found[start] = None
        elif is_engine:
            found[start] = Kind.ALWAYS if high <= floor else Kind.NEVER if low > FLOORS[-1] else Kind.SOME
        elif low > 0.0:
            found[start] = Kind.NEVER
        else:
            found[start] = Kind.SOME if high > 0.0 or engine.get(start, 0.0) > floor else Kind.ALWAYS
    return found


def judge(kind: Kind | None, engine: float | None, counted: Zeros | None) -> Zeros | None:
    """Returns the zeros of a window, None if they are unknown. `kind`: from `classify`. `engine`: its largest engine
    activity, None if unknown. `counted`: result of the second pass.
    """
    if kind is not Kind.ALWAYS:
        return NO_ZEROS if kind is Kind.NEVER else counted if kind is Kind.SOME else None
    # Below the floor. The second pass counts nothing for lower floors.
    return Zeros(() if engine is None else tuple([float(engine <= each) for each in FLOORS]), 1.0)


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

    - `most`, `engine`: the largest utilization and engine activity of each block, by its start. `engine`: None if the
      unit has none, the same as `most` if it has nothing else.
    - `samples`: of the engine activity in each window. `intervals`: seconds between them, of the windows to count.
    - `block`: its length in seconds. `floor`: one of FLOORS. For it and for lower ones, only blocks with most of their
      samples count, because a holder that starts or ends in a block is there for a part of it only.
    """
    found = {}
    offsets = [number * block for number in range(round(span.window / block))]
    for start, interval in intervals.items():
        blocks = [at for offset in offsets if (at := start + offset) in most]
        if not blocks:
            continue
        at_floors: tuple[float, ...] = ()
        bare = blocks if most is engine else [at for at in blocks if most[at] == 0.0]
        if engine is not None:
            values = {at: value for at in bare if (value := engine.get(at)) is not None}
            in_full, every, lost = block / interval, sorted(values.values()), 0
            sure, missing = every, len(blocks) * in_full - samples.get(start, 0.0)
            if _is_short(missing, in_full):
                edges = {at for at in blocks if _is_edge(at, most, span, block)}
                parts, lost = _find_parts(missing, in_full, edges)
                sure = sorted(value for at, value in values.items() if at not in parts)
            counts = [
                max(0, bisect_right(sure, each) - lost) if each <= floor else bisect_right(every, each)
                for each in FLOORS
            ]
            at_floors = tuple([count / len(blocks) for count in counts])
        is_same = most is engine
        found[start] = Zeros(at_floors, at_floors[FLOORS.index(floor)] if is_same else len(bare) / len(blocks))
    return found


def _is_edge(at: float, most: Values, span: WindowSpan, block: float) -> bool:
    """Returns whether the series begins or ends in this block."""
    return (at - block >= span.start and at - block not in most) or (at + block < span.end and at + block not in most)


def _is_short(missing: float, in_full: float) -> bool:
    """Whether a block may lack most of its samples. `missing`: samples that the blocks of a window lack together.
    `in_full`: of a block.
    """
    return round(missing) > _allowed(in_full)


def _allowed(in_full: float) -> int:
    return math.floor((1.0 - MOST_OF_BLOCK) * in_full + 0.01)


def _find_parts(missing: float, in_full: float, edges: set[float]) -> tuple[set[float], int]:
    """Blocks without most of their samples, and the most such blocks whose place is not known. `edges`: blocks in which
    the series begins or ends.
    """
    return edges, 0 if missing < len(edges) * in_full else round(missing) // (_allowed(in_full) + 1)
