"""The data of a usage report: GPU-hours by holder and model, and their sums. All sources fill the same records.

A part that a source does not know is None. A sum with such a part is None too, because a missing part is not 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

# Parts of the GPU-hours held. They add up to `held`.
STARTING = "starting"  # no activity yet since the holder started, within the first minutes
USED = "used"
LOW = "low"  # in use, at a utilization below ledger.low_ratio
STALLED = "stalled"  # fully busy without progress
IDLE = "idle"  # confirmed: every witness of the source was quiet for the whole time
UNPROVEN = "unproven"  # to be investigated: zero at all samples, but the source does not see the time between them
UNKNOWN = "unknown"
FAULTY = "faulty"  # the hardware could not be used
PARTS = (STARTING, USED, LOW, STALLED, IDLE, UNPROVEN, UNKNOWN, FAULTY)
FLOORS = (0.0, 0.001, 0.01)  # noise floors of engine activity for which the report shows the verdict
WHOLE = 0.99  # share of a period that counts as the whole period
EXACT = 0.01  # a number is left out if it differs by more than this share from its other source


class Who(NamedTuple):
    """The holder of GPU-hours, and the model of the GPUs. Each text is "" if unknown or not applicable.

    `scheduler`: kubernetes or slurm. `holder`: the printed name of the pod or job, such as `bio/train-0` or `job 102`.
    """

    cluster: str = ""
    scheduler: str = ""
    namespace: str = ""
    account: str = ""
    user: str = ""
    team: str = ""
    workload: str = ""
    holder: str = ""
    model: str = ""


@dataclass
class GpuHours:
    """GPU-hours of one or several holders.

    - `parts`: GPU-hours by part, None for a part that the source does not know.
    - `busy`: integral of utilization over `known` GPU-hours, in GPU-hours. None if unknown.
    - `energy_kwh`: energy of the GPU-hours with an energy counter. `costs`: money for the GPU-hours with a price, by
      part. None without such hours. Output uses only `energy` and `cost_of`, which check that these values cover all
      hours.
    - `unmetered`, `unpriced`: GPU-hours without an energy counter or a price. `unpriced` is negative if `costs` covers
      more hours than were held.
    - `spent`: money for all parts, including parts that are None in `costs`. None: the sum of `costs`.
    """

    held: float = 0.0
    parts: dict[str, float | None] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    busy: float | None = 0.0
    known: float = 0.0
    energy_kwh: float | None = None
    costs: dict[str, float | None] | None = None
    unmetered: float = 0.0
    unpriced: float = 0.0
    spent: float | None = None

    def add(self, other: GpuHours) -> None:
        """Adds the hours of `other`. A value that is None on one side is None in the sum, except energy and money."""
        self.unmetered = self.unmetered if self.energy_kwh is not None else self.held
        self.unpriced = self.unpriced if self.costs is not None else self.held
        self.held += other.held
        self.known += other.known
        _add_parts(self.parts, other.parts)
        self.busy = _sum(self.busy, other.busy)
        self.unmetered += other.unmetered if other.energy_kwh is not None else other.held
        self.unpriced += other.unpriced if other.costs is not None else other.held
        if other.energy_kwh is not None:
            self.energy_kwh = (self.energy_kwh or 0.0) + other.energy_kwh
        if other.costs is not None:
            self.spent = self._all_costs() + other._all_costs()
            self.costs = self.costs if self.costs is not None else dict.fromkeys(PARTS, 0.0)
            _add_parts(self.costs, other.costs)

    def copy(self) -> GpuHours:
        """Returns a copy, to which other hours may be added."""
        return replace(self, parts=dict(self.parts), costs=None if self.costs is None else dict(self.costs))

    @property
    def energy(self) -> float | None:
        """Energy in kilowatt-hours. None if more than 1 % of the GPU-hours have no energy counter."""
        return self.energy_kwh if self.unmetered <= EXACT * self.held else None

    @property
    def is_priced(self) -> bool:
        """Whether `costs` covers the held GPU-hours, to within 1 %."""
        return self.costs is not None and abs(self.unpriced) <= EXACT * self.held

    @property
    def cost(self) -> float | None:
        """Money for all held hours, None without a price."""
        return self._all_costs() if self.is_priced else None

    def _all_costs(self) -> float:
        return self.spent if self.spent is not None else sum(cost or 0.0 for cost in (self.costs or {}).values())

    def cost_of(self, part: str) -> float | None:
        """Returns the money for the hours of this part. None without a price, or if the part is unknown."""
        return self.costs.get(part) if self.costs is not None and self.is_priced else None

    def share(self, part: str) -> float | None:
        """Returns this part as a share of the held hours, at most 1. None if unknown, or if the part exceeds the hours
        by more than rounding can explain.
        """
        return share(self.parts.get(part), self.held)

    @property
    def utilization(self) -> float | None:
        """Mean utilization over the time in which it is known, 0 to 1."""
        return share(self.busy, self.known)

    @property
    def apart(self) -> float:
        """GPU-hours without a known part."""
        return max(0.0, self.held - sum(hours or 0.0 for hours in self.parts.values()))


def share(part: float | None, whole: float | None) -> float | None:
    """Returns `part / whole`, at most 1. None if unknown, or if `part` exceeds `whole` by more than rounding can
    explain.
    """
    if part is None or not whole or part > (1.0 + EXACT) * whole:
        return None
    return min(1.0, part / whole)


def _add_parts(parts: dict[str, float | None], others: Mapping[str, float | None]) -> None:
    for part, value in others.items():
        mine = parts.get(part, 0.0)
        parts[part] = None if mine is None or value is None else mine + value


def _sum(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one + other


class ReportSource(NamedTuple):
    """A source of the report. `covers`: its content in words. `cannot`: values that it lacks, with remedies. `unseen`:
    work that it does not show, so that a working GPU may look idle.
    """

    name: str
    covers: str
    cannot: tuple[str, ...] = ()
    unseen: str = ""


class HolderHours(NamedTuple):
    """One pod or job. None is unknown.

    - `longest_idle_s`: longest idle run in seconds. `zero_samples`: number of readings at zero.
    - `mean`: utilization while held, 0 to 1. `peak_memory`: bytes on one GPU.
    - `sufficient`: a MIG profile or smaller GPU that would be enough, "" if none is known.
    """

    who: Who
    use: GpuHours
    longest_idle_s: float | None = None
    zero_samples: int | None = None
    mean: float | None = None
    peak_memory: float | None = None
    sufficient: str = ""


class Capacity(NamedTuple):
    """GPU-hours of one model in one cluster. `held`, `free`: None if unknown."""

    cluster: str
    model: str
    present: float
    held: float | None
    free: float | None


class CauseHours(NamedTuple):
    """GPU-hours of a tenant with this cause of low utilization. A GPU with two causes counts for both."""

    who: Who
    cause: str
    hours: float


class LongIdle(NamedTuple):
    """GPU-hours of a namespace or account in idle runs that were long enough for a mark, by outcome of these runs."""

    cluster: str
    tenant: str
    outcome: str
    hours: float


class Covered(NamedTuple):
    """The time for which the source has data: `seconds` of `span`. `since`: first sample (Unix seconds), if earlier
    data is missing. `failed`: share of failed scrapes. Both are None if unknown.
    """

    seconds: float
    span: float
    since: float | None = None
    failed: float | None = None

    @property
    def is_whole(self) -> bool:
        return self.seconds >= WHOLE * self.span


@dataclass
class UsageReport:
    """The content of a report on the time from `start` to `end` (Unix seconds).

    - `lines`: hours by holder (or tenant) and model. All sums are made from them.
    - `hours`: each hour of the period by its start (Unix seconds), None without data. `days`: the same for days.
    - `before`: hours of the period before, which has the same length. None if the source did not cover all of it.
    - `floors`: idle GPU-hours at each of FLOORS, empty if the source has no engine activity. `floor`: the one that all
      other values use.
    - `left_out`: texts about data that is in no column, e.g. gaps. `missing`: texts about values that are not shown,
      with the remedies.
    - `holders`, `oversized`: None if the source does not name holders.
    """

    start: float
    end: float
    sources: list[ReportSource] = field(default_factory=list)
    covered: Covered | None = None
    lines: dict[Who, GpuHours] = field(default_factory=dict)
    hours: dict[float, GpuHours | None] = field(default_factory=dict)
    days: dict[float, GpuHours | None] = field(default_factory=dict)
    before: GpuHours | None = None
    holders: list[HolderHours] | None = field(default_factory=list)
    capacity: list[Capacity] = field(default_factory=list)
    oversized: list[HolderHours] | None = field(default_factory=list)
    floors: dict[float, float] = field(default_factory=dict)
    causes: list[CauseHours] = field(default_factory=list)
    long_idle: list[LongIdle] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    currency: str = ""
    floor: float | None = None

    @property
    def total(self) -> GpuHours:
        return add_up(self.lines.values())

    def by(self, *names: str) -> dict[Who, GpuHours]:
        """Returns the hours by these fields of Who, most expensive idle hours first. Without prices, most idle hours
        first.
        """
        return group(self.lines, *names)


def group(lines: Mapping[Who, GpuHours], *names: str) -> dict[Who, GpuHours]:
    """Returns the sums of `lines` by these fields of Who, in the order of `UsageReport.by`."""
    groups: dict[Who, GpuHours] = {}
    for who, use in lines.items():
        key = Who(**{name: getattr(who, name) for name in names})
        if key in groups:
            groups[key].add(use)
        else:
            groups[key] = use.copy()
    return dict(sorted(groups.items(), key=lambda item: (*(-each for each in _wasted(item[1])), item[0])))


def add_up(uses: Iterable[GpuHours]) -> GpuHours:
    """Returns the sum of these hours."""
    total = GpuHours()
    for each in uses:
        total.add(each)
    return total


def _wasted(use: GpuHours) -> tuple[float, ...]:
    """Returns the sort key of tables: first idle and stalled hours, then hours to be investigated; as money if it is
    known.
    """
    money = [use.cost_of(part) or 0.0 for part in (IDLE, STALLED, UNPROVEN)]
    hours = [use.parts.get(part) or 0.0 for part in (IDLE, STALLED, UNPROVEN)]
    return money[0] + money[1], hours[0] + hours[1], money[2], hours[2], use.held
