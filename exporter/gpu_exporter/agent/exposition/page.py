"""Renders the status page: one HTML document without external files, which reloads itself.

Colours follow the state's meaning and pass WCAG AA on their background in both colour schemes.
"""

from __future__ import annotations

import html
import re
from collections.abc import Sequence

from gpu_exporter.agent.exposition.json_format import list_rows
from gpu_exporter.agent.node.conditions import why_unusable
from gpu_exporter.common.durations import format_age
from gpu_exporter.common.model.meanings import STATES, sentence
from gpu_exporter.common.model.rows import Row, format_ratio
from gpu_exporter.common.model.units import UnitId
from gpu_exporter.common.model.views import History, View
from gpu_exporter.common.plain import one_line

HTML_TYPE = "text/html; charset=utf-8"
SPARK_WIDTH, SPARK_HEIGHT = 120, 30
SPARK_POINTS = 60  # longer histories are averaged to this number of points: a page of 56 holders stays below 100 kB

COLUMNS = (
    "GPU",
    "Last ten minutes",
    "Util",
    "Memory",
    "Power",
    "Temp",
    "Holder",
    "Held",
    "Idle",
    "State",
)
NUMERIC = frozenset(("Util", "Memory", "Power", "Temp", "Held", "Idle"))

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #59636e; --line: #d8dee4; --back: #ffffff; --panel: #f6f8fa;
  --good: #116329; --good-back: #dafbe1; --warn: #7d4e00; --warn-back: #fff8c5; --bad: #a40e26; --bad-back: #ffebe9;
  --neutral: #59636e; --neutral-back: #eaeef2; --spark: #0969da; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9198a1; --line: #3d444d; --back: #0d1117;
  --panel: #151b23; --good: #7ee787; --good-back: #12261e; --warn: #f2cc60; --warn-back: #272115; --bad: #ffa198;
  --bad-back: #2d1418; --neutral: #9198a1; --neutral-back: #212830; --spark: #58a6ff; } }
body { margin: 0; background: var(--back); color: var(--ink);
  font: clamp(14px, .35vw + 9px, 20px)/1.45 system-ui, -apple-system, "Segoe UI", "Liberation Sans", sans-serif; }
main { max-width: 2400px; margin: 0 auto; padding: 24px; }
header { display: flex; flex-wrap: wrap; gap: 4px 24px; align-items: baseline; }
h1 { font-size: 1.4em; margin: 0; }
.soft { color: var(--soft); }
.tiles { display: flex; flex-wrap: wrap; gap: 8px; margin: 16px 0; }
.tile { background: var(--panel); border: 1px solid var(--line); border-radius: 6px; padding: 8px 12px;
  min-width: 96px; }
.tile b { display: block; font-size: 1.6em; font-variant-numeric: tabular-nums; }
.banner { border-radius: 6px; padding: 10px 16px; margin: 12px 0; background: var(--bad-back); color: var(--bad); }
.note { background: var(--neutral-back); color: var(--neutral); }
#filter { font: inherit; color: inherit; background: var(--panel); border: 1px solid var(--line); border-radius: 6px;
  padding: 6px 10px; width: min(24em, 100%); box-sizing: border-box; margin-left: auto; }
table { border-collapse: collapse; width: 100%; }
th { text-align: left; font-weight: 600; background: var(--panel); color: var(--soft); position: sticky; top: 0; }
th, td { padding: 6px 8px; white-space: nowrap; vertical-align: middle; }
thead, tbody { border-bottom: 1px solid var(--line); }
td small { display: block; color: var(--soft); }
.num { text-align: right; font-variant-numeric: tabular-nums; }
.who { white-space: normal; overflow-wrap: anywhere; min-width: 9em; }
.why { white-space: normal; overflow-wrap: anywhere; padding-top: 0; }
.state { display: inline-block; border-radius: 10px; padding: 1px 10px; font-weight: 600; }
.good { color: var(--good); background: var(--good-back); }
.warn { color: var(--warn); background: var(--warn-back); }
.bad { color: var(--bad); background: var(--bad-back); }
.neutral { color: var(--neutral); background: var(--neutral-back); }
svg { display: block; background: var(--panel); }
svg path { fill: var(--spark); fill-opacity: .25; stroke: var(--spark); }
svg rect { fill: var(--line); }
footer { margin-top: 16px; } a { color: var(--spark); }
@media (max-width: 860px) {
  main { padding: 12px; } #filter { width: 100%; }
  table, tbody, tr, td { display: block; } thead { display: none; }
  tbody { border: 1px solid var(--line); border-radius: 6px; margin-bottom: 10px; padding: 6px 10px; }
  td { display: flex; justify-content: space-between; gap: 16px; border: 0; padding: 2px 0; white-space: normal;
    text-align: right; overflow-wrap: anywhere; }
  td::before { content: attr(data-of); color: var(--soft); text-align: left; flex: none; }
  tbody[hidden] { display: none; }
}
@media print { #filter, footer { display: none; } main { padding: 0; max-width: none; } th { position: static; }
  body { font-size: 10px; } tbody { break-inside: avoid; } }
