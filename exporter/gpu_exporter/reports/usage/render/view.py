"""Makes the rows of a report (groups, members, the rest, the sum), and formats its numbers and names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from gpu_exporter.common.plain import one_line
from gpu_exporter.reports.usage.model import PARTS, GpuHours, UsageReport, Who, add_up, group

TENANT = "tenant"
TOP = 15
MEMBERS = 3  # a table has so many times fewer members of a group than groups
NAME = 80  # characters of a name in a table: a pod's name may have 253 (RFC 1123)
SHOWN_MIN = 0.05  # GPU-hours: less is printed as 0.0
COLUMN_MIN = 0.005  # share of the GPU-hours from which a part has a column of its own, and the headline names it
WHOLE_MIN = 99.5  # numbers from here on have no decimal place
NONE = "-"


class Grouping(NamedTuple):
    """The fields of Who that form a group, and the fields that form its members; none if groups have no members."""

    group: tuple[str, ...]
    member: tuple[str, ...] = ()


LEVELS: Mapping[str, Grouping] = {
    TENANT: Grouping(("cluster", "scheduler", "namespace", "account"), ("user",)),
    "team": Grouping(("cluster", "team")),
    "namespace": Grouping(("cluster", "namespace"), ("workload",)),
    "account": Grouping(("cluster", "account"), ("user",)),
    "user": Grouping(("cluster", "user")),
    "workload": Grouping(("cluster", "namespace", "workload")),
    "model": Grouping(("model",)),
}


class ReportView(NamedTuple):
    """The reader's choices. `by`: a key of LEVELS. `top`: rows of each table, without the rest and the sum."""

    by: str = TENANT
    top: int = TOP

    @property
    def level(self) -> Grouping:
        return LEVELS[self.by]


class GroupRow(NamedTuple):
    """A row of the table of groups. `kind`: group, member, rest or sum."""

    name: str
    use: GpuHours
    kind: str


class ShownReport:
    """A report in the reader's view. `groups`, `members`: hours by the fields of the view, most wasted money or hours
    first. `total`: their sum. Computed once, because a site may have 20,000 tenants.
    """

    def __init__(self, report: UsageReport, view: ReportView) -> None:
        self.report, self.view = report, view
        level = view.level
        self.members = report.by(*level.group, *level.member)
        self.groups = group(self.members, *level.group) if level.member else self.members
        self.total = add_up(self.groups.values())
        self.rows = self._list_rows()

    def _list_rows(self) -> list[GroupRow]:
        """Returns the rows: groups (with their members if there are several), the rest, and the sum."""
        (by, top), level = self.view, self.view.level
        inside: dict[Who, list[tuple[Who, GpuHours]]] = {}
        for who, use in self.members.items():
            inside.setdefault(who._replace(**dict.fromkeys(level.member, "")), []).append((who, use))
        rows: list[GroupRow] = []
        for who, use in list(self.groups.items())[:top]:
            members = inside[who]
            if len(members) == 1:
                rows.append(GroupRow(name_of(members[0][0], by), use, "group"))
                continue
            rows.append(GroupRow(f"{name_of(who, by)}: {len(members):,} {level.member[0]}s", use, "group"))
            rows += _cut([GroupRow(name_of(each, by), of, "member") for each, of in members], max(1, top // MEMBERS))
        rows += _rest(list(self.groups.values())[top:], "rest")
        return [*rows, GroupRow("all", self.total, "sum")]


def _cut(rows: Sequence[GroupRow], top: int) -> list[GroupRow]:
    return [*rows[:top], *_rest([row.use for row in rows[top:]], "member")]


def _rest(uses: Sequence[GpuHours], kind: str) -> list[GroupRow]:
    return [GroupRow(f"{len(uses):,} other{'s' * (len(uses) > 1)}", add_up(uses), kind)] if uses else []


def name_of(who: Who, by: str = TENANT) -> str:
    """Returns the name of a group or member on one line: `ml`, `phys/ada`, or `east: ml` with the cluster."""
    level = LEVELS[by]
    fields = [name for name in (*level.group, *level.member) if name not in ("cluster", "scheduler")]
    name = "/".join(filter(None, (getattr(who, each) for each in fields)))
    return in_cluster(who, name or f"(no {by})" if by != TENANT else name or "(not named)")


def in_cluster(who: Who, name: str) -> str:
    return one_line(f"{who.cluster}: {name}" if who.cluster else name, NAME)


def owner_of(who: Who) -> str:
    """Returns the owner of a holder: the user if Slurm names one, otherwise team or workload."""
    person = "/".join(filter(None, (who.user, who.account)))
    return one_line(person or who.team or who.workload or NONE, NAME)


def shown_parts(uses: Iterable[GpuHours], least: float = 0.0) -> list[str]:
    """Returns the parts that have hours in these rows. Omits parts whose share of all hours is below `least`."""
    found = list(uses)
    held = sum(use.held for use in found)
    hours = {part: sum(use.parts[part] or 0.0 for use in found) for part in PARTS}
    return [part for part in PARTS if hours[part] >= max(SHOWN_MIN, least * held)]


def number(value: float | None) -> str:
    """Formats GPU-hours or money. Numbers below 100 have one decimal place, so that they agree with the percentage
    beside them.
    """
    if value is None:
        return NONE
    return f"{value:,.0f}" if abs(value) >= WHOLE_MIN or not value else f"{value:,.1f}"


def currency_of(report: UsageReport) -> str:
    """Returns the currency as the title of a column, "" if unknown."""
    return one_line(report.currency, 12)
