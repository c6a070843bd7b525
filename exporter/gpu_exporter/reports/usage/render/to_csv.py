"""Renders a report as one table of values for a spreadsheet or a database: one row for each group and member, without
sums.

The variant with tabs is for accounting systems. Open XDMoD imports jobs only from sacct (Shredder Guide, Slurm Notes),
and has no format for GPU-hours by tenant. So load the table beside it, by account and user.
"""

from __future__ import annotations

import csv
import io

from gpu_exporter.common.plain import one_line, utc
from gpu_exporter.reports.usage.model import UsageReport
from gpu_exporter.reports.usage.render.to_json import NO_DATA, figures
from gpu_exporter.reports.usage.render.view import ReportView

FORMULA = ("=", "+", "-", "@")  # a spreadsheet runs such a cell (OWASP, CSV injection)


def render_csv(report: UsageReport, view: ReportView) -> str:
    """Renders comma-separated values (RFC 4180, with LF). An unknown value is an empty cell."""
    return _render(report, view, ",")


def render_tsv(report: UsageReport, view: ReportView) -> str:
    """Renders tab-separated values."""
    return _render(report, view, "\t")


def _render(report: UsageReport, view: ReportView, delimiter: str) -> str:
    names = (*view.level.group, *view.level.member)
    out = io.StringIO()
    writer = csv.writer(out, delimiter=delimiter, lineterminator="\n")
    writer.writerow(("start", "end", *names, *NO_DATA, "currency"))
    period = [utc(wall).isoformat() for wall in (report.start, report.end)]
    for who, use in report.by(*names).items():
        texts = [safe_cell(getattr(who, name)) for name in names]
        numbers = ["" if value is None else f"{value:.6f}" for value in figures(use).values()]
        writer.writerow((*period, *texts, *numbers, safe_cell(report.currency)))
    return out.getvalue()


def safe_cell(text: str) -> str:
    """Returns the text on one line, in a form that no spreadsheet runs as a formula."""
    text = one_line(text)
    return f"'{text}" if text.startswith(FORMULA) else text
