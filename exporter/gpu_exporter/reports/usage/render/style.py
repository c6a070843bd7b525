"""The style sheet of the page of a report."""

from __future__ import annotations

from gpu_exporter.reports.usage.render.svg import LEVELS

# Colours that remain different for colour-blind readers, after Okabe and Ito (2008), with greys for hours without work.
COLORS = {
    "starting": ("#a6cee3", "#7fb2cf"),
    "used": ("#0072b2", "#3d9bd4"),
    "low": ("#56b4e9", "#8accf0"),
    "stalled": ("#cc79a7", "#d994bb"),
    "idle": ("#d55e00", "#f07a1c"),
    "unproven": ("#e69f00", "#f0b93f"),
    "unknown": ("#b5b5b5", "#6f6f6f"),
    "faulty": ("#4a4a4a", "#d0d0d0"),
}
STYLE = """
:root { --text: #1d2329; --dim: #5b6670; --back: #fff; --line: #d9dee3; --soft: #f4f6f8; --heat: 213, 94, 0; }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 16px; max-width: 1120px; color: var(--text); background: var(--back);
  font: 15px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.15rem; margin: 0 0 8px; font-weight: 600; }
h2 { font-size: 1rem; margin: 28px 0 8px; }
p { margin: 6px 0; overflow-wrap: anywhere; }
.first { font-size: 1.25rem; font-weight: 600; line-height: 1.3; }
.dim, .note { color: var(--dim); font-size: .87rem; }
.cards { display: grid; grid-template-columns: repeat(4, 1fr); gap: 10px; margin: 14px 0; }
.card { border: 1px solid var(--line); border-top-width: 4px; border-radius: 6px; padding: 8px 12px; }
.card b { display: block; font-size: 1.5rem; font-variant-numeric: tabular-nums; }
.card span { display: block; font-size: .87rem; color: var(--dim); }
.bars { display: grid; grid: auto-flow dense / minmax(110px, 240px) 1fr max-content; gap: 6px 12px;
  align-items: center; }
.bars .plot { grid-column: 2; }
.bars .name { grid-column: 1; overflow-wrap: anywhere; }
.bars .member { padding-left: 16px; color: var(--dim); }
.bars .value { grid-column: 3; text-align: right; font-variant-numeric: tabular-nums; }
svg.bar { width: 100%; height: 16px; display: block; }
svg.bar .held { fill: var(--line); }
svg.week { width: 100%; max-width: 640px; display: block; }
svg.week text { font-size: 17px; fill: var(--dim); }
svg.week .no { fill: none; stroke: var(--line); }
svg.week .h0 { fill: var(--line); }
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; margin: 10px 0 0; padding: 0; list-style: none;
  font-size: .87rem; }
.legend i { display: inline-block; width: 12px; height: 12px; margin-right: 6px; vertical-align: -1px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; min-width: 60%; font-size: .87rem; }
th, td { padding: 4px 9px; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line);
  font-variant-numeric: tabular-nums; }
th { color: var(--dim); font-weight: 600; font-size: .74rem; background: var(--soft); white-space: normal;
  vertical-align: bottom; }
tr:last-child td { border-bottom: 0; }
th.word, td.word { text-align: left; }
td.long { white-space: normal; min-width: 180px; overflow-wrap: anywhere; }
tr.sum td { font-weight: 600; background: var(--soft); }
tr.member td:first-child { padding-left: 26px; }
tr.member td, tr.rest td { color: var(--dim); }
ul.notes { padding-left: 18px; color: var(--dim); font-size: .87rem; overflow-wrap: anywhere; }
@media (max-width: 640px) {
  body { padding: 12px; }
  .first { font-size: 1.1rem; }
  .cards { grid-template-columns: repeat(2, 1fr); }
  .card b { font-size: 1.25rem; }
  .bars { grid: auto-flow / 1fr max-content; gap: 2px 10px; }
  .bars .plot { grid-column: 1 / 3; margin-bottom: 6px; }
  .bars .value { grid-column: 2; }
}
@media (prefers-color-scheme: dark) {
  :root { --text: #e4e8ec; --dim: #9aa5b0; --back: #14181c; --line: #333b43; --soft: #1d2329; --heat: 240, 122, 28; }
DARK}
@media print {
  :root { --text: #000; --dim: #444; --back: #fff; --line: #bbb; --soft: #f2f2f2; --heat: 213, 94, 0; }
  @page { size: A4; margin: 12mm; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  body { padding: 0; max-width: none; font-size: 10.5pt; }
  .scroll { overflow: visible; }
  table { font-size: 7.5pt; min-width: 0; }
  th { font-size: 5.5pt; }
  td.long { min-width: 90px; }
  th, td { padding: 2px 3px; }
  section, .cards { break-inside: avoid; }
  section.tenants { break-inside: auto; }
LIGHT}
"""


def style() -> str:
    """Returns the style sheet of the page, for light and dark colours, phone and paper."""
    light, dark = ("".join(_colored(part, pair[at]) for part, pair in COLORS.items()) for at in (0, 1))
    heat = "".join(
        f"svg.week .h{level} {{ fill: rgba(var(--heat), {0.1 + 0.9 * level / LEVELS:.2f}); }}\n"
        for level in range(1, LEVELS + 1)
    )
    return STYLE.replace("DARK", dark).replace("LIGHT", light).replace(":root", f"{light}{heat}:root", 1)


def _colored(part: str, color: str) -> str:
    return f".p-{part} {{ fill: {color}; background: {color}; }} .card.top-{part} {{ border-top-color: {color}; }}\n"
