"""Shows in which hours of the week held GPUs did no work: one row for each day, one column for each hour, in UTC."""

from __future__ import annotations

from typing import NamedTuple

from gpu_exporter.common.plain import utc
from gpu_exporter.reports.usage.model import IDLE, STALLED, UNPROVEN, GpuHours, UsageReport

HOUR_S = 3600.0
WEEK_S = 7 * 86400.0
HOURS_MIN = 24  # known hours of the report from which the plot has something to compare
DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
TITLE = "GPUs idle or to be investigated, by hour of the week (UTC)"


class Heat(NamedTuple):
    """Mean number of GPUs by weekday (Monday first) and hour of the day, None without data. `most`: the largest number.
    A report of less than a week has only the rows with data.
    """

    rows: dict[str, list[float | None]]
    most: float


def week_of(report: UsageReport) -> Heat | None:
    """Returns the week of a report. None if too few of its hours are known, or if no GPU was idle."""
    found: dict[tuple[int, int], list[float]] = {}
    for start, use in sorted(report.hours.items()):
        wasted = None if use is None else wasted_hours(use)
        if wasted is not None:
            moment = utc(start)
            found.setdefault((moment.weekday(), moment.hour), []).append(wasted)
    if sum(map(len, found.values())) < HOURS_MIN:
        return None
    is_week = report.end - report.start >= WEEK_S
    days = {day for day, _ in found}
    rows = {
        name: [_mean(found.get((day, hour))) for hour in range(24)]
        for day, name in enumerate(DAYS)
        if is_week or day in days
    }
    most = max(value or 0.0 for row in rows.values() for value in row)
    return Heat(rows, most) if most > 0.0 else None


def wasted_hours(use: GpuHours) -> float | None:
    """Returns the GPU-hours that were idle, stalled, or are to be investigated. None if the source knows neither idle
    hours nor hours to be investigated.
    """
    if use.parts[IDLE] is None and use.parts[UNPROVEN] is None:
        return None
    return sum(use.parts[part] or 0.0 for part in (IDLE, STALLED, UNPROVEN))


def _mean(values: list[float] | None) -> float | None:
    return sum(values) / len(values) if values else None
