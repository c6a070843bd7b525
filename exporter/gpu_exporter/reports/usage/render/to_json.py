"""A report as JSON, with all rows and full precision. A value that the text shows as `-` is null."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from gpu_exporter.common.plain import utc
from gpu_exporter.reports.usage.model import PARTS, GpuHours, HolderHours, UsageReport, Who
from gpu_exporter.reports.usage.render.tables import meant
from gpu_exporter.reports.usage.render.view import ReportView, ShownReport


def render_json(report: UsageReport, view: ReportView) -> str:
    """Renders all values. Hours are GPU-hours, money is in `currency`. `view.top` cuts nothing."""
    level, of_it = view.level, ShownReport(report, view)
    seen = report.covered
    shown: dict[str, object] = {
        "start": _moment(report.start),
        "end": _moment(report.end),
        "seen": None
        if seen is None
        else {
            "seconds": seen.seconds,
            "period_seconds": seen.span,
            "since": None if seen.since is None else _moment(seen.since),
            "failed_scrapes_ratio": seen.failed,
        },
        "sources": [each._asdict() for each in report.sources],
        "currency": report.currency or None,
        "total": figures(of_it.total),
        "before": None if report.before is None else figures(report.before),
        "by": view.by,
        "groups": _rows(of_it.groups, level.group),
        "members": _rows(of_it.members, (*level.group, *level.member)) if level.member else [],
        "days": [{"start": _moment(start), **figures(use)} for start, use in report.days.items()],
        "hours": [{"start": _moment(start), **_parts(use)} for start, use in sorted(report.hours.items())],
        "holders": None if report.holders is None else [_holder(each) for each in report.holders],
        "oversized": None if report.oversized is None else [_holder(each) for each in report.oversized],
        "capacity": [
            {
                "cluster": each.cluster,
                "model": each.model,
                "present_hours": each.present,
                "held_hours": each.held,
                "free_hours": each.free,
            }
            for each in sorted(report.capacity)
        ],
        "floors": [{"floor": floor, "idle_hours": hours} for floor, hours in sorted(report.floors.items())],
        "causes": [
            {**each.who._asdict(), "cause": each.cause, "hours": each.hours, "advice": meant(each.cause)[1]}
            for each in report.causes
        ],
        "long_idle": [each._asdict() for each in report.long_idle],
        "left_out": report.left_out,
        "missing": report.missing,
    }
    return "".join([*_indented(shown), "\n"])


def _indented(value: Any, depth: int = 1) -> Iterator[str]:
    """The parts of json.dumps with indent=1, which is written in Python and takes seconds for all holders of a week."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    margin, end = "\n" + " " * depth, "\n" + " " * (depth - 1)
    if not any(isinstance(part, (dict, list, tuple)) for part in parts):
        text = json.dumps(value, separators=(f",{margin}", ": "))
        yield f"{text[0]}{margin}{text[1:-1]}{end}{text[-1]}" if parts else text
        return
    names = [f"{json.dumps(name)}: " for name in value] if isinstance(value, dict) else [""] * len(parts)
    for number, (name, part) in enumerate(zip(names, parts, strict=True)):
        yield f",{margin}{name}" if number else f"{'[{'[isinstance(value, dict)]}{margin}{name}"
        yield from _indented(part, depth + 1)
    yield end + "]}"[isinstance(value, dict)]


def _moment(wall: float) -> str:
    return utc(wall).isoformat()


def _rows(groups: Mapping[Who, GpuHours], names: tuple[str, ...]) -> list[dict[str, object]]:
    return [{**{name: getattr(who, name) for name in names}, **figures(use)} for who, use in groups.items()]


def _holder(each: HolderHours) -> dict[str, object]:
    return {
        **each.who._asdict(),
        **figures(each.use),
        "longest_idle_seconds": each.longest_idle_s,
        "zero_samples": each.zero_samples,
        "mean_ratio": each.mean,
        "peak_memory_bytes": each.peak_memory,
        "sufficient": each.sufficient or None,
    }


def _parts(use: GpuHours | None) -> dict[str, float | None]:
    """The hours held and their parts, without money: a week has 168 rows."""
    return {name: value for name, value in figures(use).items() if name.removesuffix("_hours") in ("held", *PARTS)}


def figures(use: GpuHours | None) -> Mapping[str, float | None]:
    """The numbers of these hours by name, None for a number that is unknown or may be wrong."""
    if use is None:
        return NO_DATA
    return {
        "held_hours": use.held,
        **{f"{part}_hours": use.parts[part] for part in PARTS},
        "not_told_apart_hours": use.apart,
        "idle_ratio": use.share("idle"),
        "known_hours": use.known,
        "busy_hours": use.busy,
        "busy_ratio": use.utilization,
        "energy_kwh": use.energy,
        "cost": use.cost,
        **{f"cost_{part}": use.cost_of(part) for part in PARTS},
    }


NO_DATA: Mapping[str, float | None] = dict.fromkeys(figures(GpuHours()))
