"""A digest as text for a mail or a terminal, as HTML for a mail, and as JSON."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from gpu_exporter.common.durations import describe_duration
from gpu_exporter.common.model.meanings import CAUSES
from gpu_exporter.common.plain import layout, one_line, utc
from gpu_exporter.common.promql.absence import moment
from gpu_exporter.reports.digest.hours import Hours, TenantName, add_up
from gpu_exporter.reports.digest.oversized import GIB, Oversized
from gpu_exporter.reports.digest.read import Digest

TENANT_HEADER = ("TENANT", "HELD", "USED", "IDLE", "STALLED", "UNKNOWN", "IDLE %", "BUSY %", "KWH", "COST OF IDLE")
HOLDER_HEADER = ("HOLDER", "OWNER", "IDLE GPU-HOURS")
OVERSIZED_HEADER = ("COULD USE LESS", "OWNER", "GPU-HOURS", "BUSY %", "MAX MEMORY", "SUFFICIENT SIZE")
CAUSE_HEADER = ("TENANT", "GPU-HOURS", "CAUSE", "IN WORDS", "WHAT TO CHANGE")
DAY_HEADER = ("DAY FROM (UTC)", "HELD", "USED", "IDLE", "STALLED", "UNKNOWN")
WORDS = {"OWNER", "CAUSE", "IN WORDS", "WHAT TO CHANGE", "SUFFICIENT SIZE"}  # columns with texts
TOP = 15
UNKNOWN = "-"
SHOWN_MIN = 0.05  # GPU-hours: less is printed as 0.0
WHOLE_MIN = 99.5
FAILED_MIN = 0.001  # share of failed scrapes from which the digest names it
STALLED_MIN = 0.005  # share of the GPU-hours from which the sentence names them
Table: TypeAlias = tuple[Sequence[str], Sequence[tuple[str, ...]]]
STYLE = "border-collapse: collapse; font-family: sans-serif; font-size: 90%"
CELL = "padding: 2px 10px; border-bottom: 1px solid #ddd; text-align: "


def render_text(digest: Digest) -> str:
    """Tables with fixed-width columns. Ends in a newline."""
    lines = [headline(digest), coverage(digest), ""]
    for header, rows in _tables(digest):
        lines += [*layout(header, rows, frozenset(header[1:]) - WORDS), ""]
    lines += [one_line(text) for text in _notes(digest)]
    return "\n".join(lines).rstrip("\n") + "\n"


def render_html(digest: Digest) -> str:
    """One page without links or external assets, so that it can be mailed."""
    out = ["<!doctype html>", '<html><meta charset="utf-8"><body style="font-family: sans-serif">']
    out.append(f"<p>{html.escape(headline(digest))}<br>{html.escape(coverage(digest))}</p>")
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
    out += [f"<p><small>{html.escape(one_line(text))}</small></p>" for text in _notes(digest)]
    return "\n".join([*out, "</body></html>"]) + "\n"


def render_json(digest: Digest) -> str:
    """All values with full precision, null where the text has `-`. Hours are GPU-hours."""
    seen = digest.seen
    shown: dict[str, object] = {
        "start": utc(digest.start).isoformat(),
        "end": utc(digest.end).isoformat(),
        "seen": None
        if seen is None
        else {
            "seconds": seen.seconds,
            "period_seconds": seen.span,
            "since": None if seen.since is None else utc(seen.since).isoformat(),
            "failed_scrapes_ratio": seen.failed,
        },
        "currency": digest.currency or None,
        "idle_short_seconds": digest.idle_short_s,
        "total": digest.total.figures(),
        "before": None if digest.before is None else digest.before.figures(),
        "tenants": [{**tenant._asdict(), **hours.figures()} for tenant, hours in _by_idle(digest.tenants)],
        "subtotals": [
            {**{name: text for name, text in group._asdict().items() if name != "user"}, **hours.figures()}
            for group, hours in _by_idle({group: add_up(of.values()) for group, of in digest.by_group().items()})
        ],
        "days": [
            {"start": utc(begin).isoformat(), **(day.figures() if day is not None else NO_DATA)}
            for begin, day in digest.days
        ],
        "holders": None
        if digest.holders is None
        else [
            {
                **holder.name._asdict(),
                "cluster": holder.cluster,
                "title": holder.title,
                "owner": holder.owner,
                "idle_hours": holder.idle,
            }
            for holder in digest.holders
        ],
        "causes": [
            {**each.tenant._asdict(), "cause": each.cause, "hours": each.hours, "advice": _meant(each.cause)[1]}
            for each in digest.causes
        ],
        "oversized": None
        if digest.oversized is None
        else [
            {
                **each.name._asdict(),
                "cluster": each.cluster,
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
    }
    return json.dumps(shown, indent=1) + "\n"


def headline(digest: Digest) -> str:
    """The summary in one sentence."""
    total, before = digest.total, digest.before
    start, end = (utc(wall).strftime("%Y-%m-%d %H:%M") for wall in (digest.start, digest.end))
    if not total.held:
        return f"{start} to {end} UTC: no GPU-hours were held"
    shown = total.figures()
    text = f"{start} to {end} UTC: "
    if shown["idle_ratio"] is None or total.idle is None:
        text += f"{_number(total.held)} GPU-hours were held"
    else:
        cost = _money(shown["cost_idle"], digest)
        text += f"{shown['idle_ratio']:.0%} of the {_number(total.held)} GPU-hours held were idle"
        text += f" ({_number(total.idle)}{cost})"
    if total.stalled is not None and total.stalled >= STALLED_MIN * total.held:
        text += f"; {_number(total.stalled)} made no progress{_money(shown['cost_stalled'], digest)}"
    if before is not None and before.held and (ratio := before.figures()["idle_ratio"]) is not None:
        text += f"; the period before: {ratio:.0%} of {_number(before.held)}"
    return text


def coverage(digest: Digest) -> str:
    """The known part of the period, in one or two sentences."""
    known = f"data of {sum(day is not None for _, day in digest.days)} of {len(digest.days)} days"
    seen = digest.seen
    if seen is None:
        return f"Seen: {known}"
    span = describe_duration(seen.span)
    text = f"Seen: {span if seen.is_whole else describe_duration(seen.seconds)} of {span}, {known}"
    if seen.since is not None and not seen.is_whole:
        whole = seen.since + seen.span
        text += f", since {moment(seen.since)}: the whole period is known from {moment(whole)} on"
    if seen.failed is not None and seen.failed >= FAILED_MIN:
        text += f". {seen.failed:.1%} of the scrapes failed: hours that no exporter counted are in no column"
    return text


def _money(cost: float | None, digest: Digest) -> str:
    return f", cost {_number(cost)}{f' {digest.currency}' * bool(digest.currency)}" if cost else ""


def _notes(digest: Digest) -> list[str]:
    """Notes below the digest: the meaning of its words, and the missing data."""
    short = f"; in the list of holders for at least {describe_duration(digest.idle_short_s)} (alerts.idle_short)"
    notes = [f"idle: utilization 0 and no other activity, for any time{short if digest.holders else ''}"]
    if digest.total.unproven >= SHOWN_MIN:
        hours = _number(digest.total.unproven)
        notes.append(f"neither used nor idle: {hours} GPU-hours at utilization 0, which no second witness confirms")
    if digest.currency and digest.total.is_priced:
        notes.append(f"cost: in {digest.currency}")
    return [*notes, *(f"not shown: {text}" for text in digest.missing)]


def _number(value: float) -> str:
    """Formats a number, below 100 with one decimal place, so that it agrees with the percentage beside it."""
    return f"{value:,.0f}" if value >= WHOLE_MIN else f"{value:,.1f}"


def _tables(digest: Digest) -> list[Table]:
    groups = {group: add_up(tenants.values()) for group, tenants in digest.by_group().items()}
    rows = []
    for group, hours in _by_idle(groups):
        tenants = digest.by_group()[group]
        if len(tenants) > 1:
            rows.append((f"{group}: {len(tenants)} users", *_cells(hours)))
        rows += [(str(tenant), *_cells(hours)) for tenant, hours in _by_idle(tenants)]
    tables: list[Table] = [(TENANT_HEADER, [*rows, ("all", *_cells(digest.total))])]
    if digest.holders:
        top = [(holder.title, holder.owner or UNKNOWN, f"{holder.idle:,.1f}") for holder in digest.holders[:TOP]]
        tables.append((HOLDER_HEADER, top))
    if digest.causes:
        caused = [
            (str(each.tenant), f"{each.hours:,.1f}", each.cause, *_meant(each.cause)) for each in digest.causes[:TOP]
        ]
        tables.append((CAUSE_HEADER, caused))
    if digest.oversized:
        tables.append((OVERSIZED_HEADER, [_cells_of(each) for each in digest.oversized[:TOP]]))
    if len(digest.days) > 1:
        days = [
            (utc(begin).strftime("%a %Y-%m-%d %H:%M"), *(_cells(day)[:5] if day is not None else (UNKNOWN,) * 5))
            for begin, day in digest.days
        ]
        tables.append((DAY_HEADER, days))
    return tables


def _meant(cause: str) -> tuple[str, str]:
    """A cause in a few words, and the change that its owner, or else the site, can make; UNKNOWN for a newer cause."""
    meaning = CAUSES.get(cause)
    return (UNKNOWN, UNKNOWN) if meaning is None else (meaning.title, meaning.owner or meaning.site or UNKNOWN)


def _cells_of(each: Oversized) -> tuple[str, ...]:
    memory = f"{each.peak / GIB:.1f} GiB"
    return each.title, each.owner or UNKNOWN, f"{each.hours:,.1f}", f"{each.mean:.0%}", memory, each.would_do


def _by_idle(tenants: Mapping[TenantName, Hours]) -> list[tuple[TenantName, Hours]]:
    return sorted(tenants.items(), key=lambda item: (-(item[1].idle or 0.0), item[0]))


def _cells(hours: Hours) -> tuple[str, ...]:
    shown = hours.figures()
    return (
        *(_cell(shown[f"{name}_hours"]) for name in ("held", "used", "idle", "stalled", "unknown")),
        *(_cell(shown[f"{name}_ratio"], ".0%") for name in ("idle", "busy")),
        _cell(shown["energy_kwh"]),
        _cell(shown["cost_idle"] if shown["cost"] else None, ",.2f"),
    )


def _cell(value: float | None, form: str = ",.1f") -> str:
    return UNKNOWN if value is None else format(value, form)


NO_DATA = dict.fromkeys(Hours().figures())
