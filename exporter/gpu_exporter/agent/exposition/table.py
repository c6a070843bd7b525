"""Renders a view as a table for a terminal: each GPU's holder and use, and why the GPU is not used."""

from __future__ import annotations

from gpu_exporter.agent.exposition.json_format import list_rows
from gpu_exporter.common.model.rows import NAMES, NUMBERS
from gpu_exporter.common.model.views import View
from gpu_exporter.common.plain import layout, one_line


def render_table(view: View) -> str:
    """Returns a table with one line for each allocation, and for each GPU without a holder. Ends with a newline."""
    lines = layout(NAMES, [row.texts for row in list_rows(view)], NUMBERS)
    if not view.status.driver_up:
        what = "no GPU data" if view.status.expects_gpus else "the exporter expects no GPU here"
        lines.append(f"{what}: {one_line(view.status.driver_error)}")
    for source in view.status.sources:
        lines += [f"attribution {source.name}: {one_line(text)}" for text in (source.error, source.notice) if text]
    if view.status.note:
        lines.append(view.status.note)
    return "\n".join(lines) + "\n"
