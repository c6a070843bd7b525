"""Makes the tables of a report, for text, mail and page. Every cell is one line of text; `-` is unknown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

from gpu_exporter.common.durations import describe_duration
from gpu_exporter.common.model.meanings import CAUSES
from gpu_exporter.common.plain import one_line, percent, utc
from gpu_exporter.reconciler.decision.spared import ACTED, MARKED
from gpu_exporter.reports.usage.model import (
    IDLE,
    UNPROVEN,
    USED,
    Capacity,
    GpuHours,
    HolderHours,
    UsageReport,
    Who,
    share,
)
from gpu_exporter.reports.usage.render.heat import week_of
from gpu_exporter.reports.usage.render.view import (
    COLUMN_MIN,
    NAME,
    NONE,
    SHOWN_MIN,
    GroupRow,
    ReportView,
    ShownReport,
    currency_of,
    in_cluster,
    name_of,
    number,
    owner_of,
    shown_parts,
)
from gpu_exporter.reports.usage.render.words import WORDS

GIB = 1024.0**3
ACTIVITY = "ENGINE ACTIVITY"
LEGEND = "used: the GPU worked; low: it worked, but at a low utilization; busy: the mean utilization of the hours held"
TENANTS = "tenants"  # key of the table of groups, to which a form adds one bar per row
TEXT = frozenset(  # columns of text; all others are right-aligned numbers
    (
        *("NAME", "HOLDER", "OWNER", "MODEL", "CAUSE", "IN WORDS", "WHAT TO CHANGE", "OUTCOME", "SUFFICIENT"),
        *("DAY (UTC)", ACTIVITY, "SOURCE", "COVERS", "CANNOT TELL"),
    )
)


Column: TypeAlias = tuple[str, Callable[[HolderHours], str]]  # name, and the cell of a holder


class ReportTable(NamedTuple):
    """A table with its title and explanation ("" for none). `kinds`: kind of each row, as in GroupRow."""

    key: str
    title: str
    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    note: str = ""
    kinds: tuple[str, ...] = ()


def list_tables(shown: ShownReport) -> list[ReportTable]:
    """Returns the tables that have rows, most important first."""
    report, view = shown.report, shown.view
    makers = (
        _tenants(shown),
        _idle(report, view),
        _unproven(report, view),
        _oversized(report, view),
        _capacity(report),
        _floors(report, shown.total.held),
        _causes(report, view),
        _long_idle(report, view),
        _days(report),
        _sources(report),
    )
    return [table for table in makers if table.rows]


def _tenants(shown: ShownReport) -> ReportTable:
    report, total, rows = shown.report, shown.total, shown.rows
    uses = [row.use for row in rows]
    many = shown_parts([total], COLUMN_MIN)
    first = [part for part in (IDLE, UNPROVEN) if part in many or (part == IDLE and total.parts[IDLE] is not None)]
    rest = [part for part in many if part not in first]

    def other(use: GpuHours) -> float:
        return max(0.0, use.held - sum(use.parts[part] or 0.0 for part in (*first, *rest)))

    has_other = any(other(use) >= SHOWN_MIN for use in uses)
    has_money = any(use.cost is not None for use in uses)
    has_energy = any(use.energy is not None for use in uses)
    idle_money = [_in_money("IDLE", report)] * has_money
    header = ["NAME", "HELD"]
    for part in (*first, *rest):
        header += [WORDS[part].name.upper(), *(["IDLE %", *idle_money] if part == IDLE else [])]
    header += ["OTHER"] * has_other + ["BUSY %"] + ["KWH"] * has_energy + [_in_money("HELD", report)] * has_money

    def cells(row: GroupRow) -> tuple[str, ...]:
        use = row.use
        found = ["  " * (row.kind == "member") + row.name, number(use.held)]
        for part in (*first, *rest):
            found.append(number(use.parts[part]))
            if part == IDLE:
                found += [percent(use.share(IDLE))] + [number(use.cost_of(IDLE))] * has_money
        found += [number(other(use))] * has_other + [percent(use.utilization)] + [number(use.energy)] * has_energy
        return (*found, *[number(use.cost)] * has_money)

    kinds = tuple(row.kind for row in rows)
    words = f"most {'money' if has_money else 'hours'} idle or stalled first"
    name = f"GPU-hours by {shown.view.by}, {words}"
    return ReportTable(TENANTS, name, tuple(header), [cells(row) for row in rows] if total.held else [], LEGEND, kinds)


def _in_money(word: str, report: UsageReport) -> str:
    return f"{word}, {currency_of(report) or 'COST'}"


def _idle(report: UsageReport, view: ReportView) -> ReportTable:
    found = _with(report.holders, IDLE)
    columns: list[Column] = [
        ("IDLE", lambda each: number(each.use.parts[IDLE])),
        (_in_money("IDLE", report), lambda each: number(each.use.cost_of(IDLE))),
        ("HELD", lambda each: number(each.use.held)),
        ("LONGEST IDLE", lambda each: NONE if each.longest_idle_s is None else describe_duration(each.longest_idle_s)),
    ]
    return _of_holders("idle", "Idle holders (confirmed), in GPU-hours", columns, found, view)


def _unproven(report: UsageReport, view: ReportView) -> ReportTable:
    """Makes the table of holders with hours to be investigated. The table of idle holders omits these hours."""
    found = _with(report.holders, UNPROVEN)
    columns: list[Column] = [
        (WORDS[UNPROVEN].name.upper(), lambda each: number(each.use.parts[UNPROVEN])),
        (_in_money(WORDS[UNPROVEN].name.upper(), report), lambda each: number(each.use.cost_of(UNPROVEN))),
        ("HELD", lambda each: number(each.use.held)),
        ("SAMPLES AT ZERO", lambda each: NONE if each.zero_samples is None else f"{each.zero_samples:,}"),
    ]
    note = f"{WORDS[UNPROVEN].meaning}: ask the owner"
    return _of_holders(
        "unproven", "Holders to be investigated: possibly idle, in GPU-hours", columns, found, view, note
    )


def _oversized(report: UsageReport, view: ReportView) -> ReportTable:
    columns: list[Column] = [
        ("SUFFICIENT", lambda each: one_line(each.sufficient or NONE, NAME)),
        ("HELD", lambda each: number(each.use.held)),
        (_in_money("HELD", report), lambda each: number(each.use.cost)),
        ("BUSY %", lambda each: percent(each.mean)),
        ("MAX MEMORY", lambda each: NONE if each.peak_memory is None else f"{each.peak_memory / GIB:.1f} GiB"),
        ("MODEL", lambda each: one_line(each.who.model or NONE, NAME)),
    ]
    title = "Holders that could use less than a whole GPU, in GPU-hours"
    return _of_holders("oversized", title, columns, report.oversized or [], view)


def _of_holders(
    key: str, title: str, columns: list[Column], found: list[HolderHours], view: ReportView, note: str = ""
) -> ReportTable:
    """Makes a table of holders: name, these columns, and owner. Drops columns without values."""
    holder: Column = ("HOLDER", lambda each: in_cluster(each.who, each.who.holder))
    columns = [holder, *columns, ("OWNER", lambda each: owner_of(each.who))]
    rows = [tuple(cell(each) for _, cell in columns) for each in found[: view.top]]
    shown = [at for at in range(len(columns)) if any(row[at] != NONE for row in rows)]
    more = f"{len(found) - view.top:,} more are not listed" if len(found) > view.top else ""
    header = tuple(columns[at][0] for at in shown)
    return ReportTable(
        key, title, header, [tuple(row[at] for at in shown) for row in rows], "; ".join(filter(None, (note, more)))
    )


def _with(holders: list[HolderHours] | None, part: str) -> list[HolderHours]:
    """Returns the holders with hours of this part, most money or hours first."""
    found = [each for each in holders or () if (each.use.parts.get(part) or 0.0) >= SHOWN_MIN]
    return sorted(found, key=lambda each: (-(each.use.cost_of(part) or 0.0), -(each.use.parts[part] or 0.0), each.who))


def _capacity(report: UsageReport) -> ReportTable:
    header = ("MODEL", "PRESENT", "HELD", "FREE", "FREE %")
    rows = [_of_capacity(each) for each in sorted(report.capacity)]
    if len(rows) > 1:
        rows.append(_of_capacity(_sum_of(report.capacity)))
    kinds = tuple("sum" if len(rows) > 1 and at == len(rows) - 1 else "group" for at in range(len(rows)))
    note = "free: no pod and no job held these GPUs"
    return ReportTable("capacity", "Capacity, in GPU-hours", header, rows, note, kinds)


def _sum_of(capacity: Iterable[Capacity]) -> Capacity:
    held, free = 0.0, 0.0
    present, is_known = 0.0, True
    for each in capacity:
        present += each.present
        is_known = is_known and each.held is not None and each.free is not None
        held, free = held + (each.held or 0.0), free + (each.free or 0.0)
    return Capacity("", "all", present, held if is_known else None, free if is_known else None)


def _of_capacity(each: Capacity) -> tuple[str, ...]:
    name = in_cluster(Who(cluster=each.cluster), each.model or "(no model)")
    return name, number(each.present), number(each.held), number(each.free), percent(share(each.free, each.present))


def _floors(report: UsageReport, held: float) -> ReportTable:
    rows = [
        (
            ("exactly 0" if not floor else f"at most {floor:g}") + " (as above)" * (floor == report.floor),
            number(hours),
            percent(share(hours, held)),
        )
        for floor, hours in sorted(report.floors.items())
    ]
    note = "the engine activity up to which a GPU counts as idle: the counters of an idle GPU are not exactly 0"
    return ReportTable(
        "floors", "Idle GPU-hours, by the engine activity that counts as idle", (ACTIVITY, "IDLE", "IDLE %"), rows, note
    )


def _causes(report: UsageReport, view: ReportView) -> ReportTable:
    header = ("NAME", "GPU-HOURS", "CAUSE", "IN WORDS", "WHAT TO CHANGE")
    rows = [
        (name_of(each.who), number(each.hours), one_line(each.cause, NAME), *meant(each.cause))
        for each in report.causes[: view.top]
    ]
    return ReportTable("causes", "Causes of low use", header, rows)


def meant(cause: str) -> tuple[str, str]:
    """Returns title and advice of a cause: the owner's change, otherwise the site's. `-` for an unknown cause."""
    meaning = CAUSES.get(cause)
    return (NONE, NONE) if meaning is None else (meaning.title, meaning.owner or meaning.site or NONE)


def _long_idle(report: UsageReport, view: ReportView) -> ReportTable:
    found = [each for each in report.long_idle if each.hours >= SHOWN_MIN]
    rows = [
        (
            in_cluster(Who(cluster=each.cluster), each.tenant),
            number(each.hours),
            one_line(each.outcome if each.outcome in (MARKED, ACTED) else f"spared: {each.outcome}", NAME),
        )
        for each in found[: view.top]
    ]
    note = "spared: these GPUs stay with their holder; for the reasons see docs/reconciler.md (Where idle GPUs go)"
    return ReportTable("long_idle", "Idle for long enough to be marked", ("NAME", "GPU-HOURS", "OUTCOME"), rows, note)


def _days(report: UsageReport) -> ReportTable:
    """Makes the table of days, unless the week by hour is shown."""
    if len(report.days) < 2 or week_of(report) is not None:
        return ReportTable("days", "", (), [])
    parts = [part for part in (IDLE, UNPROVEN, USED) if part in shown_parts(filter(None, report.days.values()))]
    header = ("DAY (UTC)", "HELD", *(WORDS[part].name.upper() for part in parts))
    rows = list(_of_days(report.days.items(), parts))
    return ReportTable("days", "GPU-hours by day", header, rows)


def _of_days(days: Iterable[tuple[float, GpuHours | None]], parts: list[str]) -> Iterator[tuple[str, ...]]:
    for start, use in days:
        values = [None] * (1 + len(parts)) if use is None else [use.held, *(use.parts[part] for part in parts)]
        yield utc(start).strftime("%a %Y-%m-%d %H:%M"), *map(number, values)


def _sources(report: UsageReport) -> ReportTable:
    rows = [
        (one_line(each.name, NAME), one_line(each.covers), one_line(cannot)) if not at else ("", "", one_line(cannot))
        for each in report.sources
        for at, cannot in enumerate(each.cannot or (NONE,))
    ]
    return ReportTable("sources", "Sources", ("SOURCE", "COVERS", "CANNOT TELL"), rows)
