"""Makes the sentences of a report: summary, coverage, and the notes below it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from gpu_exporter.common.durations import describe_duration
from gpu_exporter.common.plain import one_line, percent, utc
from gpu_exporter.common.promql.absence import moment
from gpu_exporter.reports.usage.model import (
    FAULTY,
    IDLE,
    LOW,
    STALLED,
    STARTING,
    UNKNOWN,
    UNPROVEN,
    USED,
    Covered,
    GpuHours,
    UsageReport,
    share,
)
from gpu_exporter.reports.usage.render.view import (
    COLUMN_MIN,
    SHOWN_MIN,
    ShownReport,
    currency_of,
    name_of,
    number,
    shown_parts,
)

FAILED_MIN = 0.001  # share of failed scrapes from which the report names it
NAMED = 3  # groups that the headline names ...
NAMED_MIN = 0.05  # ... after the first one, those with this share of the hours


class PartWords(NamedTuple):
    """The words for a part of the hours: its name, its letter in a text bar, and its meaning."""

    name: str
    letter: str
    meaning: str


WORDS: Mapping[str, PartWords] = {
    STARTING: PartWords("starting", "s", "no activity yet, within the first minutes of a holder"),
    USED: PartWords("used", "u", "the GPU worked"),
    LOW: PartWords("low", "l", "the GPU worked at a low utilization"),
    STALLED: PartWords("stalled", "!", "fully busy without progress"),
    IDLE: PartWords("idle", "I", "confirmed: no activity of any kind, for the whole time"),
    UNPROVEN: PartWords(
        "to investigate", "~", "almost no activity was measured, which does not confirm that the GPU was idle"
    ),
    UNKNOWN: PartWords("unknown", "?", "no source measured the GPU"),
    FAULTY: PartWords("faulty", "x", "the hardware could not be used"),
}


def title(report: UsageReport) -> str:
    """Returns the period in one line."""
    start, end = (utc(wall).strftime("%Y-%m-%d %H:%M") for wall in (report.start, report.end))
    return f"GPU use, {start} to {end} UTC ({describe_duration(report.end - report.start)})"


def headline(shown: ShownReport) -> list[str]:
    """Returns the summary: how much was wasted and by whom, in one sentence each. `certainty` continues it."""
    report, total = shown.report, shown.total
    if not total.held:
        return ["No GPU-hours were held."]
    if total.share(IDLE) is None:
        first = f"{_held(total, report)} were held. No source can confirm how many of them were idle."
    else:
        first = f"{percent(total.share(IDLE))} of the {number(total.held)} GPU-hours held were idle: "
        first += f"{number(total.parts[IDLE])} GPU-hours{_share_of_money(total, report)}."
    return [first + _trend(report), *_who(shown), *_stalled(total, report), *_free(report)]


def _held(use: GpuHours, report: UsageReport) -> str:
    return f"{number(use.held)} GPU-hours{money(use.cost, report)}"


def _share_of_money(total: GpuHours, report: UsageReport) -> str:
    idle, cost = total.cost_of(IDLE), total.cost
    return "" if idle is None or cost is None else f", {number(idle)} of {number(cost)} {currency_of(report)}".rstrip()


def _amount(use: GpuHours, part: str, report: UsageReport) -> str:
    hours = f"{number(use.parts[part])} GPU-hours{money(use.cost_of(part), report)}"
    return f"{percent(use.share(part))} of the hours held ({hours})"


def money(cost: float | None, report: UsageReport, of: str = ", {}") -> str:
    """Returns money after a number of hours, e.g. `, 12,300 EUR`; "" without a price. `of`: text around the money."""
    return "" if cost is None else of.format(f"{number(cost)} {currency_of(report)}".rstrip())


def _trend(report: UsageReport) -> str:
    before = report.before
    if before is None or not before.held:
        return ""
    span = describe_duration(report.end - report.start)
    ratio = before.share(IDLE)
    if ratio is None:
        return f" The {span} before: {number(before.held)} GPU-hours held."
    return f" The {span} before: {percent(ratio)} of {number(before.held)}."


def _who(shown: ShownReport) -> Iterator[str]:
    """Names the groups with the most idle hours. Without idle hours, names those with the most hours to be
    investigated.
    """
    for part, words in ((IDLE, "Idle"), (UNPROVEN, "To be investigated")):
        whole = shown.total.parts[part] or 0.0
        if whole < SHOWN_MIN:
            continue
        groups = [(who, use.parts[part] or 0.0, use) for who, use in shown.groups.items()]
        groups.sort(key=lambda item: (-(item[2].cost_of(part) or 0.0), -item[1], item[0]))
        named = [
            f"{name_of(who, shown.view.by)} {number(hours)} GPU-hours"
            f"{money(use.cost_of(part), shown.report, of=' ({})')}"
            for at, (who, hours, use) in enumerate(groups[:NAMED])
            if not at or hours >= NAMED_MIN * whole
        ]
        yield f"{words} most: {', '.join(named)}."
        return


def _free(report: UsageReport) -> Iterator[str]:
    """Describes the capacity that no pod or job held, if it is known for every model."""
    present = sum(each.present for each in report.capacity)
    if present and all(each.free is not None for each in report.capacity):
        free = sum(each.free or 0.0 for each in report.capacity)
        if free < COLUMN_MIN * present:
            return
        yield f"No pod and no job held {percent(share(free, present))} of the {number(present)} GPU-hours present."


def _stalled(total: GpuHours, report: UsageReport) -> Iterator[str]:
    if (total.share(STALLED) or 0.0) >= COLUMN_MIN:
        yield f"Stalled: {_amount(total, STALLED, report)}: fully busy, but without progress."


def certainty(shown: ShownReport) -> Iterator[str]:
    """Yields one sentence each about hours to be investigated and unknown hours."""
    report, total = shown.report, shown.total
    if (total.share(UNPROVEN) or 0.0) >= COLUMN_MIN:
        yield f"To be investigated: {_amount(total, UNPROVEN, report)}: {WORDS[UNPROVEN].meaning}."
    if (total.share(UNKNOWN) or 0.0) >= COLUMN_MIN:
        yield f"Unknown: {_amount(total, UNKNOWN, report)}, never counted as idle: {WORDS[UNKNOWN].meaning}."


def coverage(report: UsageReport) -> str:
    """Describes which part of the period is known, and the sources, in a few sentences."""
    names = one_line(", ".join(each.name for each in report.sources))
    texts = [_seen(report), *([f"Sources: {names}"] if names else [])]
    texts += [f"Not seen: {each.unseen}, so such GPUs may look idle" for each in report.sources if each.unseen]
    return "".join(f"{text}. " for text in texts).rstrip()


def _seen(report: UsageReport) -> str:
    known = ""
    if len(report.days) > 1:
        known = f"data of {sum(day is not None for day in report.days.values())} of {len(report.days)} days"
    if report.covered is None:
        return f"Seen: {known or 'unknown'}"
    return _describe(report.covered, known)


def _describe(seen: Covered, known: str) -> str:
    span = describe_duration(seen.span)
    text = ", ".join(
        filter(None, (f"Seen: {span if seen.is_whole else describe_duration(seen.seconds)} of {span}", known))
    )
    if seen.since is not None and not seen.is_whole:
        text += f", since {moment(seen.since)}: the whole period is known after {moment(seen.since + seen.span)}"
    if seen.failed is not None and seen.failed >= FAILED_MIN:
        text += f". {seen.failed:.1%} of the scrapes failed: lost hours are not counted"
    return text


def untold(total: GpuHours) -> list[str]:
    """Returns sentences about parts without a column: parts with few hours, and parts that no source shows."""
    texts = []
    few = [part for part in shown_parts([total]) if part not in shown_parts([total], COLUMN_MIN) and part != IDLE]
    if few:
        texts.append("other: " + ", ".join(f"{WORDS[part].name} {number(total.parts[part])}" for part in few))
    if names := [WORDS[part].name for part, hours in total.parts.items() if hours is None]:
        where = "other" if total.apart >= SHOWN_MIN else "the columns of other parts"
        texts.append(
            f"not shown separately: {', '.join(names)}. The sources do not report these parts; their hours are in "
            f"{where}"
        )
    return texts


def notes(shown: ShownReport) -> list[str]:
    """Returns the notes below the report, one per line: data that is in no column, and missing values."""
    texts = untold(shown.total) if shown.total.held else []
    texts += [f"not counted: {text}" for text in shown.report.left_out]
    texts += [f"not shown: {text}" for text in shown.report.missing]
    return [one_line(text) for text in texts]