"""
# Without JavaScript, the page reloads every few seconds and shows all rows.
SCRIPT = """
const every = %d;
const field = document.getElementById('filter');
const silent = document.getElementById('silent');
function show() {
  const words = field.value.toLowerCase().split(/\\s+/);
  for (const holder of document.querySelectorAll('tbody')) {
    const text = holder.textContent.toLowerCase();
    holder.hidden = !words.every((word) => text.includes(word));
  }
}
async function read() {
  try {
    const answer = await fetch(location.pathname, {cache: 'no-store', signal: AbortSignal.timeout(1000 * every)});
    const page = new DOMParser().parseFromString(await answer.text(), 'text/html');
    const next = page.getElementById('now');
    if (!answer.ok || !next) throw new Error('the answer is not this page');
    document.getElementById('now').replaceWith(next);
    silent.hidden = true;
    show();
  } catch {
    silent.textContent = 'The exporter does not answer. This page shows old values.';
    silent.hidden = false;
  }
}
field.hidden = false;
field.addEventListener('input', show);
setInterval(read, every * 1000);
show();
"""


def escape(text: str) -> str:
    """Returns the text as HTML, on one line."""
    return html.escape(one_line(text))


def render_page(view: View, history: History, refresh_s: int = 5) -> str:
    """Returns the whole HTML document. It reloads itself every `refresh_s` seconds."""
    rows = list_rows(view)
    status = view.status
    parts = [
        "<!doctype html>\n<html lang=en><head><meta charset=utf-8>",
        f'<noscript><meta http-equiv=refresh content="{refresh_s}"></noscript>',
        '<meta name=viewport content="width=device-width, initial-scale=1"><title>gpu-exporter</title>',
        f"<style>{STYLE}</style></head><body><main>",
        f"<header><h1>gpu-exporter</h1><span class=soft>version {escape(status.version)}, "
        f"backend {escape(status.backend)}, sampled every {status.sample_interval_s:g} s</span>"
        '<input id=filter type=search aria-label="Show only the rows that contain these words" hidden '
        'placeholder="Filter: holder, owner, state"></header>',
        "<p id=silent class=banner role=alert hidden></p><div id=now>",
    ]
    if status.note:
        parts.append(f'<p class="banner note">{escape(status.note)}</p>')
    if not status.driver_up and status.expects_gpus:
        parts.append(f"<p class=banner>No GPU data: {escape(status.driver_error)}</p>")
    elif not status.driver_up:
        parts.append(f'<p class="banner note">The exporter expects no GPU here: {escape(status.driver_error)}</p>')
    parts += [
        f"<p class=banner>Attribution {escape(source.name)}: {escape(source.error)}</p>"
        for source in status.sources
        if source.error
    ]
    parts += [
        f'<p class="banner note">Attribution {escape(source.name)}: {escape(source.notice)}</p>'
        for source in status.sources
        if source.notice
    ]
    parts += [f'<p class="banner warn">{escape(warning)}</p>' for warning in status.warnings]
    parts.append(_tiles(view, rows))
    if rows:
        parts.append(_table(view, rows, history))
    parts.append("</div>")
    parts.append(
        "<footer class=soft>"
        '<a href="/api/v1/metrics">metrics</a> · <a href="/api/v1/status">JSON</a> · '
        '<a href="/-/healthy">healthy</a> · <a href="/-/ready">ready</a></footer></main>'
        f"<script>{SCRIPT % refresh_s}</script></body></html>\n"
    )
    return "".join(parts)


def _tiles(view: View, rows: Sequence[Row]) -> str:
    states = [row.state for row in rows]
    unusable = sum(bool(why_unusable(gpu)) for gpu in view.gpus)
    tiles = [
        ("GPUs answering", f"{view.status.devices_visible}"),
        ("Allocations", str(len(view.allocations))),
        ("Free", str(states.count("free"))),
        *([("Closed", str(states.count("closed")))] if "closed" in states else []),
        ("Held and idle", str(states.count("held_idle") + states.count("held_no_process"))),
        ("Stalled", str(states.count("stalled"))),
        ("Unknown", str(states.count("unknown"))),
        ("Low or bursty", str(states.count("low") + states.count("bursty"))),
        ("Throttled", str(states.count("throttled"))),
        ("Unusable", str(unusable)),
    ]
    cells = "".join(f"<div class=tile><b>{value}</b>{name}</div>" for name, value in tiles)
    return f"<div class=tiles>{cells}</div>"


def _table(view: View, rows: Sequence[Row], history: History) -> str:
    sparks: dict[str, str] = {}
    for gpu in view.gpus:
        identity = gpu.snapshot.identity
        index = identity.label
        sparks[index] = _spark(*history(UnitId(identity.uuid)))
        for instance in gpu.snapshot.instances:
            sparks[f"{index}:{instance.mig}"] = _spark(*history(UnitId(identity.uuid, instance.uuid)))
    head = "".join(f"<th scope=col{' class=num' if name in NUMERIC else ''}>{name}</th>" for name in COLUMNS)
    by_waste = sorted(rows, key=lambda row: -row.wasted_s)  # rows of equal waste keep the order of the GPUs
    body = "".join(_row(row, sparks.get(row.gpu, "")) for row in by_waste)
    return f"<table><thead><tr>{head}</tr></thead>{body}</table>"


def _row(row: Row, spark: str) -> str:
    """Returns a holder's table row, and a second row over all columns with the reason for its state and the advice."""
    gpu, name, utilization, memory, power, temperature, holder, owner, held, idle, state, cause, _ = map(
        escape, row.texts
    )
    meaning = escape(sentence(STATES[row.state].says)) if row.state in STATES else ""
    age = "" if row.utilization is None or row.age_s is None else f"{format_age(row.age_s)} ago"
    cells = (
        _two_lines(gpu, name),
        spark,
        _two_lines(utilization, age),
        memory,
        power,
        _two_lines(temperature, escape(_say_throttling(row))),
        _two_lines(holder, owner if row.owner else ""),
        held,
        idle,
        _two_lines(f'<span class="state {row.tone}" title="{meaning}">{state}</span>' if row.state else "", cause),
    )
    styles = {"Holder": "who"} | dict.fromkeys(NUMERIC, "num")
    shown = (
        f'<td data-of="{column}"{f" class={styles[column]}" if column in styles else ""}>{cell}</td>'
        for column, cell in zip(COLUMNS, cells, strict=True)
    )
    why = _two_lines(escape(row.short_why), escape(row.advice))
    below = f"<tr><td data-of=Why class=why colspan={len(COLUMNS)}>{why}</td></tr>" if why else ""
    return f"<tbody><tr>{''.join(shown)}</tr>{below}</tbody>"


