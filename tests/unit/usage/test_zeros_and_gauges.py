"""From the samples of a window to its parts: what is idle, what is to be investigated, and what only looks like it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_exporter.reports.history.asking import WindowSpan
from gpu_exporter.reports.usage.cells import Cell, HolderId, PlacedSeries, Unit
from gpu_exporter.reports.usage.sources.gauges import GaugeReader, Gauges
from gpu_exporter.reports.usage.sources.intervals import find_intervals, target_of
from gpu_exporter.reports.usage.sources.zeros import (
    FirstPass,
    Kind,
    Table,
    Values,
    Zeros,
    choose_block,
    classify,
    count_zeros,
    judge,
)

HOUR = 3600.0
SPAN = WindowSpan(0.0, 2 * HOUR, HOUR)
LABELS = (("instance", "n1"), ("job", "dcgm"), ("uuid", "GPU-0"))
FLOOR = 0.001
DCGM = (("instance", "n1"), ("job", "dcgm"))


def first_pass(least: float, most: float, engine: float | None = None, *, is_engine: bool = False) -> FirstPass:
    def table(value: float | None) -> Table:
        return {} if value is None else {LABELS: {0.0: value}}

    count, extremes = table(120), (table(least), table(most), table(most / 2))
    return FirstPass("x", is_engine, count, *extremes, table(engine), count, {}, {})


@pytest.mark.parametrize(
    ("base", "kind"),
    [
        (first_pass(0, 0), Kind.ALWAYS),
        (first_pass(0, 0, 0.0), Kind.ALWAYS),
        (first_pass(0, 0, 0.001), Kind.ALWAYS),
        (first_pass(0, 0, 0.0011), Kind.SOME),
        (first_pass(0, 0.01, 0.0), Kind.SOME),
        (first_pass(0, 1, 0.5), Kind.SOME),
        (first_pass(0.01, 0.01, 0.0), Kind.NEVER),
        (first_pass(0, 0.001, is_engine=True), Kind.ALWAYS),
        (first_pass(0.002, 0.008, is_engine=True), Kind.SOME),  # zero at the floor 0.01
        (first_pass(0, 0.5, is_engine=True), Kind.SOME),
        (first_pass(0.011, 0.5, is_engine=True), Kind.NEVER),
    ],
)
def test_the_kind_of_a_window(base: FirstPass, kind: Kind) -> None:
    assert classify(base, FLOOR, LABELS) == {0.0: kind}


def test_a_window_without_its_smallest_or_largest_sample_has_no_kind() -> None:
    base = first_pass(0, 0)
    more = base._replace(counts={LABELS: {0.0: 120.0, HOUR: 120.0}})
    assert classify(more, FLOOR, LABELS) == {0.0: Kind.ALWAYS, HOUR: None}
    assert classify(base._replace(least={}), FLOOR, LABELS) == {0.0: None}
    assert classify(base._replace(most={}), FLOOR, LABELS) == {0.0: None}


def test_the_zeros_of_a_window() -> None:
    counted = Zeros((0.2, 0.2, 0.2), 0.5)
    assert judge(Kind.ALWAYS, 0.0005, None) == ((0.0, 1.0, 1.0), 1.0)
    assert judge(Kind.ALWAYS, None, None) == ((), 1.0)  # no engine activity
    assert judge(Kind.SOME, 0.5, counted) == counted
    assert judge(Kind.SOME, 0.5, None) is None  # not even the blocks are known
    assert judge(Kind.NEVER, 0.0, counted) == ((0.0, 0.0, 0.0), 0.0)
    assert judge(None, 0.0, counted) is None


BLOCK = 300.0  # twelve in an hour, each of ten samples
DAY = WindowSpan(0.0, 3 * HOUR, HOUR)


def count(most: Values, engine: Values | None, samples: float, start: float = HOUR) -> Zeros:
    """The zeros of the second hour."""
    samples_of = dict.fromkeys((0.0, HOUR, 2 * HOUR), 120.0) | {start: samples}
    return count_zeros(most, engine, samples_of, dict.fromkeys(samples_of, 30.0), DAY, BLOCK, FLOOR)[start]


def row(value: float, first: int = 0, last: int = 36) -> dict[float, float]:
    """The same value in these blocks."""
    return {number * BLOCK: value for number in range(first, last)}


def test_blocks_without_utilization_and_engine_activity_are_zeros() -> None:
    work = row(50.0, 12, 15)
    assert count(row(0.0) | work, row(0.0), 120) == ((0.75,) * 3, 0.75)
    assert count(row(0.0) | work, row(0.0) | row(0.005, 15, 18), 120) == ((0.5, 0.5, 0.75), 0.75)
    assert count(row(0.0) | work, None, 120) == ((), 0.75)
    engine = row(0.0005) | row(0.4, 12, 15)
    assert count(engine, engine, 120) == ((0.0, 0.75, 0.75), 0.75), "an instance has nothing else"


@pytest.mark.parametrize(
    ("samples", "idle"),
    [
        (68, 7),  # from the end of the sixth block, of which it has 8 of 10 samples
        (67, 6),  # 7 of 10
        (61, 6),
        (59, 3),  # another block lacks most of its samples, and nobody knows which
    ],
)
def test_a_block_in_which_a_holder_ends_counts_with_most_of_its_samples(samples: float, idle: int) -> None:
    """Else it would be idle time, though the holder was there for a part of it. Which zeros are bare does not change."""
    life = row(0.0, 5, 19)
    zeros = count(life, life | {}, samples)
    assert (zeros.at_floors[1], zeros.bare) == (idle / 7, 1.0)


@pytest.mark.parametrize(("samples", "idle"), [(118, 12), (117, 11), (114, 10)])
def test_scrapes_that_failed_somewhere_in_a_window_count_as_if_they_were_in_few_blocks(
    samples: float, idle: int
) -> None:
    assert count(row(0.0), row(0.0) | {}, samples).at_floors == (idle / 12, idle / 12, 1.0)


def test_a_window_whose_scrapes_are_not_known_is_not_counted() -> None:
    assert count_zeros(row(0.0, 0, 12), None, {}, {}, DAY, BLOCK, FLOOR) == {}


def test_blocks_are_longer_for_slow_scrapes_and_for_many_units() -> None:
    assert choose_block(1, 24 * HOUR, 30.0, 500_000) == 120.0
    assert choose_block(1, 24 * HOUR, 61.0, 500_000) == 180.0
    assert choose_block(3000, 24 * HOUR, 30.0, 500_000) == 600.0
    assert choose_block(10**6, 24 * HOUR, 30.0, 500_000) == HOUR


def intervals(counts: list[float], scrapes: list[float], presence: list[float], dense: list[float]) -> list[float]:
    """The intervals of a target in consecutive hours. `scrapes`: empty without `up`."""
    tables = [{DCGM: {at * HOUR: value for at, value in enumerate(row)}} for row in (counts, scrapes, presence)]
    of_blocks = {target_of(DCGM): {at * HOUR: value for at, value in enumerate(dense)}}
    return list(find_intervals(*tables, of_blocks, HOUR)[target_of(DCGM)].values())


@pytest.mark.parametrize(
    ("scrapes", "presence", "dense", "found"),
    [
        ([120, 110, 120], [HOUR] * 3, [20] * 3, [30, 30, 30]),  # the server was down, as in an hour beside it not
        ([110, 120, 120], [HOUR] * 3, [20] * 3, [30, 30, 30]),
        ([108, 108, 108], [HOUR] * 3, [20] * 3, [30, 30, 30]),  # the server was down in every hour
        ([103, 103, 103], [HOUR] * 3, [18, 18, 18], [HOUR / 103] * 3),  # every 35 s: 17 or 18 in a block
        ([120, 60, 60], [HOUR] * 3, [20, 10, 10], [30, 60, 60]),  # every minute from then on
        ([120, 30, 30], [HOUR, HOUR / 2, HOUR / 2], [20, 5, 5], [30, 120, 120]),  # VictoriaMetrics after such a change
        ([8, 120, 120], [240, HOUR, HOUR], [8, 20, 20], [30, 30, 30]),  # there for four minutes
    ],
)
def test_the_interval_fits_the_samples_of_a_block(
    scrapes: list[float], presence: list[float], dense: list[float], found: list[float]
) -> None:
    assert intervals(scrapes, scrapes, presence, dense) == pytest.approx(found, rel=0.001)


def test_without_up_a_block_of_samples_shows_the_interval_and_lost_samples_do_not_stretch_it() -> None:
    assert intervals([120, 60, 104], [], [], [20, 20, 20]) == [30, 30, 30]
    assert intervals([240, 12, 240], [], [], [40, 12, 40]) == [15, 15, 15], "a part of an hour alone shows none"
    assert intervals([12, 7], [], [], [12, 7]) == [30, 30], "nothing shows it: at most one sample in 30 s"


@given(
    st.dictionaries(st.integers(0, 35), st.sampled_from([0.0, 0.4]), min_size=1),
    st.dictionaries(st.integers(0, 35), st.sampled_from([0.0, 0.0005, 0.005, 0.4])),
    st.lists(st.integers(0, 120), min_size=3, max_size=3),
)
def test_idle_blocks_are_some_of_the_zeros(
    most: dict[int, float], engine: dict[int, float], samples: list[int]
) -> None:
    read = {start * HOUR: float(number) for start, number in enumerate(samples)}
    blocks = [{at * BLOCK: value for at, value in values.items()} for values in (most, engine)]
    found = count_zeros(*blocks, read, dict.fromkeys(read, 30.0), DAY, BLOCK, FLOOR)
    assert found.keys() == {at // HOUR * HOUR for at in blocks[0]}
    for start, zeros in found.items():
        of_window = [at for at in blocks[0] if at // HOUR * HOUR == start]
        sure = sum(blocks[0][at] == 0.0 and blocks[1].get(at, 1.0) <= FLOOR for at in of_window)
        assert 0.0 <= zeros.at_floors[0] <= zeros.at_floors[1] <= sure / len(of_window)
        assert zeros.at_floors[1] <= zeros.at_floors[2] <= zeros.bare <= 1.0


TARGETS = {"scrapes": 120.0, "answers": 120.0, "presence": HOUR, "dense": 20.0}  # scraped every 30 s


class Answers:
    """A history that answers by the name of the query. `zeros`: how many of the 30 blocks of each hour are zero."""

    def __init__(self, tables: Mapping[str, Mapping[float, float]], zeros: int = 0) -> None:
        self.tables, self.zeros = tables, zeros
        self.asked: list[WindowSpan] = []  # in blocks

    def ask_table(self, name: str, query: str, span: WindowSpan) -> dict[Any, Values]:
        if name == "dense":
            return {}
        assert (name, span.window) == ("blocks", 120.0)
        assert query.endswith('{uuid=~"GPU-0"}[119999ms])')
        self.asked.append(span)
        if "engine_active" in query and "engine" not in self.tables:
            return {}
        numbers = [round(span.start / 120) + number for number in range(span.windows)]
        return {LABELS: {120.0 * number: 0.0 if number % 30 < self.zeros else 50.0 for number in numbers}}

    def ask_tables(self, queries: Mapping[str, str], span: WindowSpan) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, query in queries.items():
            if "engine_active" in query and name in ("count", "min", "max", "avg"):
                found[name] = {}  # the second base
            elif name in TARGETS:
                found[name] = {LABELS[:2]: dict.fromkeys((0.0, HOUR), TARGETS[name])}
            else:
                found[name] = {LABELS: dict(self.tables[name])} if name in self.tables else {}
        return found

    def ask_ahead(self, ask: Callable[[str], Any], items: Iterable[str]) -> Iterator[Any]:
        return map(ask, items)


GAUGES = Gauges(
    "dcgm", "utilization", 100.0, "engine_active", "", 1.0, ("uuid",), "uuid", "gi", (), ("encoder",), "", {},
    lambda history, span, series: lambda labels: PlacedSeries(
        Unit("", "n1", labels["uuid"], model="H100"), HolderId("", "kubernetes", "ml", "a")
    ),
)  # fmt: skip
ZERO = {0.0: 0.0, HOUR: 0.0}
FULL = {0.0: 120.0, HOUR: 120.0}
IDLE = {"count": FULL, "min": ZERO, "max": ZERO, "avg": ZERO, "engine": ZERO, "engine counts": FULL}


def read(tables: Mapping[str, Mapping[float, float]], zeros: int = 0) -> list[Cell]:
    reader = GaugeReader(Answers(tables, zeros), GAUGES, "", FLOOR)  # type: ignore[arg-type]
    return list(reader.read(SPAN))


def parts(cell: Cell) -> tuple[float, ...]:
    return cell.used, cell.low, cell.idle, cell.unproven, cell.unknown


def test_a_unit_is_idle_if_both_witnesses_are_zero_all_the_time() -> None:
    assert [parts(cell) for cell in read(IDLE)] == [(0, 0, HOUR, 0, 0)] * 2


def test_an_hour_in_which_video_was_encoded_is_not_idle() -> None:
    """Neither utilization nor engine activity shows encoders and decoders."""
    assert [parts(cell) for cell in read({**IDLE, "encoder": {HOUR: 12.0}})] == [(0, 0, HOUR, 0, 0), (0, HOUR, 0, 0, 0)]


@pytest.mark.parametrize(
    "change",
    [
        {"engine": {}, "engine counts": {}},  # no profiling fields
        {"engine counts": {0.0: 20.0, HOUR: 20.0}},  # read for ten minutes of each hour: another profiler has them
        {"engine counts": {}},
    ],
)
def test_without_engine_activity_zeros_are_to_be_investigated(change: Mapping[str, Mapping[float, float]]) -> None:
    assert [parts(cell) for cell in read({**IDLE, **change})] == [(0, 0, 0, HOUR, 0)] * 2


@pytest.mark.parametrize("utilization", [0.5, 0.11])
def test_an_engine_that_is_zero_while_the_unit_works_confirms_nothing_all_day(utilization: float) -> None:
    """Also if the utilization is zero at some samples of that hour, as with short requests."""
    tables = {**IDLE, "max": {0.0: 100 * utilization, HOUR: 0.0}, "avg": {0.0: 2.0, HOUR: 0.0}}
    cells = read(tables, 30)
    assert all(cell.idle == 0.0 for cell in cells)
    assert cells[1].unproven == HOUR


def test_scrapes_without_engine_activity_prove_less() -> None:
    """The utilization was always zero, the engine activity above the floor for a while, and at ten scrapes not read."""
    noisy = {**IDLE, "engine": dict.fromkeys(ZERO, 0.3)}
    cells = read({**noisy, "engine counts": FULL}, 30)
    fewer = read({**noisy, "engine counts": dict.fromkeys(FULL, 110.0)}, 30)
    assert [cell.idle for cell in cells] == [HOUR, HOUR]
    assert all(0.8 * HOUR < cell.idle < HOUR for cell in fewer)


@pytest.mark.parametrize(("busy", "first", "last"), [(0.0, 0.0, HOUR + 120), (HOUR, HOUR - 120, 2 * HOUR)])
def test_blocks_are_read_around_the_undecided_windows_only(busy: float, first: float, last: float) -> None:
    """The blocks beside them show whether the series begins or ends there; this one does not."""
    most, samples = {**ZERO, busy: 5.0}, {**FULL, busy: 110.0}
    answers = Answers({**IDLE, "max": most, "avg": {**ZERO, busy: 2.0}, "engine counts": samples}, 15)
    (cell,) = [each for each in GaugeReader(answers, GAUGES, "", FLOOR).read(SPAN) if each.start == busy]  # type: ignore[arg-type]
    assert {*answers.asked} == {WindowSpan(first, last, 120.0)}
    lost = 10 // 2  # ten samples are missing somewhere, perhaps two of the four of each of five blocks
    assert cell.idle == pytest.approx((15 - lost) * 120)


def test_traffic_denies_the_zeros_of_hours_without_work_only() -> None:
    """A holder that computes has traffic too. The pauses of that hour are idle as without it."""
    tables = {**IDLE, "max": {0.0: 5.0, HOUR: 0.0}, "avg": {0.0: 2.0, HOUR: 0.0}, "traffic": {0.0: 9.0, HOUR: 9.0}}
    gauges = GAUGES._replace(traffic={"traffic": 1.0})
    worked, quiet = GaugeReader(Answers(tables, 15), gauges, "", FLOOR).read(SPAN)  # type: ignore[arg-type]
    assert (worked.idle, quiet.idle, quiet.unproven) == (15 * 120, 0.0, HOUR)


def test_a_window_shorter_than_a_block_proves_nothing() -> None:
    """A pod that works for six seconds a minute may be zero at its only sample in an hour."""
    short = {0.0: 120.0, HOUR: 3.0}
    cells = read({**IDLE, "count": short, "engine counts": short})
    assert [cell.idle for cell in cells] == [HOUR, 0.0]
    assert cells[1].unproven == cells[1].seconds == 90.0


NUMBER = st.floats(0, 1).map(lambda value: round(value, 3)) | st.sampled_from([0.0, 1.0])


@given(
    st.integers(1, 130),
    st.integers(0, 130),
    NUMBER,
    NUMBER,
    NUMBER,
    st.none() | NUMBER,
    st.integers(0, 30),
    st.booleans(),
)
def test_the_parts_of_a_window_add_up_to_its_seconds(
    samples: int, engines: int, least: float, most: float, mean: float, engine: float | None, blocks: int, has_min: bool
) -> None:
    low, high = sorted((least, most))
    tables = {
        "count": {0.0: float(samples)},
        **({"min": {0.0: 100 * low}} if has_min else {}),
        "max": {0.0: 100 * high},
        "avg": {0.0: 100 * mean},
        **({} if engine is None else {"engine": {0.0: engine}, "engine counts": {0.0: float(engines)}}),
    }
    (cell,) = read(tables, blocks)
    assert sum(parts(cell)) == pytest.approx(cell.seconds)
    assert all(part >= 0.0 for part in parts(cell))
    assert all(0.0 <= seconds <= cell.seconds * (1 + 1e-9) for seconds in cell.at_floors)
    if engine is None or low > 0.0:
        assert cell.idle == 0.0
