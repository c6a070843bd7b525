"""Maps the words of `--format` to the functions that render a report."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gpu_exporter.reports.usage.model import UsageReport
from gpu_exporter.reports.usage.render.mail import render_mail
from gpu_exporter.reports.usage.render.page import render_page
from gpu_exporter.reports.usage.render.text import render_text
from gpu_exporter.reports.usage.render.to_csv import render_csv, render_tsv
from gpu_exporter.reports.usage.render.to_json import render_json
from gpu_exporter.reports.usage.render.view import ReportView

FORMS: Mapping[str, Callable[[UsageReport, ReportView], str]] = {
    "text": render_text,
    "html": render_page,
    "mail": render_mail,
    "json": render_json,
    "csv": render_csv,
    "tsv": render_tsv,
}