def _two_lines(first: str, second: str) -> str:
    return f"<span>{first}<small>{second}</small></span>" if second else first


def _say_throttling(row: Row) -> str:
    """Returns the throttled share of the time with the reason, or `not throttled`; "" if unknown."""
    if row.throttling is None:
        return ""
    share = format_ratio(row.throttling.ratio)
    return "not throttled" if share == format_ratio(0.0) else f"{share} {row.throttling.reason}"


def _spark(buckets: Sequence[float | None], bucket_s: float) -> str:
    """Returns an SVG of the utilization as an area, with grey blocks for unknown time. A short text if all time is
    unknown.
    """
    if not any(value is not None for value in buckets):
        return "<span class=soft>activity unknown</span>"
    values = _shrink(buckets)
    step = SPARK_WIDTH / len(values)
    bottom = SPARK_HEIGHT - 1
    path, gaps, before = "", "", None
    for position, value in enumerate(values):
        x, end = round(position * step), round((position + 1) * step)
        if value is None:
            gaps += f"<rect x={x} width={end - x} height={SPARK_HEIGHT} />"
            path += f"V{bottom}" if before is not None else ""
        else:
            y = round(1 + (bottom - 1) * (1 - value))
            path += f"M{x} {bottom}V{y}" if before is None else f"V{y}" if y != before else ""
            path += f"H{end}"
            value = y
        before = value
    path += f"V{bottom}" if before is not None else ""
    path = re.sub(r"H\d+(?=H)", "", path)
    known_values = [value for value in buckets if value is not None]
    mean = sum(known_values) / len(known_values)
    title = f"mean {mean:.0%} over {format_age(len(known_values) * bucket_s)} of known time"
    return (
        f'<svg width={SPARK_WIDTH} height={SPARK_HEIGHT} role=img aria-label="{title}"><title>{title}</title>'
        f'{gaps}<path d="{path}"/></svg>'
    )


def _shrink(values: Sequence[float | None]) -> list[float | None]:
    """Reduces the values to at most SPARK_POINTS. Each is the mean of the known values in its part of the time."""
    per_point = max(1, -(-len(values) // SPARK_POINTS))
    shrunk: list[float | None] = []
    for start in range(0, len(values), per_point):
        known = [value for value in values[start : start + per_point] if value is not None]
        shrunk.append(sum(known) / len(known) if known else None)
    return shrunk
