"""Renders a report as HTML for a mail: only tables with inline styles, because mail programs drop plots and style
sheets.
"""

from __future__ import annotations

import html
from collections.abc import Iterator

from gpu_exporter.common.plain import one_line
from gpu_exporter.reports.usage.model import UsageReport
from gpu_exporter.reports.usage.render.tables import TEXT, ReportTable, list_tables
from gpu_exporter.reports.usage.render.view import ReportView, ShownReport
from gpu_exporter.reports.usage.render.words import certainty, coverage, headline, notes, title

FONT = "font-family: sans-serif; font-size: 14px"
TABLE = "border-collapse: collapse; font-family: sans-serif; font-size: 13px"
CELL = "padding: 2px 10px; border-bottom: 1px solid #ddd; text-align: "
STRONG = {"sum": "font-weight: bold; ", "member": "color: #666; ", "rest": "color: #666; "}


def render_mail(report: UsageReport, view: ReportView) -> str:
    """Renders one page without links, plots or external assets."""
    shown = ShownReport(report, view)
    first, *others = headline(shown)
    out = ["<!doctype html>", f'<html><meta charset="utf-8"><body style="{FONT}">']
    out.append(f"<p>{html.escape(title(report))}</p><p><b>{html.escape(one_line(first))}</b></p>")
    out += [f"<p>{html.escape(one_line(text))}</p>" for text in (*others, *certainty(shown), coverage(report))]
    for table in list_tables(shown):
        out += _table(table)
    out += [f"<p><small>{html.escape(text)}</small></p>" for text in notes(shown)]
    return "\n".join([*out, "</body></html>"]) + "\n"


def _table(table: ReportTable) -> Iterator[str]:
    yield f'<p><b>{html.escape(table.title)}</b></p><table style="{TABLE}">'
    for at, row in enumerate((table.header, *table.rows)):
        tag = "td" if at else "th"
        strong = STRONG.get(table.kinds[at - 1], "") if at and table.kinds else ""
        sides = ["left" if not i or name in TEXT else "right" for i, name in enumerate(table.header)]
        cells = (
            f'<{tag} style="{strong}{CELL}{side}">{html.escape(cell)}</{tag}>'
            for side, cell in zip(sides, row, strict=True)
        )
        yield f"<tr>{''.join(cells)}</tr>"
    yield f"</table><p><small>{html.escape(table.note)}</small></p>"
