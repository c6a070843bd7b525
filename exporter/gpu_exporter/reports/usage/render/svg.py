"""Draws the plots of the page as inline SVG: bars of parts, and the week by hour. CSS classes define the colours."""

from __future__ import annotations

import html

from gpu_exporter.reports.usage.model import PARTS, GpuHours
from gpu_exporter.reports.usage.render.heat import TITLE, Heat
from gpu_exporter.reports.usage.render.view import number
from gpu_exporter.reports.usage.render.words import WORDS

BAR = 1000.0  # width of the longest bar, in units of its picture
CELL, LEFT, TOP = 24, 52, 26  # of the plot of the week
LEVELS = 5  # of a cell's shade, without 0


def draw_bar(use: GpuHours, most: float) -> str:
    """Draws the held hours as a bar of parts. `most`: GPU-hours of a bar with full length. Hours without a known part
    are an outline.
    """
    whole = max(use.held, sum(hours or 0.0 for hours in use.parts.values()))

    def length(hours: float | None) -> float:
        return BAR * (hours or 0.0) / most if most else 0.0

    out = [f'<svg class="bar" viewBox="0 0 {BAR:.0f} 10" preserveAspectRatio="none" role="img">']
    out.append(f"<title>{html.escape(describe(use))}</title>")
    out.append(f'<rect class="held" width="{length(whole):.1f}" height="10"/>')
    at = 0.0
    for part in PARTS:
        width = length(use.parts[part])
        if width >= 0.05:
            out.append(f'<rect class="p-{part}" x="{at:.1f}" width="{width:.1f}" height="10"/>')
        at += width
    return "".join([*out, "</svg>"])


def describe(use: GpuHours) -> str:
    """Describes the parts of the held hours, in words."""
    parts = [f"{WORDS[part].name} {number(use.parts[part])}" for part in PARTS if use.parts[part]]
    return f"{number(use.held)} GPU-hours held: {', '.join(parts)}"


def draw_week(heat: Heat) -> str:
    """Draws one cell for each hour of the week."""
    width, height = LEFT + 24 * CELL, TOP + len(heat.rows) * CELL
    out = [f'<svg class="week" viewBox="0 0 {width} {height}" role="img"><title>{html.escape(TITLE)}</title>']
    for hour in range(0, 24, 3):
        out.append(f'<text x="{LEFT + hour * CELL}" y="{TOP - 8}">{hour:02}</text>')
    for row, (day, values) in enumerate(heat.rows.items()):
        y = TOP + row * CELL
        out.append(f'<text x="0" y="{y + CELL - 6}">{day}</text>')
        for hour, value in enumerate(values):
            name = "no" if value is None else f"h{level_of(value, heat.most)}"
            said = "no data" if value is None else f"{number(value)} GPUs"
            place = f'x="{LEFT + hour * CELL}" y="{y}" width="{CELL - 2}" height="{CELL - 2}"'
            out.append(f'<rect class="{name}" {place}><title>{day} {hour:02}:00: {said}</title></rect>')
    return "\n".join([*out, "</svg>"])


def level_of(value: float, most: float) -> int:
    """Returns the shade for a number of GPUs: 0 for none, LEVELS for `most`."""
    return 0 if value <= 0.0 or most <= 0.0 else min(LEVELS, 1 + int(LEVELS * value / most))
