"""Renders a report as text for a terminal or a mail: tables with columns of fixed width."""

from __future__ import annotations

import math
from collections.abc import Iterator

from gpu_exporter.common.plain import layout, one_line
from gpu_exporter.reports.usage.model import PARTS, GpuHours, UsageReport
from gpu_exporter.reports.usage.render.heat import TITLE, Heat, week_of
from gpu_exporter.reports.usage.render.tables import TENANTS, TEXT, ReportTable, list_tables
from gpu_exporter.reports.usage.render.view import ReportView, ShownReport, number, shown_parts
from gpu_exporter.reports.usage.render.words import WORDS, certainty, coverage, headline, notes, title

BAR = 20  # characters
SHADES = "\u00b7\u2591\u2592\u2593\u2588"  # of an hour in the plot of the week, the last one for the largest value


def render_text(report: UsageReport, view: ReportView) -> str:
    """Renders the report as lines of text, with a line break at the end."""
    shown = ShownReport(report, view)
    lines = [title(report), "", *headline(shown), *certainty(shown), one_line(coverage(report)), ""]
    for table in list_tables(shown):
        lines += [f"{table.title}:", *_lines(table, shown)]
        lines += [f"({table.note})"] if table.note else []
        lines.append("")
        if table.key == TENANTS and (heat := week_of(report)) is not None:
            lines += [*_heat(heat), ""]
    return "\n".join([*lines, *notes(shown)]).rstrip("\n") + "\n"


def _lines(table: ReportTable, shown: ShownReport) -> Iterator[str]:
    header, rows = table.header, table.rows
    if table.key != TENANTS:
        yield from layout(header, rows, frozenset(header) - TEXT)
        return
    uses = [row.use for row in shown.rows]
    bars = [f"|{draw_bar(use)}|" for use in uses]
    header = (*header, "OF THE HOURS HELD")
    yield from layout(header, [(*row, bar) for row, bar in zip(rows, bars, strict=True)], frozenset(header[1:-1]))
    yield "bar: " + ", ".join(f"{WORDS[part].letter} {WORDS[part].name}" for part in shown_parts(uses))


def draw_bar(use: GpuHours, width: int = BAR) -> str:
    """Draws the held hours as a bar of letters, one for each part. `.` stands for hours without a known part."""
    apart = max(0.0, use.apart)
    whole = apart + sum(hours or 0.0 for hours in use.parts.values())
    if not 0.0 < whole < math.inf:
        return " " * width
    exact = {WORDS[part].letter: width * ((use.parts[part] or 0.0) / whole) for part in PARTS}
    exact["."] = width * (apart / whole)
    lengths = {letter: int(length) for letter, length in exact.items()}
    largest = sorted(exact, key=lambda letter: lengths[letter] - exact[letter])  # the largest remainders first
    for letter in largest[: width - sum(lengths.values())]:
        lengths[letter] += 1
    return "".join(letter * length for letter, length in lengths.items())


def _heat(heat: Heat) -> Iterator[str]:
    yield f"{TITLE}:"
    yield "     " + "".join(f"{hour:02}".ljust(6) for hour in range(0, 24, 3)).rstrip()
    for day, row in heat.rows.items():
        yield f"{day}  " + "".join(2 * shade(value, heat.most) for value in row).rstrip()
    yield f"{SHADES[0]} 0  " + f"{SHADES[-1]} {number(heat.most)} GPUs; blank: no data"


def shade(value: float | None, most: float) -> str:
    if value is None:
        return " "
    return SHADES[0] if value <= 0.0 else SHADES[min(len(SHADES) - 1, 1 + int((len(SHADES) - 1) * value / most))]
