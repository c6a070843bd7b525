"""The data of a usage report: GPU-hours by holder and model, and their sums.

Every source fills the same model. A part that a source does not know is None. A sum with such a part is None too,
because a missing part is not 0.
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
    """GPU-hours of a holder, or of many.

    - `parts`: GPU-hours by part, None for a part that the source does not know.
    - `busy`: integral of utilization in GPU-hours, over `known` GPU-hours. None if unknown.
    - `energy_kwh`: kilowatt-hours of the GPU-hours with an energy counter. `costs`: money for the GPU-hours with a
      price, by part, in the site's currency, with the keys of `parts`. None without such hours. Show only the values of
      `energy` and `cost_of`.
    - `unmetered`, `unpriced`: GPU-hours without an energy counter or a price, although `energy_kwh` or `costs` is set.
      A sum may contain a few of them; `unpriced` is negative if `costs` covers more hours than were held.
    - `spent`: money for all parts together, also for those that are None in `costs`; None: the sum of `costs`.
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
        """The same hours, to which others may be added."""
        return replace(self, parts=dict(self.parts), costs=None if self.costs is None else dict(self.costs))

    @property
    def energy(self) -> float | None:
        """Kilowatt-hours; None if more than 1 % of the GPU-hours have no energy counter."""
        return self.energy_kwh if self.unmetered <= EXACT * self.held else None

    @property
    def is_priced(self) -> bool:
        """Whether `costs` covers the GPU-hours held, to within 1 %."""
        return self.costs is not None and abs(self.unpriced) <= EXACT * self.held

    @property
    def cost(self) -> float | None:
        """Money for all hours held, None without a price."""
        return self._all_costs() if self.is_priced else None

    def _all_costs(self) -> float:
        return self.spent if self.spent is not None else sum(cost or 0.0 for cost in (self.costs or {}).values())

    def cost_of(self, part: str) -> float | None:
        """Money for the hours of this part, None without a price or if the part is unknown."""
        return self.costs.get(part) if self.costs is not None and self.is_priced else None

    def share(self, part: str) -> float | None:
        """The share of this part in the hours held, at most 1. None if unknown, or if the part is larger than rounding
        can explain.
        """
        return share(self.parts.get(part), self.held)

    @property
    def utilization(self) -> float | None:
        """Mean utilization in the time in which it is known."""
        return share(self.busy, self.known)

    @property
    def apart(self) -> float:
        """GPU-hours that are in no known part, because the source does not show their part."""
        return max(0.0, self.held - sum(hours or 0.0 for hours in self.parts.values()))


def share(part: float | None, whole: float | None) -> float | None:
    """`part / whole`, at most 1. None if unknown, or if `part` is larger than rounding can explain."""
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
    """A source that the report found. `covers`: in words. `cannot`: values that it cannot tell, with the remedies.
    `unseen`: work that it does not see, so that a GPU at work may look idle.
    """

    name: str
    covers: str
    cannot: tuple[str, ...] = ()
    unseen: str = ""


class HolderHours(NamedTuple):
    """A pod or job. A value is None if it is unknown.

    - `longest_idle_s`: its longest idle run in seconds. `zero_samples`: readings at zero.
    - `mean`: utilization while held (0 to 1). `peak_memory`: bytes on one GPU.
    - `sufficient`: the MIG profile or smaller GPU that would do, "" if none or unknown.
    """

    who: Who
    use: GpuHours
    longest_idle_s: float | None = None
    zero_samples: int | None = None
    mean: float | None = None
    peak_memory: float | None = None
    sufficient: str = ""


class Capacity(NamedTuple):
    """GPU-hours of one model in one cluster. `held`, `free`: None if unknown. Dark capacity: `free`."""

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
    """GPU-hours of a namespace or account in long idle runs, by the reconciler's windows, and the outcome of these
    runs.
    """

    cluster: str
    tenant: str
    outcome: str
    hours: float


class Covered(NamedTuple):
    """For how many seconds of `span` the source has data. `since`: the time of the first sample (Unix seconds), if the
    source has no earlier data. `failed`: the share of failed scrapes. Both are None if unknown.
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
    """The content of a report about the time from `start` to `end` (Unix seconds).

    - `lines`: hours by holder (or tenant) and model; all sums come from them.
    - `hours`: hours by hour of the period (Unix seconds of its start), None for an hour without data.
    - `days`: hours by day, by the Unix seconds of its start, oldest first; None for a day whose hours are unknown.
    - `before`: hours of the period before, of the same length; None if the source has not seen all of it.
    - `floors`: idle GPU-hours at each noise floor of FLOORS; empty if the source has no floor. `floor`: that of the
      other idle hours.
    - `left_out`: data that no column has, each with its account, such as gaps and holders of a single sample.
    - `missing`: values that are not shown, each with the remedy.
    - `holders`, `oversized`: None if the source cannot tell holders.
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
        """The hours by these fields of Who. The most expensive idle hours come first; without prices, the most idle
        hours.
        """
        return group(self.lines, *names)


def group(lines: Mapping[Who, GpuHours], *names: str) -> dict[Who, GpuHours]:
    """The sums of `lines` by these fields of Who, in the order of `UsageReport.by`."""
    groups: dict[Who, GpuHours] = {}
    for who, use in lines.items():
        key = Who(**{name: getattr(who, name) for name in names})
        if key in groups:
            groups[key].add(use)
        else:
            groups[key] = use.copy()
    return dict(sorted(groups.items(), key=lambda item: (*(-each for each in _wasted(item[1])), item[0])))


def add_up(uses: Iterable[GpuHours]) -> GpuHours:
    """The sum of these hours."""
    total = GpuHours()
    for each in uses:
        total.add(each)
    return total


def _wasted(use: GpuHours) -> tuple[float, ...]:
    """The order of tables: idle and stalled hours first, then those to be investigated; as money if known."""
    money = [use.cost_of(part) or 0.0 for part in (IDLE, STALLED, UNPROVEN)]
    hours = [use.parts.get(part) or 0.0 for part in (IDLE, STALLED, UNPROVEN)]
    return money[0] + money[1], hours[0] + hours[1], money[2], hours[2], use.held
