"""Reads exporters that publish utilization as a gauge: dcgm-exporter, nvidia_gpu_exporter, and the exporter of
jobstats.

Each chunk is read in two passes. The first pass reads the smallest, largest and mean sample of each window. This is
cheap, and decides most windows: all samples are zero, or none. The second pass reads the largest sample of each block
of time, only for units with undecided windows.

A gauge shows only the moment at which it was read, or a short time before. So its zeros alone are never `idle`, only
`unproven`. dcgm-exporter's engine activity is a mean over the whole time between two readings. With it, a unit is idle
while its utilization is 0 and its engine activity is at most `floor`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import NamedTuple, TypeAlias

from gpu_exporter.common.promql.vector import literal
from gpu_exporter.reports.history.asking import History, Labels, WindowSpan, over
from gpu_exporter.reports.usage.cells import Cell, PlacedSeries
from gpu_exporter.reports.usage.model import FLOORS
from gpu_exporter.reports.usage.sources.boards import Board, BoardSeries, add_up_boards, board_of, find_crowded
from gpu_exporter.reports.usage.sources.intervals import Target, ask_targets, read_intervals, target_of
from gpu_exporter.reports.usage.sources.witnesses import Doubts, by_gpu, by_unit, find_contradicted
from gpu_exporter.reports.usage.sources.zeros import (
    BLOCK_S,
    NO_ZEROS,
    FirstPass,
    Kind,
    Table,
    Values,
    Windows,
    Zeros,
    choose_block,
    classify,
    count_zeros,
    judge,
)

LOW = 0.10  # utilization below it is low, as ledger.low_ratio
GRID_S = 60.0  # distance of the moments at which holders of a shared unit are counted
BLOCKS_MAX = 500_000  # of the second pass of a day, over all units: about two seconds of work
OLD = "old"  # name of a query
OF_GPU = "cluster, Hostname, hostname, node, instance, UUID, uuid, device, gpu"  # as a site may name a GPU
UNITS_MAX = 300  # in one matcher: VictoriaMetrics accepts queries of 16 KiB (-search.maxQueryLen)
SHORT_UUID = re.compile(r"GPU-[0-9a-f]{8}-")  # enough to select a GPU; a second one that matches does no harm
# dcgm-exporter reads DCGM every 30 s (--collect-interval), and the mean of the engine activity covers this time. If
# samples are further apart, nobody saw the time between; so are those of a target whose scrapes fail.
COVERED_S = 32.0
COVERED = 0.95  # share of a window that must have samples
FULL = 0.9  # share of the samples of the utilization that the engine activity must have
STUCK = 0.1  # utilization in a window whose engine activity was always exactly 0
STUCK_SAMPLES = 4  # a first sample may have utilization already, and the engine's mean of the time before
# Pods in these namespaces reserve a GPU for pods with fractions of it (Run:ai, KAI), whose use nobody sees here.
RESERVATIONS = re.compile("kai-resource-reservation|runai-reservation")

Read: TypeAlias = Callable[[Mapping[str, str]], PlacedSeries]


class Gauges(NamedTuple):
    """The names of one exporter's metrics and labels. `engine`, `memory`, `instance_label`: "" if it has none.

    - `full`: the value of `utilization` at full use. `memory_unit`: bytes in one unit of `memory`.
    - `unit_labels`: labels that identify a unit. `uuid_label`: the one with the UUID; a site may write it in lower
      case.
    - `instance_label`: set on the series of MIG instances. `held`: matchers; each series with a holder matches one of
      them.
    - `video`: metrics of encoders and decoders. No other metric shows their work.
    - `counter`: a counter that grows while the exporter reads the GPU. If it stops, the values are old.
    - `traffic`: metrics of traffic, each with the highest value of a GPU at rest. A higher value is a sign of work.
    - `reader`: makes the function that reads unit and holder from the labels of a chunk's series.
    """

    name: str
    utilization: str
    full: float
    engine: str
    memory: str
    memory_unit: float
    unit_labels: tuple[str, ...]
    uuid_label: str
    instance_label: str
    held: tuple[str, ...]
    video: tuple[str, ...]
    counter: str
    traffic: Mapping[str, float]
    reader: Callable[[History, WindowSpan, Collection[Labels]], Read]


class GaugeReader:
    """Reads the cells of one exporter, chunk by chunk. Every method may raise AnswerError."""

    def __init__(
        self,
        history: History,
        gauges: Gauges,
        matcher: str,
        floor: float,
        *,
        is_brief: bool = False,
        has_means: bool = True,
    ) -> None:
        """`matcher`: the user's label matchers, "" for all series. `floor`: one of FLOORS. `is_brief`: reads no memory,
        and only this floor. `has_means`: the first pass also reads means, which `read` needs.
        """
        self._functions = ("min", "max", "avg") if has_means else ("min", "max")
        self._history, self._gauges, self._matcher = history, gauges, matcher
        self._floor, self._is_brief = floor, is_brief
        self._uuid_label = gauges.uuid_label
        self._read_labels: Read
        self.is_sparse = False  # samples were too far apart for proof

    def read(self, span: WindowSpan) -> Iterator[Cell]:
        """Yields the cells of these windows, of each series in the order of time."""
        given: dict[tuple[Board, float], bool] = {}
        for base in self.bases(span):
            if base.counts:
                yield from self._cells(base, span, given)

    def _cells(self, base: FirstPass, span: WindowSpan, given: dict[tuple[Board, float], bool]) -> Iterator[Cell]:
        """`given`: units and windows of the utilization, and whether they had a holder. The engine activity of series
        with other labels does not count again.
        """
        placed = self.place(base, span)
        has_rest = any(labels not in base.counts for labels in base.engine)
        intervals = base.intervals
        longest = max((each for of in intervals.values() for each in of.values()), default=GRID_S)
        boards = add_up_boards(base.counts, placed, intervals)
        crowded, shared = find_crowded(boards, span.window)
        kinds = {labels: classify(base, self._floor, labels) for labels in base.counts}
        counted = self._count_zeros(base, placed, kinds, intervals, span)
        parts = self._read_parts(base, placed, intervals, boards, crowded, span, max(GRID_S, longest))
        contradicted = find_contradicted(base, placed, boards, span.window)
        broken = {board_of(placed[labels]) for labels in base.counts if is_broken(base, labels)}
        broken |= {board for board, _, _ in contradicted}
        video, doubts = by_gpu(base.video, placed), self.read_doubts(base, placed, kinds, span)
        peaks = self._read_peaks(span)
        for labels, counts in base.counts.items():
            place, target = placed[labels], target_of(labels)
            board, peak = board_of(place), peaks.pop(labels, None)
            of_time, engine = intervals[target], (base.most if base.is_engine else base.engine).get(labels, {})
            of_kind, of_zeros, means = kinds[labels], counted.get(labels, {}), base.mean.get(labels, {})
            proofs = self.proofs(base, labels) - doubts.of(board) if board not in broken else ()
            videos = video.get(board[:2], ())
            for start, count in sorted(counts.items()):
                was_held = given.get((board, start)) if base.is_engine else None
                if was_held is not None and (was_held or place.holder is None):
                    continue
                if has_rest:
                    given[board, start] = place.holder is not None or given.get((board, start), False)
                seconds, beside = count * of_time[start], boards.get((board, start))
                covered = seconds if beside is None else beside.covered(span.window)
                is_crowded = (board, start) in crowded
                if is_crowded:
                    seconds = min(parts[labels].get(start, 0.0), max(seconds, GRID_S))
                zeros = judge(of_kind[start], engine.get(start), of_zeros.get(start))
                self.is_sparse = self.is_sparse or of_time[start] > COVERED_S
                is_covered = of_time[start] <= COVERED_S and covered >= COVERED * span.window and seconds >= BLOCK_S
                if zeros is not None and not (is_covered and start in proofs):
                    zeros = Zeros((), zeros.bare)
                if zeros is not None and (start in videos or (board, target, start) in contradicted):
                    zeros = NO_ZEROS  # neither gauge shows video, or another source saw work
                is_shared = is_crowded and board in shared and beside is not None and len(beside.holders) > 1
                cell = Cell(
                    place.unit,
                    place.holder,
                    start,
                    seconds,
                    round(count),
                    wall=min(span.window, count * of_time[start]),
                    peak_memory=peak,
                    source=self._gauges.name,
                    pod=place.pod,
                )
                if place.holder is not None and RESERVATIONS.fullmatch(place.holder.namespace):
                    yield cell._replace(unknown=seconds, peak_memory=None)
                else:
                    yield _divide(cell, zeros, means.get(start), FLOORS.index(self._floor), is_shared=is_shared)
                peak = None

    def place(self, base: FirstPass, span: WindowSpan) -> dict[Labels, PlacedSeries]:
        """Returns the unit and the holder of each series, also of those that lack the metric of `base`."""
        names = {name for labels in base.counts for name, _ in labels}
        self._uuid_label = next((n for n in (self._gauges.uuid_label, "UUID", "uuid") if n in names), "")
        read = self._read_labels = self._gauges.reader(self._history, span, base.counts)
        return {labels: read(dict(labels)) for labels in {**base.counts, **base.engine, **base.video}}

    def read_doubts(
        self,
        base: FirstPass,
        placed: Mapping[Labels, PlacedSeries],
        kinds: Mapping[Labels, Mapping[float, Kind | None]],
        span: WindowSpan,
    ) -> Doubts:
        """Returns the doubts about windows in which all samples are zero. Asks only about units with such windows."""
        units = {placed[labels].unit.uuid for labels, values in kinds.items() if Kind.ALWAYS in values.values()}
        doubts = Doubts()
        for matcher in self.matchers(units) if self._uuid_label else [""] * bool(units):
            queries = {
                name: f"{over('max', self.select(name, matcher), span.window)} > {limit:g}"
                for name, limit in self._gauges.traffic.items()
            }
            if self._gauges.counter:
                queries[OLD] = _stands_still(self.select(self._gauges.counter, matcher), span.window)
            if base.is_engine:  # there may be more series than those of `base`
                at_work = f"{over('max', self.select(base.metric, matcher), span.window)} > {FLOORS[-1]}"
                queries |= {name: f"({queries[name]}) unless ({at_work})" for name in self._gauges.traffic}
            for name, table in self._history.ask_tables(queries, span).items():
                of = {labels: self._read_labels(dict(labels)) for labels in table}
                if name == OLD:
                    doubts.add(by_gpu(table, of).items())
                    continue
                at_rest = {labels: _without_work(values, base.most.get(labels, {})) for labels, values in table.items()}
                doubts.add(by_unit(table if base.is_engine else at_rest, of).items())
        return doubts

    def proofs(self, base: FirstPass, labels: Labels) -> set[float]:
        """Returns the windows in which the engine activity was read as often as the utilization."""
        counts = base.counts[labels]
        if base.is_engine:
            return {*counts} if dict(labels).get(self._gauges.instance_label) else set()
        most, numbers = base.engine.get(labels, {}), base.engine_counts.get(labels, {})
        return {
            start
            for start, count in counts.items()
            if numbers.get(start, 0.0) >= FULL * count and most.get(start, 0.0) >= 0.0
        }

    def select(self, metric: str, *matchers: str) -> str:
        """Returns a PromQL selector with the user's matchers and these."""
        return f"{metric}{{{','.join(filter(None, (self._matcher, *matchers)))}}}"

    def bases(self, span: WindowSpan) -> Iterator[FirstPass]:
        """Yields the utilization of units, then the engine activity of units without utilization (MIG instances)."""
        names = self._gauges
        base = self._first_pass(span, names.utilization, names.full, None)
        yield base
        if names.engine:
            counts = base.engine_counts if base.counts else self._ask("count", self.select(names.engine), span)
            rest: Table = {}
            for labels, values in counts.items():
                known = base.counts.get(labels, {})
                if more := {start: number for start, number in values.items() if start not in known}:
                    rest[labels] = more
            yield self._first_pass(span, names.engine, 1.0, rest, base.video if base.counts else None)

    def _ask(self, function: str, series: str, span: WindowSpan) -> Table:
        return self._history.ask_tables({function: over(function, series, span.window)}, span)[function]

    def _first_pass(
        self, span: WindowSpan, metric: str, full: float, counts: Table | None, video: Windows | None = None
    ) -> FirstPass:
        """`counts`: samples of the series to read, None for all of this metric. `video`: None if it is not known."""
        is_engine = metric == self._gauges.engine
        of_metric = counts is None
        if counts is None:
            counts = self._ask("count", self.select(metric), span)
        counts = {labels: kept for labels, values in counts.items() if (kept := _positive(values))}
        if not counts:
            return FirstPass(metric, is_engine, {}, {}, {}, {}, {}, {}, {}, {})
        is_all_instances = is_engine and all(dict(labels).get(self._gauges.instance_label) for labels in counts)
        series = self.select(metric, *([f'{self._gauges.instance_label}!=""'] if is_all_instances else []))
        queries = {name: over(name, series, span.window) for name in self._functions}
        if self._gauges.engine and of_metric and not is_engine:
            queries["engine"] = over("max", self.select(self._gauges.engine), span.window)
            queries["engine counts"] = over("count", self.select(self._gauges.engine), span.window)
        if self._gauges.engine:
            names = self._gauges.video if video is None else ()
            queries |= {name: f"{over('max', self.select(name), span.window)} > 0" for name in names}
        queries |= ask_targets(counts, span.window)
        tables = self._history.ask_tables(queries, span)
        least, most, mean = (_pick(tables.get(name, {}), counts, 1.0 / full) for name in ("min", "max", "avg"))
        engine, engine_counts = tables.get("engine", {}), tables.get("engine counts", {})
        video = _join(tables, self._gauges.video) if video is None else video
        intervals = read_intervals(self._history, series, counts, tables, span)
        return FirstPass(metric, is_engine, counts, least, most, mean, engine, engine_counts, intervals, video)

    def _count_zeros(
        self,
        base: FirstPass,
        placed: Mapping[Labels, PlacedSeries],
        kinds: Mapping[Labels, Mapping[float, Kind | None]],
        intervals: Mapping[Target, Mapping[float, float]],
        span: WindowSpan,
    ) -> dict[Labels, dict[float, Zeros]]:
        """Makes the second pass: reads the units with undecided windows in blocks of time."""
        undecided = {
            labels: starts
            for labels, values in kinds.items()
            if (starts := [start for start, kind in values.items() if kind is Kind.SOME])
        }
        hours: defaultdict[str, list[float]] = defaultdict(list)  # by unit
        for labels, starts in undecided.items():
            hours[placed[labels].unit.uuid] += starts
        longest = max((each for of in intervals.values() for each in of.values()), default=GRID_S)
        block = choose_block(len(hours), span.end - span.start, longest, BLOCKS_MAX)
        samples = base.counts if base.is_engine else base.engine_counts
        order = sorted(hours, key=lambda uuid: (min(hours[uuid]), max(hours[uuid]), uuid))
        groups = [order[at : at + UNITS_MAX] for at in range(0, len(order), UNITS_MAX)]

        def intervals_of(labels: Labels) -> dict[float, float]:
            of_time = intervals[target_of(labels)]
            return {start: of_time[start] for start in undecided[labels]}

        def count(units: list[str]) -> dict[Labels, dict[float, Zeros]]:
            (matcher,) = self.matchers(units)
            # With a block more at both ends, because the neighbours of a block show whether the series begins or ends.
            first = max(span.start, min(hours[units[0]]) - block)
            last = min(span.end, max(max(hours[uuid]) for uuid in units) + span.window + block)
            blocks = WindowSpan(first, last, block)
            most = self._history.ask_table("blocks", over("max", self.select(base.metric, matcher), block), blocks)
            engine = most
            if not base.is_engine:
                series = self.select(self._gauges.engine, matcher)
                engine = self._history.ask_table("blocks", over("max", series, block), blocks) if base.engine else {}
            return {
                labels: count_zeros(
                    values,
                    engine.get(labels),
                    samples.get(labels, {}),
                    intervals_of(labels),
                    span,
                    block,
                    self._floor,
                )
                for labels, values in most.items()
                if labels in undecided and placed[labels].unit.uuid in units
            }

        found: dict[Labels, dict[float, Zeros]] = {}
        for of_units in self._history.ask_ahead(count, groups if self._uuid_label else []):
            found |= of_units
        return found

    def _read_parts(
        self,
        base: FirstPass,
        placed: Mapping[Labels, PlacedSeries],
        intervals: Mapping[tuple[str, ...], Mapping[float, float]],
        boards: Mapping[tuple[Board, float], BoardSeries],
        crowded: Collection[tuple[Board, float]],
        span: WindowSpan,
        grid: float,
    ) -> dict[Labels, dict[float, float]]:
        """Returns the seconds of each series, for units that have several series at the same time.

        At each moment, the holders of a unit get equal parts of it. Series without a holder get the rest.
        """
        by = ", ".join(
            ("cluster", *(self._uuid_label if n == self._gauges.uuid_label else n for n in self._gauges.unit_labels))
        )
        window = f"[{span.window * 1000 - 1:.0f}ms:{grid:.0f}s]"
        parts: defaultdict[Labels, dict[float, float]] = defaultdict(dict)
        for matcher in self.matchers({board[1] for board, _ in crowded}):
            series = self.select(base.metric, matcher)
            held = " or ".join(self.select(base.metric, matcher, each) for each in self._gauges.held)
            number = " or ".join(f"count by ({by}) ({each})" for each in filter(None, (held, series)))
            share = f"({series} >= bool -Inf) / on ({by}) group_left () ({number})"
            for labels, values in self._history.ask_tables({"shares": f"sum_over_time(({share}){window})"}, span)[
                "shares"
            ].items():
                parts[labels] = _times(values, grid)
        taken: defaultdict[tuple[Board, float], float] = defaultdict(float)
        for labels, values in parts.items():
            if labels in placed and placed[labels].holder is not None:
                for start, seconds in values.items():
                    taken[board_of(placed[labels]), start] += seconds
        for labels, counts in base.counts.items():
            board, of_time = board_of(placed[labels]), intervals[target_of(labels)]
            for start in counts if placed[labels].holder is None else ():
                if held_s := taken.get((board, start)):
                    rest = boards[board, start].covered(span.window) - held_s
                    parts[labels][start] = max(0.0, min(counts[start] * of_time[start], rest))
                    taken[board, start] = span.window  # the rest counts once
        return parts

    def _read_peaks(self, span: WindowSpan) -> dict[Labels, float]:
        """Returns the largest memory in use by series, in bytes."""
        if not self._gauges.memory or self._is_brief:
            return {}
        series, unit = self.select(self._gauges.memory), self._gauges.memory_unit

        def build(seconds: float) -> str:
            return over("max", series, seconds)

        return {labels: value * unit for labels, value in self._history.ask_whole("memory", build, span).items()}

    def matchers(self, uuids: Collection[str]) -> Iterator[str]:
        """Yields matchers for these units, each short enough for one query. None if the site's series have no UUID."""
        if not self._uuid_label:
            return
        texts = sorted({f"{match[0]}.*" if (match := SHORT_UUID.match(uuid)) else literal(uuid) for uuid in uuids})
        for at in range(0, len(texts), UNITS_MAX):
            yield f'{self._uuid_label}=~"{"|".join(texts[at : at + UNITS_MAX])}"'


