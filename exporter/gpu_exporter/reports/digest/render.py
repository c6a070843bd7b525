"""A digest as text for a mail or a terminal, as HTML for a mail, and as JSON."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from typing import TypeAlias

from gpu_exporter.common.plain import layout, one_line, utc
from gpu_exporter.reports.digest.oversized import GIB, Oversized
from gpu_exporter.reports.digest.read import Digest, Hours, TenantName

TENANT_HEADER = ("TENANT", "HELD", "USED", "IDLE", "STALLED", "UNKNOWN", "IDLE %", "BUSY %", "KWH", "COST OF IDLE")
HOLDER_HEADER = ("HOLDER", "OWNER", "IDLE GPU-HOURS")
OVERSIZED_HEADER = ("COULD USE LESS", "OWNER", "GPU-HOURS", "BUSY %", "MAX MEMORY", "SUFFICIENT SIZE")
CAUSE_HEADER = ("TENANT", "CAUSE", "GPU-HOURS WITH THIS CAUSE")
DAY_HEADER = ("DAY FROM (UTC)", "HELD", "USED", "IDLE", "STALLED", "UNKNOWN")
WORDS = {"OWNER", "CAUSE", "SUFFICIENT SIZE"}  # columns with texts
TOP = 15
UNKNOWN = "-"
WHOLE_MIN = 99.5
STALLED_MIN = 0.005  # share of the GPU-hours from which the sentence names them
Table: TypeAlias = tuple[Sequence[str], Sequence[tuple[str, ...]]]
STYLE = "border-collapse: collapse; font-family: sans-serif; font-size: 90%"
CELL = "padding: 2px 10px; border-bottom: 1px solid #ddd; text-align: "


def render_text(digest: Digest) -> str:
    """Tables with fixed-width columns. Ends in a newline."""
    lines = [headline(digest), ""]
    for header, rows in _tables(digest):
        lines += [*layout(header, rows, frozenset(header[1:]) - WORDS), ""]
    lines += [f"not shown: {one_line(text)}" for text in digest.missing]
    return "\n".join(lines).rstrip("\n") + "\n"


def render_html(digest: Digest) -> str:
    """One page without links or external assets, so that it can be mailed."""
    out = ["<!doctype html>", '<html><meta charset="utf-8"><body style="font-family: sans-serif">']
    out.append(f"<p>{html.escape(headline(digest))}</p>")
    for header, rows in _tables(digest):
        out.append(f'<table style="{STYLE}">')
        for at, row in enumerate((header, *rows)):
            tag = "td" if at else "th"
            sides = ["left" if not i or name in WORDS else "right" for i, name in enumerate(header)]
            cells = "".join(
                f'<{tag} style="{CELL}{side}">{html.escape(one_line(cell))}</{tag}>'
                for side, cell in zip(sides, row, strict=True)
            )
            out.append(f"<tr>{cells}</tr>")
        out.append("</table><br>")
    out += [f"<p><small>not shown: {html.escape(one_line(text))}</small></p>" for text in digest.missing]
    return "\n".join([*out, "</body></html>"]) + "\n"


def render_json(digest: Digest) -> str:
    """All values with full precision; hours are GPU-hours."""
    return (
        json.dumps(
            {
                "start": utc(digest.start).isoformat(),
                "end": utc(digest.end).isoformat(),
                "total": _fields(digest.total),
                "before": None if digest.before is None else _fields(digest.before),
                "tenants": [{**tenant._asdict(), **_fields(hours)} for tenant, hours in _by_idle(digest)],
                "days": [
                    {"start": utc(begin).isoformat(), **(_fields(day) if day is not None else NO_DATA)}
                    for begin, day in digest.days
                ],
                "holders": [
                    {**holder.name._asdict(), "title": holder.title, "owner": holder.owner, "idle_hours": holder.idle}
                    for holder in digest.holders
                ],
                "causes": [
                    {**each.tenant._asdict(), "cause": each.cause, "hours": each.hours} for each in digest.causes
                ],
                "oversized": [
                    {
                        **each.name._asdict(),
                        "title": each.title,
                        "owner": each.owner,
                        "hours": each.hours,
                        "mean_ratio": each.mean,
                        "peak_memory_bytes": each.peak,
                        "would_do": each.would_do,
                    }
                    for each in digest.oversized
                ],
                "missing": digest.missing,
            },
            indent=1,
        )
        + "\n"
    )


def headline(digest: Digest) -> str:
    """The summary in one sentence. If days lack data, a second sentence with the number of days that have data."""
    total, before = digest.total, digest.before
    start, end = (utc(wall).strftime("%Y-%m-%d %H:%M") for wall in (digest.start, digest.end))
    if not total.held:
        return f"{start} to {end} UTC: no GPU-hours were held"
    share, held = min(1.0, total.idle / total.held), _number(total.held)
    text = f"{start} to {end} UTC: {share:.0%} of the {held} GPU-hours held were idle ({_number(total.idle)}"
    text += f", cost {_number(total.cost_idle)})" if total.cost_idle else ")"
    if total.stalled >= STALLED_MIN * total.held:
        text += f"; {_number(total.stalled)} made no progress"
        text += f", cost {_number(total.cost_stalled)}" if total.cost_stalled else ""
    if before is not None and before.held:
        text += f"; the period before: {min(1.0, before.idle / before.held):.0%} of {_number(before.held)}"
    known = sum(day is not None for _, day in digest.days)
    return text if known == len(digest.days) else f"{text}. Data of {known} of {len(digest.days)} days"


def _number(value: float) -> str:
    """One decimal place below 100: a rounder number would contradict the percentage in the same sentence."""
    return f"{value:,.0f}" if value >= WHOLE_MIN else f"{value:,.1f}"


def _tables(digest: Digest) -> list[Table]:
    rows = [(str(tenant), *_cells(hours)) for tenant, hours in _by_idle(digest)]
    tables: list[Table] = [(TENANT_HEADER, [*rows, ("all", *_cells(digest.total))])]
    if digest.holders:
        top = [(holder.title, holder.owner or UNKNOWN, f"{holder.idle:,.1f}") for holder in digest.holders[:TOP]]
        tables.append((HOLDER_HEADER, top))
    if digest.causes:
        top = [(str(each.tenant), each.cause, f"{each.hours:,.1f}") for each in digest.causes[:TOP]]
        tables.append((CAUSE_HEADER, top))
    if digest.oversized:
        tables.append((OVERSIZED_HEADER, [_cells_of(each) for each in digest.oversized[:TOP]]))
    if len(digest.days) > 1:
        days = [
            (utc(begin).strftime("%a %Y-%m-%d %H:%M"), *(_cells(day)[:5] if day is not None else (UNKNOWN,) * 5))
            for begin, day in digest.days
        ]
        tables.append((DAY_HEADER, days))
    return tables


def _cells_of(each: Oversized) -> tuple[str, ...]:
    memory = f"{each.peak / GIB:.1f} GiB"
    return each.title, each.owner or UNKNOWN, f"{each.hours:,.1f}", f"{each.mean:.0%}", memory, each.would_do


def _by_idle(digest: Digest) -> list[tuple[TenantName, Hours]]:
    return sorted(digest.tenants.items(), key=lambda item: (-item[1].idle, item[0]))


def _cells(hours: Hours) -> tuple[str, ...]:
    return (
        f"{hours.held:,.1f}",
        f"{hours.used:,.1f}",
        f"{hours.idle:,.1f}",
        f"{hours.stalled:,.1f}",
        f"{hours.unknown:,.1f}",
        f"{min(1.0, hours.idle / hours.held):.0%}" if hours.held else UNKNOWN,
        f"{min(1.0, hours.busy / hours.known):.0%}" if hours.known else UNKNOWN,
        UNKNOWN if hours.energy_kwh is None else f"{hours.energy_kwh:,.1f}",
        f"{hours.cost_idle:,.2f}" if hours.cost else UNKNOWN,
    )


def _fields(hours: Hours) -> dict[str, float | None]:
    names = {name: f"{name}_hours" for name in ("held", "known", "busy", "idle", "stalled", "unpriced")}
    return {names.get(name, name): value for name, value in vars(hours).items()}


NO_DATA = dict.fromkeys(_fields(Hours()))
