"""For any report: the printed parts of a row add up to the hours held, and names from outside stay text."""

from __future__ import annotations

import csv
import io
import json

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.usage.test_render import Elements

from gpu_exporter.reports.usage.model import (
    PARTS,
    Capacity,
    CauseHours,
    Covered,
    GpuHours,
    HolderHours,
    LongIdle,
    ReportSource,
    UsageReport,
    Who,
)
from gpu_exporter.reports.usage.render.forms import FORMS
from gpu_exporter.reports.usage.render.svg import BAR, draw_bar
from gpu_exporter.reports.usage.render.tables import TENANTS, list_tables
from gpu_exporter.reports.usage.render.text import draw_bar as draw_letters
from gpu_exporter.reports.usage.render.view import LEVELS, ReportView, ShownReport

DAY_S = 86400.0
NUMBERS = st.floats(0.0, 1e7)
NAMES = st.one_of(
    st.sampled_from(
        [
            "",
            "ml",
            "<script>",
            "</td>",
            "'\"&",
            "\x1b[31m",
            "a\nb\tc",
            "a\nnext-line\r",
            "\u202e",
            "=1+1",
            "\ud800",
            "x" * 300,
        ]
    ),
    st.text(max_size=20),
)
WHOS = st.builds(Who, *[NAMES] * 9)


@st.composite
def uses(draw: st.DrawFn) -> GpuHours:
    """Hours whose parts add up to `held`; parts that are None leave a rest."""
    parts = {part: draw(st.one_of(NUMBERS, st.none())) for part in PARTS}
    rest = draw(NUMBERS) if None in parts.values() else 0.0
    held = sum(hours or 0.0 for hours in parts.values()) + rest
    known = held - (parts["unknown"] or 0.0)
    price = draw(st.one_of(st.none(), st.floats(0.0, 1e4)))
    costs = None if price is None else {part: None if of is None else of * price for part, of in parts.items()}
    busy, energy = draw(st.one_of(st.none(), st.floats(0.0, 1.0))), draw(st.one_of(st.none(), NUMBERS))
    return GpuHours(
        held,
        parts,
        None if busy is None else busy * known,
        known,
        energy,
        costs,
        spent=None if price is None else price * held,
    )


HOLDERS = st.lists(st.builds(HolderHours, WHOS, uses(), st.none() | NUMBERS, st.none() | st.integers(0, 10**9), st.none() | st.floats(0, 1), st.none() | st.floats(0, 1e12), NAMES), max_size=4)  # fmt: skip
REPORTS = st.builds(
    UsageReport,
    st.just(0.0),
    st.just(7 * DAY_S),
    st.lists(st.builds(ReportSource, NAMES, NAMES, st.tuples(NAMES, NAMES)), max_size=2),
    st.none() | st.builds(Covered, st.floats(0.0, 7 * DAY_S), st.just(7 * DAY_S), st.none() | st.just(DAY_S), st.none() | st.floats(0, 1)),
    st.dictionaries(WHOS, uses(), max_size=6),
    st.dictionaries(st.integers(0, 167).map(lambda at: at * 3600.0), st.none() | uses(), max_size=30),
    st.dictionaries(st.integers(0, 6).map(lambda at: at * DAY_S), st.none() | uses(), max_size=7),
    st.none() | uses(),
    st.none() | HOLDERS,
    st.lists(st.builds(Capacity, NAMES, NAMES, NUMBERS, st.none() | NUMBERS, st.none() | NUMBERS), max_size=3),
    st.none() | HOLDERS,
    st.dictionaries(st.sampled_from([0.0, 0.001, 0.01]), NUMBERS),
    st.lists(st.builds(CauseHours, WHOS, NAMES, NUMBERS), max_size=2),
    st.lists(st.builds(LongIdle, NAMES, NAMES, NAMES, NUMBERS), max_size=2),
    st.lists(NAMES, max_size=2),
    st.lists(NAMES, max_size=2),
    NAMES,
)  # fmt: skip
VIEWS = st.builds(ReportView, st.sampled_from(sorted(LEVELS)), st.integers(1, 5))


def read(cell: str) -> float:
    return 0.0 if cell == "-" else float(cell.replace(",", ""))


@settings(max_examples=20)
@given(REPORTS, VIEWS)
def test_the_printed_parts_of_a_row_add_up_to_the_hours_held(report: UsageReport, view: ReportView) -> None:
    """To within the rounding of each column: half a unit of its last digit."""
    for table in list_tables(ShownReport(report, view)):
        if table.key != TENANTS:
            continue
        at = table.header.index("BUSY %")
        parts = [i for i in range(2, at) if "%" not in table.header[i] and "," not in table.header[i]]
        for row in table.rows:
            held, of_parts = read(row[1]), [read(row[i]) for i in parts]
            slack = 0.5 * (1 + len(parts)) if held >= 99.0 else 0.05 * (1 + len(parts))
            assert abs(held - sum(of_parts)) <= slack + 1e-6 * held, (table.header, row)


@settings(max_examples=20)
@given(REPORTS, VIEWS)
def test_the_rows_of_the_table_are_all_hours_once(report: UsageReport, view: ReportView) -> None:
    """Members are within their group, and the rest has the groups that are not shown."""
    shown = ShownReport(report, view)
    rows = shown.rows
    held = sum(row.use.held for row in rows if row.kind in ("group", "rest"))
    assert abs(held - report.total.held) <= 1e-6 * held
    assert abs(rows[-1].use.held - report.total.held) <= 1e-6 * held
    assert len([row for row in rows if row.kind == "group"]) <= view.top


@given(uses())
def test_a_bar_is_as_long_as_the_hours_held(use: GpuHours) -> None:
    assert len(draw_letters(use, 20)) == 20
    bar = Elements(draw_bar(use, use.held))
    widths = [float(width) for width in bar.attributes.get("width", ())]
    assert all(width <= BAR + 0.1 for width in widths)


@settings(max_examples=20)
@given(REPORTS, VIEWS)
def test_names_from_outside_stay_text_in_each_form(report: UsageReport, view: ReportView) -> None:
    for form, render in FORMS.items():
        shown = render(report, view)
        shown.encode("utf-8", "strict" if form == "json" else "surrogatepass")
        if form in ("html", "mail"):
            found = Elements(shown)
            assert found.open == []
            assert not found.tags & {"script", "img", "a", "link"}
        if form == "json":
            json.loads(shown)
        if form in ("csv", "tsv"):
            rows = list(csv.reader(io.StringIO(shown), delimiter="," if form == "csv" else "\t"))
            assert {len(row) for row in rows} == {len(rows[0])}
        if form in ("text", "html", "mail"):
            assert "\x1b" not in shown and "\u202e" not in shown
        if form == "text":
            assert all(line.isprintable() for line in shown.split("\n"))
            assert not any(line.startswith("next-line") for line in shown.split("\n")), "a name begins a line"


@settings(max_examples=20)
@given(REPORTS, VIEWS)
def test_no_sum_of_money_is_shown_if_more_than_one_percent_of_the_hours_has_no_price(
    report: UsageReport, view: ReportView
) -> None:
    for row in ShownReport(report, view).rows:
        if row.use.cost is not None:
            assert abs(row.use.unpriced) <= 0.01 * row.use.held
    without = sum(use.held for use in report.lines.values() if use.costs is None)
    if without > 0.0101 * report.total.held:
        assert report.total.cost is None