def _stands_still(counter: str, window: float) -> str:
    """Returns PromQL for the GPUs whose counter did not grow in the window. All series of a GPU count together, because
    each holder may have its own.
    """
    least, most = (f"{each} by ({OF_GPU}) ({over(each, counter, window)})" for each in ("min", "max"))
    return f"({least} > 0) == {most}"


def _without_work(values: Values, most: Values) -> list[float]:
    return [start for start in values if most.get(start, 0.0) <= 0.0]


def _positive(values: Values) -> Values:
    """Omits windows without samples. No real server returns such windows."""
    return {start: number for start, number in values.items() if number >= 1.0}


def _times(values: Mapping[float, float], factor: float) -> dict[float, float]:
    return {at: value * factor for at, value in values.items()}


def _join(tables: Mapping[str, Table], names: Iterable[str]) -> Windows:
    """The windows of these tables, by series."""
    found: defaultdict[Labels, set[float]] = defaultdict(set)
    for name in names:
        for labels, values in tables.get(name, {}).items():
            found[labels].update(values)
    return found


def _pick(table: Table, series: Collection[Labels], factor: float) -> Table:
    return {labels: _times(values, factor) for labels, values in table.items() if labels in series}


def is_broken(base: FirstPass, labels: Labels) -> bool:
    """Returns whether the engine activity was exactly 0 in a window with work. DCGM's profiling counters have stayed at
    0 while the GPU worked (NVIDIA/dcgm-exporter#662).
    """
    most, engine, counts = base.most.get(labels, {}), base.engine.get(labels, {}), base.counts[labels]
    return any(
        value >= STUCK and engine.get(start) == 0.0 and counts.get(start, 0.0) >= STUCK_SAMPLES
        for start, value in most.items()
    )


def _divide(cell: Cell, zeros: Zeros | None, mean: float | None, floor: int, *, is_shared: bool) -> Cell:
    """Divides the seconds of a window into parts. On a shared unit, activity may be of any holder, so it is unknown.

    `floor`: index in FLOORS.
    """
    seconds = cell.seconds
    if zeros is None or mean is None:
        return cell._replace(unknown=seconds)
    idle = seconds * zeros.at_floors[floor] if zeros.at_floors else 0.0
    # Between the floors, it is noise of the counters, or a little work.
    unproven = seconds * zeros.at_floors[-1] - idle if zeros.at_floors else seconds * zeros.bare
    rest = max(0.0, seconds - idle - unproven)
    at_floors = tuple([seconds * share for share in zeros.at_floors])
    if is_shared:
        return cell._replace(idle=idle, unproven=unproven, at_floors=at_floors, unknown=rest, peak_memory=None)
    busy = seconds * min(1.0, max(0.0, mean))
    low = rest if rest > 0.0 and busy < LOW * rest else 0.0
    return cell._replace(
        idle=idle, unproven=unproven, at_floors=at_floors, low=low, used=rest - low, busy=busy, known=seconds
    )
