"""Finds idle times in the history of exporters that publish gauges.

Uses the report's first query: the smallest and largest sample of each hour. For units with a zero, it then reads the
largest sample of shorter blocks. Hours with missing samples are counted in parts of ten minutes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping

from gpu_exporter.common.promql.vector import literal
from gpu_exporter.reports.backtest.lives import HolderLife
from gpu_exporter.reports.backtest.spans import Span, extend
from gpu_exporter.reports.backtest.tracks import MISSED, PART_S, Key, SeenPart, UnitTrack
from gpu_exporter.reports.history.asking import History, Labels, WindowSpan, over
from gpu_exporter.reports.usage.cells import WINDOW_S, HolderId, Unit
from gpu_exporter.reports.usage.model import FLOORS
from gpu_exporter.reports.usage.sources.boards import add_up_boards, board_of
from gpu_exporter.reports.usage.sources.gauges import COVERED_S, RESERVATIONS, GaugeReader, Gauges, is_broken
from gpu_exporter.reports.usage.sources.intervals import target_of
from gpu_exporter.reports.usage.sources.witnesses import by_gpu, find_contradicted
from gpu_exporter.reports.usage.sources.zeros import FirstPass, Kind, Table, Values, Windows, classify

BLOCKS_S = (120.0, 300.0, 600.0)  # of two samples or more


class GaugeTracks:
    """Collects the tracks of one exporter. `read` may raise AnswerError."""

    def __init__(self, history: History, gauges: Gauges, matcher: str) -> None:
        """`matcher`: the user's label matchers, "" for all series."""
        self._history, self._gauges = history, gauges
        self._reader = GaugeReader(history, gauges, matcher, FLOORS[-1], is_brief=True, has_means=False)
        self.tracks: dict[Key, UnitTrack] = {}
        self._units: dict[Unit, Unit] = {}  # answers about the same unit or holder share its names
        self._holders: dict[HolderId | None, HolderId | None] = {}

    def read(self, span: WindowSpan) -> None:
        """Adds the samples of `span`. Call it in the order of time."""
        for base in self._reader.bases(span):
            if base.counts:
                self._add(base, span)

    def mean(self, life: HolderLife, seconds: float) -> str:
        """See CurveSource.mean. For MIG instances, which have no utilization, it uses their engine activity."""
        units, gauges = life.tenures, self._gauges
        instances = sorted({each.mig for each in units} - {""})
        metric, full = (gauges.engine, 1.0) if instances else (gauges.utilization, gauges.full)
        matchers = list(self._reader.matchers({each.uuid for each in units}))[:1]  # one query has hundreds of units
        if not metric or not matchers:
            return ""
        if instances:
            matchers.append(f'{gauges.instance_label}=~"{"|".join(map(literal, instances))}"')
        return f"avg({over('avg', self._reader.select(metric, *matchers), seconds)}) / {full:g}"

    def _add(self, base: FirstPass, span: WindowSpan) -> None:
        placed = self._reader.place(base, span)
        intervals = {labels: base.intervals[target_of(labels)] for labels in base.counts}
        longest = {target: max(of.values()) for target, of in base.intervals.items() if of}
        block_of: dict[str, float] = {}  # by uuid: all series of a unit are read in the same blocks
        for labels in base.counts:
            least = 2.0 * longest[target_of(labels)]
            block = next((each for each in BLOCKS_S if each >= least), BLOCKS_S[-1])
            block_of[placed[labels].unit.uuid] = max(block, block_of.get(placed[labels].unit.uuid, 0.0))
        kinds = {labels: classify(base, FLOORS[-1], labels) for labels in base.counts}
        undecided, partial = set(), set()
        for labels, counts in base.counts.items():
            uuid, of = placed[labels].unit.uuid, intervals[labels]
            if any(kind is not Kind.NEVER for kind in kinds[labels].values()):
                undecided.add((block_of[uuid], uuid))
            if any(WINDOW_S - count * of[start] > MISSED * of[start] for start, count in counts.items()):
                partial.add(uuid)
        blocks, busy = self._read_blocks(base, undecided, span)
        windows = self._read_windows(base, partial, span)
        boards = add_up_boards(base.counts, placed, base.intervals)
        contradicted = {board for board, _, _ in find_contradicted(base, placed, boards, span.window)}
        videos, more = by_gpu(base.video, placed), self._reader.read_doubts(base, placed, kinds, span)
        keys: defaultdict[Key, list[Labels]] = defaultdict(list)
        for labels in base.counts:
            unit, holder, _ = placed[labels]
            unit, holder = self._units.setdefault(unit, unit), self._holders.setdefault(holder, holder)
            keys[holder, (unit.cluster, unit.uuid, unit.gi)].append(labels)
        broken = {labels for labels in base.counts if is_broken(base, labels)}
        proofs = {labels: self._reader.proofs(base, labels) for labels in base.counts}
        for key, series in keys.items():
            track = self.tracks.get(key)
            if track is None:
                track = self.tracks[key] = UnitTrack(self._units[placed[series[0]].unit])
            doubts = more.of(board_of(placed[series[0]]))  # of the unit, which all of these series have
            for start, labels in best_series(series, base.counts):
                interval = intervals[labels][start]
                track.interval_s = max(interval, track.interval_s)
                hour = (start, base.counts[labels][start], interval)
                kind = kinds[labels][start]
                see_hour(track, hour, windows.get(labels, {}), None if kind is Kind.NEVER else busy.get(labels, ()))
                is_denied = labels in broken or board_of(placed[labels]) in contradicted or start in doubts
                if interval > COVERED_S or is_denied or kind is None or start not in proofs[labels]:
                    extend(track.doubts, start, start + WINDOW_S)
            uuid = placed[series[0]].unit.uuid
            video = videos.get(key[1][:2], ())
            is_reservation = key[0] is not None and RESERVATIONS.fullmatch(key[0].namespace)
            zeros = {} if is_reservation else _common(blocks, series, base.counts)
            if video:  # neither gauge shows encoders and decoders
                zeros = {at: value for at, value in zeros.items() if at // WINDOW_S * WINDOW_S not in video}
            track.add_idle(_at_floors(zeros, block_of[uuid]))

    def _read_blocks(
        self, base: FirstPass, units: Collection[tuple[float, str]], span: WindowSpan
    ) -> tuple[dict[Labels, Values], Windows]:
        """Reads utilization and engine activity in blocks. Returns two results by series: the blocks in which both are
        zero, by start and with their largest engine activity (0 without this metric), and the ten-minute windows with
        work.

        `units`: the length of its blocks (seconds) and the UUID of each unit.
        """

        def ask(item: tuple[float, str]) -> list[tuple[Labels, Values, set[float]]]:
            (block, matcher), table = item, self._history.ask_table
            metrics = [base.metric, self._gauges.engine] if base.engine and not base.is_engine else [base.metric]
            # A server needs twice the time if it compares the values itself.
            queries = [over("max", self._reader.select(each, matcher), block) for each in metrics]
            work, *more = [table("blocks", query, span._replace(window=block)) for query in queries]
            engine = more[0] if more else {}
            return [
                (labels, *find_zeros(base, labels, work.get(labels, {}), engine.get(labels, {})))
                for labels in {**work, **engine}
            ]

        asked = [
            (block, matcher)
            for block in sorted({block for block, _ in units})
            for matcher in self._reader.matchers({uuid for each, uuid in units if each == block})
        ]
        zeros: dict[Labels, Values] = {}
        busy: dict[Labels, set[float]] = {}
        for answer in self._history.ask_ahead(ask, asked):
            for labels, zero, windows in answer:
                zeros[labels], busy[labels] = zero, windows
        return zeros, busy

    def _read_windows(self, base: FirstPass, units: Collection[str], span: WindowSpan) -> dict[Labels, Values]:
        """Reads the number of samples in each ten-minute window."""

        def ask(matcher: str) -> dict[Labels, Values]:
            query = over("count", self._reader.select(base.metric, matcher), PART_S)
            return self._history.ask_table("windows", query, span._replace(window=PART_S))

        found: dict[Labels, Values] = {}
        for answer in self._history.ask_ahead(ask, self._reader.matchers(units)):
            found |= answer
        return found


def find_zeros(base: FirstPass, labels: Labels, work: Values, engine: Values) -> tuple[Values, set[float]]:
    """Returns two results about a series: the largest engine activity of each block at zero, by its start (0 without
    this metric), and the starts of the ten-minute windows with work.

    `work`, `engine`: the largest value of `base.metric` and of the engine activity in each block, by its start.
    """
    limit = FLOORS[-1] if base.is_engine else 0.0
    busy = {at // PART_S * PART_S for at, value in work.items() if value > limit}
    busy |= {at // PART_S * PART_S for at, value in engine.items() if value > FLOORS[-1]}
    if base.is_engine:
        return {at: value for at, value in work.items() if value <= limit}, busy
    if labels not in base.engine:  # a utilization below 0 is invalid
        return {at: value for at, value in work.items() if value == 0.0}, busy
    return {at: value for at, value in engine.items() if value <= FLOORS[-1] and work.get(at) == 0.0}, busy


def see_hour(
    track: UnitTrack, hour: tuple[float, float, float], windows: Values, busy: Collection[float] | None
) -> None:
    """Adds one hour. `hour`: its start, number of samples, and seconds between two samples. If samples are missing,
    `windows` has their number in each ten-minute window. `busy`: the windows with work, None for all of them.
    """
    start, count, interval = hour
    if WINDOW_S - count * interval <= MISSED * interval:
        extend(track.seen, start, start + WINDOW_S)
        return
    for at in (start + number * PART_S for number in range(round(WINDOW_S / PART_S))):
        seconds = min(PART_S, windows.get(at, 0.0) * interval)
        if PART_S - seconds <= MISSED * interval:
            extend(track.seen, at, at + PART_S)
        elif seconds:
            track.parts[at] = SeenPart(seconds, busy is None or at in busy)


def best_series(series: Collection[Labels], counts: Table) -> list[tuple[float, Labels]]:
    """Returns each hour of a holder with the series that has the most samples in it. Several series can show one unit:
    after a target moved, or if two targets scrape it.
    """
    best: dict[float, Labels] = {}
    for labels in sorted(series):
        for start, count in counts[labels].items():
            if start not in best or count > counts[best[start]][start]:
                best[start] = labels
    return sorted(best.items())


def _at_floors(zeros: Values, block: float) -> list[list[Span]]:
    """Returns the idle time for each of FLOORS. `zeros`: the largest engine activity of blocks of `block` seconds."""
    most, found = max(zeros.values(), default=0.0), list[list[Span]]()
    for number, floor in enumerate(FLOORS):
        if number and most <= FLOORS[number - 1]:
            found.append(found[-1])
            continue
        spans = list[Span]()
        begin = end = -1.0
        for at in sorted(zeros if most <= floor else [at for at, value in zeros.items() if value <= floor]):
            if at > end:
                if end > 0.0:
                    spans.append((begin, end))
                begin = at
            end = at + block
        found.append([*spans, (begin, end)] if end > 0.0 else [])
    return found


def _common(blocks: Mapping[Labels, Values], series: Collection[Labels], counts: Table) -> Values:
    """Returns the blocks that are at zero in every series of a holder, with the largest engine activity of these
    series. A series without samples in the hour does not count.
    """
    if len(series) == 1:
        return blocks.get(next(iter(series)), {})
    found: dict[float, list[float]] = {}
    for labels in series:
        for at, value in blocks.get(labels, {}).items():
            found.setdefault(at, []).append(value)
    hours = Counter(start for labels in series for start in counts[labels])
    return {at: max(values) for at, values in found.items() if len(values) >= hours[at // WINDOW_S * WINDOW_S]}
