"""Makes the report of logs and recordings. Its period is the time in these files."""

from __future__ import annotations

from collections.abc import Sequence

from gpu_exporter.common.errors import AnswerError
from gpu_exporter.common.promql.absence import moment
from gpu_exporter.reports.usage.collect import HOUR_S, SHOWN_MIN, CellSums
from gpu_exporter.reports.usage.model import Covered, ReportSource, UsageReport
from gpu_exporter.reports.usage.prices import Prices
from gpu_exporter.reports.usage.sources.logs import LogTime

HOURS_MAX = 366 * 24  # a report has a row for each hour of its period
LATEST = 253402300799.0  # the end of the year 9999, in Unix seconds
NOTES_SHOWN = 20


def check_period(start: float, end: float, what: str) -> None:
    """Raises AnswerError if the time from `start` to `end` is longer than a report can be."""
    if not 0.0 <= start <= end <= LATEST:
        raise AnswerError(f"{what}: times before 1970 or after 9999: a clock was wrong")
    if end - start > HOURS_MAX * HOUR_S:
        raise AnswerError(
            f"{what}: from {moment(start)} to {moment(end)}, but a report has at most {HOURS_MAX // 24} days: report "
            "the parts one after the other, or leave out times at which a clock was wrong"
        )


def report_time(time: LogTime, sources: Sequence[ReportSource], notes: Sequence[str], prices: Prices) -> UsageReport:
    """Makes the report. `notes`: texts about omitted data. Raises AnswerError if there are no hours, or more than
    HOURS_MAX.
    """
    if not time.units:
        raise AnswerError("; ".join(["the files contain no readings of a GPU", *notes[:NOTES_SHOWN]]))
    start, end = time.hours
    check_period(start, end, "the files")
    report = UsageReport(start, end, sources=list(sources), currency=prices.currency if prices else "")
    sums = CellSums(prices.of)
    sums.add(time.cells())
    sums.end_chunk()
    sums.note_gap(time.gap_s)
    sums.fill(report)
    report.capacity = [each._replace(held=None, free=None) for each in report.capacity]
    # The hours of a report are whole, but files begin and end at any moment.
    report.start, report.end = time.first_and_last
    span = report.end - report.start
    report.covered = report.covered and Covered(min(report.covered.seconds, span), span)
    if time.twice_s >= SHOWN_MIN * HOUR_S:
        report.left_out.append(f"{time.twice_s / HOUR_S:,.1f} GPU-hours that two files have: they count once")
    report.left_out += notes[:NOTES_SHOWN]
    if len(notes) > NOTES_SHOWN:
        report.left_out.append(f"{len(notes) - NOTES_SHOWN:,} more lines such as these")
    return report
