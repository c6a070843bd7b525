"""Builds tenures (the time of a holder on a unit) from the samples that show a holder on a unit. Pure.

Sources add their samples chunk by chunk. If a unit is seen without its holder, the holder has left it. If no source
shows the unit, its holder remains, and the time is a gap.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from gpu_exporter.reconciler.decision.outcomes import REGRET_S
from gpu_exporter.reports.backtest.lives import (
    LEFT,
    LOST,
    OPEN,
    SHORT_S,
    UNSEEN,
    WORK,
    IdleRun,
    Tenure,
)
from gpu_exporter.reports.backtest.spans import Span, Spans, extend, merge, overlap_s, subtract
from gpu_exporter.reports.usage.cells import HolderId, Unit
from gpu_exporter.reports.usage.collect import share_of
from gpu_exporter.reports.usage.model import FLOORS
from gpu_exporter.reports.usage.sources.witnesses import common_uuid

PART_S = 600.0  # in which the samples of an hour with missing ones are counted
MISSED = 1.5  # samples: a window that lacks more of them is seen in part
LEFT_S = 1200.0  # a unit that is seen within this time after its holder is left, not lost
NAMELESS_S = 600.0  # of work of a unit whose holder left, without a holder: the exporter may have lost its name
ELSEWHERE_S = 60.0  # a unit that is seen without its holder for this time is left

Board: TypeAlias = tuple[str, str, str]  # cluster, uuid and id of the instance
Key: TypeAlias = tuple[HolderId | None, Board]  # None: the unit was seen without a holder
NO_ENDS: Mapping[HolderId, Sequence[float]] = MappingProxyType({})


class SeenPart(NamedTuple):
    """A window of PART_S, of which `seconds` were seen. `is_busy`: a sample shows work."""

    seconds: float
    is_busy: bool


@dataclass(slots=True)
class UnitTrack:
    """All samples of one holder on one unit, as spans in order of time; spans that touch are joined.

    - `seen`: time with samples. `parts`: windows in which samples are missing, by start.
    - `idle`: idle time, once for each of FLOORS. All entries are the same list until they differ.
    - `doubts`: time in which zeros do not prove idleness.
    - `holes`: unknown time after an idle run, which ends at the next idle run at the latest. `unknown`: other unknown
      time.
    - `thin`, `host_work`, `longest_gap_s`: as in Tenure. `share`: as in Tenure, None if the source does not divide
      units.
    """

    unit: Unit
    interval_s: float = 0.0
    seen: list[Span] = field(default_factory=list)
    parts: dict[float, SeenPart] = field(default_factory=dict)
    idle: list[list[Span]] = field(default_factory=lambda: [[]] * len(FLOORS))
    doubts: list[Span] = field(default_factory=list)
    holes: list[Span] = field(default_factory=list)
    unknown: list[Span] = field(default_factory=list)
    thin: list[Span] = field(default_factory=list)
    host_work: list[Span] = field(default_factory=list)
    longest_gap_s: float = 0.0
    share: float | None = None

    def add_idle(self, at_floors: Sequence[Sequence[Span]]) -> None:
        """Adds idle spans. `at_floors`: once for each of FLOORS."""
        if any(each != at_floors[0] for each in at_floors) and self.idle[-1] is self.idle[0]:
            self.idle = [[*self.idle[0]] for _ in FLOORS]
        are_same = self.idle[-1] is self.idle[0]
        for idle, spans in zip(self.idle[: 1 if are_same else None], at_floors, strict=False):
            for start, end in spans:
                extend(idle, start, end)


def doubt_contradicted(sources: Sequence[Mapping[Key, UnitTrack]]) -> None:
    """Marks idle time as doubtful if another source shows work on the same unit at that time."""
    if len(sources) < 2:
        return
    work: defaultdict[Board, list[tuple[int, Span]]] = defaultdict(list)
    for number, tracks in enumerate(sources):
        for (_, board), track in tracks.items():
            spans = subtract(track.seen, merge(track.idle[-1]), 0.0, math.inf)
            work[_common_name(board)] += ((number, span) for span in spans)
    for number, tracks in enumerate(sources):
        for (_, board), track in tracks.items():
            others = [span for other, span in work[_common_name(board)] if other != number]
            track.doubts = merge([*track.doubts, *others])


def _common_name(board: Board) -> Board:
    cluster, uuid, instance = board
    return cluster, common_uuid(uuid), instance


def build_tenures(
    tracks: dict[Key, UnitTrack],
    end: float,
    cuts: Mapping[HolderId, Sequence[float]],
    ends: Mapping[HolderId, Sequence[float]] = NO_ENDS,
    *,
    has_free: bool = False,
) -> dict[HolderId, list[Tenure]]:
    """Builds the tenures of each holder. Empties `tracks` to save memory.

    `end`: end of the history (Unix seconds). `cuts`, `ends`: when pods of each name began and completed (Unix seconds),
    because exporters may show a completed pod for longer. `has_free`: the source shows the work of units without a
    holder.
    """
    presence: defaultdict[Board, list[Span]] = defaultdict(list)
    changes = Counter((board, start) for (_, board), track in tracks.items() for start in track.parts)
    whole = {}
    for key, track in tracks.items():
        whole[key] = _resolve(track, {start for start in track.parts if changes[key[1], start] > 1})
    for (_, board), (seen, thin) in whole.items():
        presence[board] += subtract(seen, [(start, start + PART_S) for start, _ in thin], 0.0, end)
    of_boards: dict[Board, Spans] = {board: tuple(merge(spans)) for board, spans in presence.items()}
    at_work: dict[Board, Spans] = {}
    for (holder, board), track in tracks.items() if has_free else ():
        if holder is None:
            at_work[board] = tuple(subtract(whole[holder, board][0], merge(track.idle[-1]), 0.0, end))
    found: defaultdict[HolderId, list[Tenure]] = defaultdict(list)
    by_board: defaultdict[Board, list[Tenure]] = defaultdict(list)
    for holder, board in list(tracks):
        track, (seen, thin) = tracks.pop((holder, board)), whole.pop((holder, board))
        if holder is None:
            continue
        for whole_time in _cut(seen, of_boards[board], cuts.get(holder, ())):
            done = next((at for at in ends.get(holder, ()) if at >= whole_time[0][0]), end)
            spans = [(begin, min(stop, done)) for begin, stop in whole_time if begin < done]
            if not spans:
                continue
            tenure = _build(track, spans, thin, of_boards[board], end)
            if (
                tenure.ended == LEFT
                and overlap_s(at_work.get(board, ()), tenure.end, tenure.end + REGRET_S) > NAMELESS_S
            ):
                tenure.lose()
            found[holder].append(tenure)
            if track.share is None:
                by_board[board].append(tenure)
    for tenures in by_board.values():
        _share(tenures)
    return found


def _resolve(track: UnitTrack, changes: Collection[float]) -> tuple[list[Span], list[Span]]:
    """Returns the times in which the holder was present, and the parts of them with missing samples.

    `changes`: windows in which the unit changed its holder. In two such windows in a row, each holder was present in
    only one part.
    """
    found, thin = list(track.seen), []
    seen = tuple(merge(track.seen))
    for start, part in track.parts.items():
        stop = start + PART_S
        if overlap_s(seen, start, stop) >= part.seconds - track.interval_s:
            continue
        is_before = overlap_s(seen, start - 1.0, start) > 0.0 or _goes_on(track, changes, start - PART_S, start)
        is_after = overlap_s(seen, stop, stop + 1.0) > 0.0 or _goes_on(track, changes, start, stop)
        if is_before and is_after:
            found.append((start, stop))
            thin.append((start, stop - part.seconds))
        elif is_after:
            found.append((stop - part.seconds, stop))
        else:
            found.append((start, start + part.seconds))
    return merge(found), merge(thin)


def _goes_on(track: UnitTrack, changes: Collection[float], one: float, other: float) -> bool:
    """Returns whether the holder may have been present all the time in both of these neighbouring windows."""
    return one in track.parts and other in track.parts and not (one in changes and other in changes)


def _cut(seen: list[Span], board: Spans, cuts: Sequence[float]) -> list[list[Span]]:
    """Divides the time of a holder where it left the unit, and where another pod of the same name began."""
    tenures: list[list[Span]] = []
    for start, end in seen:
        last = tenures[-1][-1][1] if tenures else None
        if last is None or overlap_s(board, last, start) > ELSEWHERE_S or any(last <= cut <= start for cut in cuts):
            tenures.append([])
        inside = [cut for cut in cuts if start + ELSEWHERE_S < cut < end - ELSEWHERE_S]
        for cut in inside:
            tenures[-1].append((start, cut))
            tenures.append([])
            start = cut
        tenures[-1].append((start, end))
    return tenures


def _build(
    track: UnitTrack,
    spans: list[Span],
    thin: list[Span],
    board: Spans,
    until: float,
) -> Tenure:
    start, end = spans[0][0], spans[-1][1]
    gaps = [(before[1], after[0]) for before, after in itertools.pairwise(spans)]
    ended = LEFT
    if end > until - PART_S:
        ended = OPEN
    elif not overlap_s(board, end, end + LEFT_S):
        ended = UNSEEN if board[-1][1] > end + LEFT_S else LOST
    runs: list[tuple[IdleRun, ...]] = []
    starts = [begin for begin, _ in track.idle[0]]
    holes = {
        (begin, min([stop, end, *starts[bisect_right(starts, begin) :][:1]]))
        for begin, stop in (*track.holes, *track.unknown)
        if start <= begin < end - 2.0 * track.interval_s
    }
    for number, idle in enumerate(track.idle):
        if number and idle == track.idle[number - 1]:
            runs.append(runs[-1])
            continue
        own = subtract(idle, gaps, start, end)
        holes |= set(_find_holes(own, track.parts, start, end))
        runs.append(tuple(_end_runs(own, merge([*gaps, *holes]), start, end, ended, track.interval_s)))
    unit = track.unit
    return Tenure(
        node=unit.node,
        uuid=unit.uuid,
        mig=unit.gi,
        model=unit.model,
        start=start,
        end=end,
        ended=ended,
        runs=tuple(runs),
        gaps=tuple(merge([*gaps, *holes])),
        thin=tuple(
            span for span in (*thin, *track.thin) if start <= span[0] < end and not overlap_s(tuple(holes), *span)
        ),
        doubts=tuple(track.doubts),
        share=share_of(unit) if track.share is None else track.share,
        is_shared=track.share is not None and track.share < 1.0 and not unit.gi,
        host_work=tuple(track.host_work),
        longest_gap_s=track.longest_gap_s,
    )


def _find_holes(idle: list[Span], parts: dict[float, SeenPart], start: float, end: float) -> Iterable[Span]:
    """Yields the unknown times between two idle spans: their windows lack samples, and no sample shows work."""
    for (_, begin), (stop, _) in itertools.pairwise(idle):
        first = begin // PART_S * PART_S
        of = [parts.get(first + n * PART_S) for n in range(int((stop - first - 1e-6) // PART_S) + 1)]
        if start < begin < stop < end and of and all(part is not None and not part.is_busy for part in of):
            yield begin, stop


def _end_runs(
    idle: list[Span],
    gaps: list[Span],
    start: float,
    end: float,
    ended: str,
    interval_s: float,
) -> Iterable[IdleRun]:
    """Yields the idle runs, each with its kind of end. Omits runs shorter than SHORT_S between two times of work."""
    near_s = 2.0 * interval_s  # the edges of gaps and tenures are known to a sample
    gap_starts, gap_ends = [gap[0] for gap in gaps], [gap[1] for gap in gaps]
    for begin, stop in idle:
        after = next(
            (edge for edge in gap_ends if abs(begin - edge) <= near_s), start if begin - start <= near_s else None
        )
        before = next((edge for edge in gap_starts if abs(stop - edge) <= near_s), None)
        if before is not None:
            run = IdleRun(begin, before, UNSEEN)
        elif end - stop <= near_s:
            run = IdleRun(begin, end, ended)
        else:
            run = IdleRun(begin, stop, WORK)
        if after is not None:
            run = run._replace(start=after)
        if run.seconds >= SHORT_S or after is not None or run.ended != WORK:
            yield run


def _share(tenures: list[Tenure]) -> None:
    """Divides a unit equally among the holders that have it at the same time."""
    tenures.sort(key=lambda each: each.start)
    beside: Counter[int] = Counter()
    for number, each in enumerate(tenures):
        for other in range(number + 1, len(tenures)):
            if tenures[other].start >= each.end - PART_S:
                break
            if min(each.end, tenures[other].end) - tenures[other].start > PART_S:
                beside.update((number, other))
    for number, others in beside.items():
        tenures[number].is_shared, tenures[number].share = True, tenures[number].share / (1 + others)
