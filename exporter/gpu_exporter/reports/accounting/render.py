"""Renders the comparison of a report with sacct, as tables for people and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence

from gpu_exporter.common.plain import layout, one_line, utc
from gpu_exporter.reports.accounting.compare import ALL, AccountHours

NOT_KNOWN = "(not known)"
HEADER = ("ACCOUNT", "RUNS", "SACCT", "HELD", "DIFFERENCE", "NOT EXPLAINED")
WHY = ("ACCOUNT", "GPU-SECONDS", "REASON FOR THE DIFFERENCE")
NAME_MAX = 24
SHOWN_MIN = 0.5  # GPU-seconds


def render_json(found: AccountHours) -> str:
    """Renders JSON. All times are GPU-seconds."""
    rows = [
        {
            "account": account,
            "runs": time.runs,
            "sacct_gpu_seconds": time.recorded,
            "held_gpu_seconds": time.held,
            "difference_gpu_seconds": time.difference,
            "reasons_gpu_seconds": {reason.name: reason.gpu_seconds for reason in time.reasons()},
        }
        for account, time in sorted(found.accounts.items())
    ]
    period = {name: utc(wall).isoformat() for name, wall in (("start", found.start), ("end", found.end))}
    return json.dumps({**period, "accounts": rows, "notes": found.notes}, indent=1) + "\n"


def render_text(found: AccountHours) -> str:
    """Renders two tables: the difference of each account, and the reasons for it."""
    start, end = (utc(wall).strftime("%Y-%m-%d %H:%M") for wall in (found.start, found.end))
    rows, why = list[Sequence[str]](), list[Sequence[str]]()
    for account, time in (*sorted(found.accounts.items()), (ALL, found.total)):
        name, reasons = one_line(account or NOT_KNOWN, NAME_MAX), time.reasons()
        seconds = (f"{value:,.0f}" for value in (time.recorded, time.held))
        shares = (_share(value, time.recorded) for value in (time.difference, reasons[-1].gpu_seconds))
        rows.append((name, f"{time.runs:,}", *seconds, *shares))
        if account != ALL:
            why += [(name, f"{r.gpu_seconds:+,.0f}", r.text) for r in reasons if abs(r.gpu_seconds) >= SHOWN_MIN]
    lines = [f"GPU-seconds by sacct and by the nodes, {start} to {end} UTC", ""]
    lines += layout(HEADER, rows, frozenset(HEADER[1:]))
    lines += ["", *layout(WHY, why, frozenset(WHY[1:2]))] if why else []
    return (
        "\n".join([*lines, "", *(f"Note: {one_line(note).rstrip('.')}." for note in found.notes)]).rstrip("\n") + "\n"
    )


def _share(part: float, whole: float) -> str:
    return f"{part / whole:+.1%}" if whole else "-"


FORMS = {"text": render_text, "json": render_json}
