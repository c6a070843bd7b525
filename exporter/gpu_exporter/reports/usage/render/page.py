"""Renders a report with its plots as one HTML file for browsers, phones and paper (A4), in light and dark colours. The
file loads nothing and runs no script.
"""

from __future__ import annotations

import html
from collections.abc import Iterator

from gpu_exporter.common.plain import one_line, percent
from gpu_exporter.reports.usage.model import IDLE, UNKNOWN, UNPROVEN, UsageReport
from gpu_exporter.reports.usage.render.heat import TITLE, Heat, week_of
from gpu_exporter.reports.usage.render.style import style
from gpu_exporter.reports.usage.render.svg import draw_bar, draw_week
from gpu_exporter.reports.usage.render.tables import TENANTS, TEXT, ReportTable, list_tables
from gpu_exporter.reports.usage.render.view import ReportView, ShownReport, number, shown_parts
from gpu_exporter.reports.usage.render.words import WORDS, coverage, headline, money, notes, title


def render_page(report: UsageReport, view: ReportView) -> str:
    shown = ShownReport(report, view)
    first, *others = [html.escape(one_line(text)) for text in headline(shown)]
    out = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        f"<title>{html.escape(title(report))}</title><style>{style()}</style></head><body>",
        f"<h1>{html.escape(title(report))}</h1>",
        f'<p class="first">{first}</p>',
        *(f"<p>{text}</p>" for text in others),
        *(_cards(shown) if shown.total.held else ()),
        f'<p class="dim">{html.escape(one_line(coverage(report)))}</p>',
    ]
    heat = week_of(report)
    for table in list_tables(shown):
        if table.key == TENANTS:
            out += _bars(shown)
            out += _table(table)
            out += _week(heat) if heat is not None else ()
        else:
            out += _table(table)
    if texts := notes(shown):
        out.append('<section><h2>Notes</h2><ul class="notes">')
        out += [f"<li>{html.escape(text)}</li>" for text in texts]
        out.append("</ul></section>")
    return "\n".join([*out, "</body></html>"]) + "\n"


def _cards(shown: ShownReport) -> Iterator[str]:
    """Renders the four main numbers, with money if there are prices."""
    report, total = shown.report, shown.total
    yield '<div class="cards">'
    held = f"<b>{number(total.held)}</b><span>GPU-hours{html.escape(money(total.cost, report))}</span>"
    yield f'<div class="card">held{held}</div>'
    for part, words in ((IDLE, "idle, confirmed"), (UNPROVEN, "to be investigated"), (UNKNOWN, "unknown")):
        hours = total.parts[part]
        said = (
            "no source reports it"
            if hours is None
            else f"{number(hours)} GPU-hours{money(total.cost_of(part), report)}"
        )
        figures = f"<b>{percent(total.share(part))}</b><span>{html.escape(said)}</span>"
        yield f'<div class="card top-{part}">{words}{figures}</div>'
    yield "</div>"


def _bars(shown: ShownReport) -> Iterator[str]:
    """Renders one bar for each group. Its length shows the group's hours."""
    rows = [row for row in shown.rows if row.kind != "sum"]
    most = max((row.use.held for row in rows), default=0.0)
    yield f'<section><h2>GPU-hours held, by {shown.view.by}</h2><div class="bars">'
    for row in rows:
        yield f'<div class="name {row.kind}">{html.escape(row.name)}</div>'
        yield f'<div class="value">{number(row.use.held)}</div>'
        yield f'<div class="plot">{draw_bar(row.use, most)}</div>'
    yield '</div><ul class="legend">'
    for part in shown_parts([shown.total]):
        yield f'<li><i class="p-{part}"></i>{WORDS[part].name}: {html.escape(WORDS[part].meaning)}</li>'
    yield "</ul></section>"


def _week(heat: Heat) -> Iterator[str]:
    yield f"<section><h2>{TITLE}</h2>{draw_week(heat)}"
    yield f'<p class="note">The darkest cell: {number(heat.most)} GPUs. A cell with an outline: no data.</p></section>'


def _table(table: ReportTable) -> Iterator[str]:
    yield f'<section class="{table.key}"><h2>{html.escape(table.title)}</h2><div class="scroll"><table>'
    names = [' class="word"' if not at or name in TEXT else "" for at, name in enumerate(table.header)]
    yield (
        "<tr>"
        + "".join(f"<th{of}>{html.escape(name)}</th>" for of, name in zip(names, table.header, strict=True))
        + "</tr>"
    )
    for at, row in enumerate(table.rows):
        kind = f' class="{table.kinds[at]}"' if table.kinds else ""
        cells = (f"<td{_cell(of, cell)}>{html.escape(cell.strip())}</td>" for of, cell in zip(names, row, strict=True))
        yield f"<tr{kind}>{''.join(cells)}</tr>"
    yield "</table></div>"
    yield f'<p class="note">{html.escape(table.note)}</p></section>' if table.note else "</section>"


def _cell(name: str, cell: str) -> str:
    return name.replace("word", "word long") if len(cell) > 24 else name
