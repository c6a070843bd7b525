"""Renders a backtest as text, JSON or CSV. The same history gives the same bytes."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from gpu_exporter.common.durations import describe_duration
from gpu_exporter.common.plain import layout, one_line, percent, utc
from gpu_exporter.reports.backtest.lives import LEFT, LOST, OPEN, UNSEEN, WORK
from gpu_exporter.reports.backtest.model import Backtest, PolicyResult
from gpu_exporter.reports.backtest.replay import FATES
from gpu_exporter.reports.backtest.sums import DIMENSIONS, Figures, IdleStretch, Tally, owner_of, sort_rows
from gpu_exporter.reports.usage.model import FLOORS
from gpu_exporter.reports.usage.render.text import SHADES, shade
from gpu_exporter.reports.usage.render.to_csv import safe_cell
from gpu_exporter.reports.usage.render.view import number

TOP = 10  # rows of a table
OF_FATES = {  # what happened after a decision
    "returned": "worked within 60 min",
    "later": "worked later",
    "idle": "not seen at work again",
    "ended": "ended by itself, idle",
    "taken": "ended, and began again: preempted, evicted or failed",
    "lost": "lost with its node",
    "unknown": "not seen for a part of the 60 min",
    "open": "decided in the last 60 min of the period",
}
ENDS = {WORK: "work", UNSEEN: "not seen", LEFT: "the holder ended", LOST: "the node was lost", OPEN: "goes on"}
COLUMNS = ("DECISIONS", "GPUS", "IDLE GPU-H", "NEVER BACK", "MONEY", "REGRET", "EVER BACK")


def render_text(test: Backtest) -> str:
    period = f"{utc(test.start):%Y-%m-%d %H:%M} to {utc(test.end):%Y-%m-%d %H:%M} UTC"
    lines = [f"Backtest, {period}: {test.holders:,} pods and jobs", ""]
    for policy in test.policies:
        lines += [*_policy(test, policy), ""]
    if test.overlap is not None:
        names = ("both policies", f"only {test.policies[0].name}", f"only {test.policies[1].name}")
        lines += ["The same idle time:", *_table("BY", dict(zip(names, test.overlap, strict=True)).items()), ""]
    proof = "with unproven zeros, TO BE INVESTIGATED" if test.are_unproven else "with proven zeros"
    lines += [f"By underused_after{', and by the engine activity that counts as zero' * _has_floors(test)}, {proof}:"]
    lines += [
        *_table("WINDOW", _windows(test)),
        "",
        f"The longest idle stretches (utilization: {SHADES[0]} 0, {SHADES[-1]} above 75 %, blank: no data):",
        *_stretches(test.longest),
        "",
    ]
    lines += ["The table suggests (a configuration file):", *(one_line_of(line) for line in test.suggested), ""]
    lines += [
        f"source: {'; it does not show: '.join(filter(None, (e.name, '; '.join(e.cannot))))}" for e in test.sources
    ]
    lines += [f"not known here: {each}" for each in test.missing]
    lines += [f"left out: {each}" for each in test.left_out]
    return "\n".join([*map(str.rstrip, lines)]) + "\n"


def _policy(test: Backtest, policy: PolicyResult) -> Iterator[str]:
    tally = policy.tally
    figures = tally.total
    yield f"Policy {one_line(policy.name)}{f', engine activity up to {test.floor:g} is zero' * _has_floors(test)}:"
    yield (
        f"{tally.candidates:,} candidates; {figures.decisions:,} decisions `underused`; "
        f"{number(figures.hours)} GPU-hours were idle after them{_money(figures, test.currency)}"
    )
    yield (
        f"regret: {percent(figures.regret)} worked within 60 min ({figures.fates['returned']:,} of "
        f"{figures.known:,} known); {percent(figures.ever)} ever worked again"
    )
    yield from (f"  {figures.fates[fate]:>7,}  {text}" for fate, text in OF_FATES.items() if figures.fates[fate])
    if policy.unproven:
        yield "TO BE INVESTIGATED, not proven: the source saw zero only at its samples. If the time between were idle:"
        yield from _table("FLOOR", ((f"{floor:g}", each) for floor, each in policy.unproven.items()))
    for name in DIMENSIONS:
        rows = sort_rows(tally.rows[name])
        if len(rows) > (name == "policy"):
            yield f"By {name.replace('_', ' ')}:"
            yield from _table(name.upper().replace("_", " "), rows[:TOP])
    yield from _mails(tally, test.days)
    if tally.braked.decisions:
        yield (
            f"The brake `correlated` would have delayed the marks of {tally.braked.decisions:,} decisions, of which "
            f"{percent(tally.braked.regret)} worked within 60 min"
        )
    if tally.limited:
        yield f"The limit policy.new_marks_hour_max would have delayed {tally.limited:,} marks"
    if tally.spared:
        spared = ", ".join(f"{why} {count:,}" for why, count in sorted(tally.spared.items()))
        yield f"Idle for long enough, but not underused: {spared}"


def _has_floors(test: Backtest) -> bool:
    """Returns whether the result depends on the engine activity that counts as zero."""
    return any(tally.total != test.windows[window, FLOORS[0]].total for (window, _), tally in test.windows.items())


def _windows(test: Backtest) -> Iterator[tuple[str, Figures]]:
    for (window, floor), tally in test.windows.items():
        if _has_floors(test):
            yield f"{describe_duration(window)}  {floor:g}", tally.total
        elif floor == FLOORS[0]:
            yield describe_duration(window), tally.total


def _mails(tally: Tally, days: float) -> Iterator[str]:
    mails = {owner: sum(of.values()) for owner, of in tally.warned.items()}
    if not mails:
        return
    each = sum(mails.values()) / len(mails) / max(1.0, days)
    yield f"Mails to owners: {sum(mails.values()):,} to {len(mails):,}, {each:.2f} per owner and day. Most:"
    rows = sorted(mails, key=lambda owner: (-mails[owner], owner))[:5]
    table = [(owner, f"{mails[owner]:,}", f"{max(tally.warned[owner].values()):,}") for owner in rows]
    yield from layout(("OWNER", "MAILS", "MOST IN A DAY"), table, frozenset(("MAILS", "MOST IN A DAY")))


def _table(title: str, rows: Iterable[tuple[str, Figures]]) -> list[str]:
    cells = [(name, *_cells(figures)) for name, figures in rows]
    return layout((title, *COLUMNS), cells, frozenset(COLUMNS))


def _cells(figures: Figures) -> tuple[str, ...]:
    return (
        f"{figures.decisions:,}",
        number(figures.gpus),
        number(figures.hours),
        number(figures.sure_hours),
        number(figures.money),
        percent(figures.regret),
        percent(figures.ever),
    )


def _stretches(longest: Sequence[IdleStretch]) -> list[str]:
    rows = [
        (
            str(each.gang.lives[0].name),
            owner_of(each.gang),
            number(each.gpus),
            f"{utc(each.start):%m-%d %H:%M}",
            describe_duration(each.end - each.start),
            "no" if each.decided is None else f"after {describe_duration(each.decided - each.start)}",
            ENDS[each.ended],
            "".join(shade(value, 1.0) for value in each.curve.values),
        )
        for each in longest
    ]
    header = ("HOLDER", "OWNER", "GPUS", "SINCE", "IDLE", "UNDERUSED", "ENDED", "UTILIZATION")
    return layout(header, rows, frozenset(("GPUS",)))


def _money(figures: Figures, currency: str) -> str:
    return "" if figures.money is None else f", {number(figures.money)} {one_line(currency)}".rstrip()


def one_line_of(text: str) -> str:
    """Makes a suggested line safe to print, because it contains names from the site. Keeps its line breaks."""
    return "\n".join(line[: len(line) - len(line.lstrip())] + one_line(line.strip()) for line in text.split("\n"))


def render_json(test: Backtest) -> str:
    """Renders JSON with all values in full precision; an unknown value is null."""
    shown = {
        "start": utc(test.start).isoformat(),
        "end": utc(test.end).isoformat(),
        "floor": test.floor,
        "holders": test.holders,
        "currency": test.currency or None,
        "sources": [each._asdict() for each in test.sources],
        "policies": [_policy_json(each) for each in test.policies],
        "overlap": None
        if test.overlap is None
        else {name: values(figures) for name, figures in test.overlap._asdict().items()},
        "windows": [
            {"window_seconds": window, "floor": floor, **values(tally.total)}
            for (window, floor), tally in test.windows.items()
        ],
        "windows_are_proven": not test.are_unproven,
        "longest": [
            {
                "holder": str(each.gang.lives[0].name),
                "cluster": each.gang.lives[0].cluster,
                "owner": owner_of(each.gang),
                "gpus": each.gpus,
                "start": utc(each.start).isoformat(),
                "seconds": each.end - each.start,
                "underused_at": None if each.decided is None else utc(each.decided).isoformat(),
                "ended": each.ended,
                "curve": {
                    "start": utc(each.curve.start).isoformat(),
                    "window_seconds": each.curve.window,
                    "utilization": each.curve.values,
                },
            }
            for each in test.longest
        ],
        "suggested": list(test.suggested),
        "missing": list(test.missing),
        "left_out": list(test.left_out),
    }
    return json.dumps(shown, indent=2, ensure_ascii=False) + "\n"


def _policy_json(policy: PolicyResult) -> Mapping[str, object]:
    tally = policy.tally
    return {
        "policy": policy.name,
        "candidates": tally.candidates,
        "total": values(tally.total),
        "unproven": [{"floor": floor, **values(each)} for floor, each in policy.unproven.items()],
        "rows": {
            name: [{"value": value, **values(figures)} for value, figures in sort_rows(tally.rows[name])]
            for name in DIMENSIONS
        },
        "mails": [
            {"owner": owner, "mails": sum(days.values()), "most_in_a_day": max(days.values())}
            for owner, days in sorted(tally.warned.items())
        ],
        "braked": values(tally.braked),
        "limited_marks": tally.limited,
        "spared": dict(sorted(tally.spared.items())),
    }


def values(figures: Figures) -> dict[str, object]:
    return {
        "decisions": figures.decisions,
        "gpus": figures.gpus,
        "idle_gpu_hours": figures.hours,
        "never_back_gpu_hours": figures.sure_hours,
        "money": figures.money,
        "known": figures.known,
        "regret_ratio": figures.regret,
        "ever_back_ratio": figures.ever,
        **{fate: figures.fates[fate] for fate in FATES},
    }


def render_csv(test: Backtest) -> str:
    """Renders CSV: one row for each policy, dimension and value. An unknown value is an empty cell."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(("policy", "dimension", "value", *values(Figures())))
    for policy in test.policies:
        rows = [("total", "", policy.tally.total)]
        rows += [("unproven", f"{floor:g}", each) for floor, each in policy.unproven.items()]
        rows += [(name, value, each) for name in DIMENSIONS for value, each in sort_rows(policy.tally.rows[name])]
        for dimension, value, each in rows:
            writer.writerow((safe_cell(policy.name), dimension, safe_cell(value), *map(_number, values(each).values())))
    for (window, floor), tally in test.windows.items():
        name = safe_cell(test.policies[0].name)
        writer.writerow((name, "window", f"{window:.0f}s/{floor:g}", *map(_number, values(tally.total).values())))
    return out.getvalue()


def _number(value: object) -> str:
    return "" if value is None else f"{value:.6f}" if isinstance(value, float) else str(value)


FORMS: Mapping[str, Callable[[Backtest], str]] = {"text": render_text, "json": render_json, "csv": render_csv}
