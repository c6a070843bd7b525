"""Divides the period of a report into days, and joins days if Prometheus did not scrape at their border.

A counter continues to grow while Prometheus does not scrape. Its growth over such a gap counts if the gap is inside one
query. If a day ends in the gap, the growth would fall between two queries, so both days become one segment. The share
of each day in this growth is then unknown.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from gpu_exporter.common.promql.absence import BUILD, moments_of

DAY_S = 86400.0
STEP_S = 60.0  # a minute counts as seen if any exporter had a sample in the five minutes before it
STALE_S = 300.0  # a query finds samples that are at most this old
UP_STEPS = 2000  # most steps of the query for failed scrapes: 5 minutes in a week


class PeriodPart(NamedTuple):
    """A part of the period: `span` seconds. It ended `ago` seconds before the end of the report."""

    ago: float
    span: float

    @property
    def window(self) -> str:
        return f"[{self.span:.0f}s]{self.offset}"

    @property
    def offset(self) -> str:
        return f" offset {self.ago:.0f}s" if self.ago else ""

    def steps(self, step_s: float) -> str:
        """The window of a subquery."""
        return f"[{self.span:.0f}s:{step_s:.0f}s]{self.offset}"


class Segment(NamedTuple):
    """Consecutive parts, oldest first, that one query reads together, so that no growth of a counter is lost."""

    parts: tuple[PeriodPart, ...]

    @property
    def whole(self) -> PeriodPart:
        return PeriodPart(self.parts[-1].ago, sum(part.span for part in self.parts))


def list_days(since_s: float, ago: float) -> Iterator[PeriodPart]:
    """Divides `since_s` seconds into days, oldest first; the oldest may be shorter. The last day ends `ago` seconds
    before the end of the period.
    """
    days = []
    end = ago + since_s
    while ago < end:
        days.append(PeriodPart(ago, min(DAY_S, end - ago)))
        ago += DAY_S
    return reversed(days)


def seen_seconds(matcher: str, part: PeriodPart) -> str:
    """PromQL: the number of seconds of this part with a series of any exporter."""
    return f"count_over_time((count({BUILD}{{{matcher}}})){part.steps(STEP_S)}) * {STEP_S:.0f}"


def first_sample(matcher: str, part: PeriodPart) -> str:
    """PromQL: the time of the first sample of any exporter in this part, to the minute."""
    return f"min_over_time({moments_of(f'{BUILD}{{{matcher}}}')}{part.steps(STEP_S)})"


def failed_share(matcher: str, part: PeriodPart) -> str:
    """PromQL: the share of failed scrapes, over the targets that had any series of an exporter in this part."""
    step_s = max(STALE_S, part.span / UP_STEPS)
    ours = f"group by (job, instance) (max_over_time({BUILD}{{{matcher}}}{part.steps(step_s)}))"
    return f"1 - avg(avg_over_time(up{{{matcher}}}{part.steps(step_s)}) and on (job, instance) {ours})"


def lost_growth(matcher: str, before: PeriodPart, after: PeriodPart) -> str:
    """Returns PromQL for the number of exporters with samples in two neighbouring parts, but none at the border between
    them.
    """
    behind = f" offset {before.ago - STALE_S:.0f}s"
    series = f"{BUILD}{{{matcher}}}"
    both = f"last_over_time({series}{before.window}) and last_over_time({series}{after.window})"
    return f"count(({both}) unless ({series}{before.offset} and {series}{behind}))"


def join(
    parts: Sequence[PeriodPart], seen: Mapping[PeriodPart, float], borders: Iterable[PeriodPart]
) -> Iterator[Segment]:
    """Joins parts into segments, oldest first. `borders`: parts at whose end the growth of a counter would be lost. A
    part without samples is joined with its neighbours if there are samples before and after it.
    """
    lost = set(borders)
    known = [at for at, part in enumerate(parts) if seen.get(part)]
    inside = range(known[0], known[-1]) if known else range(0)
    current: list[PeriodPart] = []
    for at, part in enumerate(parts):
        current.append(part)
        is_gap = at in inside and not (seen.get(part) and seen.get(parts[at + 1]))
        if not is_gap and part not in lost:
            yield Segment(tuple(current))
            current = []
    if current:
        yield Segment(tuple(current))
