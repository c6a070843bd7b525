"""Adds up the cells of all sources to a report."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from gpu_exporter.common.promql.absence import moment
from gpu_exporter.reports.usage.attribute import short_name
from gpu_exporter.reports.usage.cells import NOT_KNOWN, WINDOW_S, Cell, HolderId, Unit
from gpu_exporter.reports.usage.model import (
    FLOORS,
    IDLE,
    LOW,
    PARTS,
    UNKNOWN,
    UNPROVEN,
    USED,
    Capacity,
    Covered,
    GpuHours,
    HolderHours,
    UsageReport,
    Who,
)
from gpu_exporter.reports.usage.sizes import slice_of, sufficient_size

HOUR_S = 3600.0
SHOWN_MIN = 0.05  # GPU-hours: less prints as 0.0
SHORT = "(too short to be seen)"
SAMPLES_MIN = 2  # a holder of one sample is not seen
SLICES = re.compile(r"^([1-7])g\.")
IDLE_WHOLE = 0.999  # share of a window from which an idle run continues
WHOLE = 0.95  # share of a window that a holder must be seen, so that its run continues in the next window
TELLS = (USED, LOW, IDLE, UNPROVEN, UNKNOWN)  # the parts that gauges can tell


class HolderFacts(NamedTuple):
    """A holder's data from other sources. Texts are "" if unknown."""

    workload: str = ""
    team: str = ""


@dataclass(slots=True)
class _Sum:
    """Seconds by part. A part of a GPU counts by its share."""

    held: float = 0.0
    used: float = 0.0
    low: float = 0.0
    idle: float = 0.0
    unproven: float = 0.0
    unknown: float = 0.0
    busy: float = 0.0
    known: float = 0.0

    def add(self, cell: Cell, weight: float) -> None:
        self.held += cell.seconds * weight
        self.used += cell.used * weight
        self.low += cell.low * weight
        self.idle += cell.idle * weight
        self.unproven += cell.unproven * weight
        self.unknown += cell.unknown * weight
        self.busy += cell.busy * weight
        self.known += cell.known * weight

    def use(self, price: float | None) -> GpuHours:
        parts: dict[str, float | None] = {part: getattr(self, part) / HOUR_S for part in TELLS}
        parts = {**dict.fromkeys(PARTS), **parts}
        costs = None if price is None else {part: hours and hours * price for part, hours in parts.items()}
        return GpuHours(self.held / HOUR_S, parts, self.busy / HOUR_S, self.known / HOUR_S, costs=costs)


@dataclass(slots=True)
class _Life:
    """One holder over the whole period. `zeros`: number of samples at zero. `runs`: by unit, the end and length of its
    present idle run (seconds), and whether the whole last window was seen.
    """

    samples: int = 0
    zeros: float = 0.0
    peak: float | None = None
    longest: float = 0.0
    is_whole: bool = True
    runs: dict[Unit, tuple[float, float, bool]] = field(default_factory=dict)

    def add(self, cell: Cell) -> None:
        self.samples += cell.samples
        if cell.peak_memory is not None:
            self.peak = max(self.peak or 0.0, cell.peak_memory)
        self.is_whole = self.is_whole and not cell.unit.profile
        zero = cell.idle + cell.unproven
        self.zeros += cell.samples * zero / cell.seconds if cell.seconds else 0.0
        # The GPUs of a pod that no exporter names are not known, and so their runs.
        wall = cell.wall or (cell.seconds if cell.unit.uuid else 0.0)
        if not wall:
            return
        # Within a window, the longest run is unknown, so only whole windows count. In a window of
        # which a holder has only a part, a run begins or ends.
        end, run, was_whole = self.runs.get(cell.unit, (cell.start, 0.0, True))
        if end > cell.start:  # another target showed this window
            return
        is_whole = wall >= WHOLE * WINDOW_S
        own = wall if zero >= IDLE_WHOLE * cell.seconds else 0.0
        goes_on = end >= cell.start and (is_whole or was_whole)
        run = (run if goes_on else 0.0) + own if own else 0.0
        self.longest = max(self.longest, run)
        self.runs[cell.unit] = (cell.start + WINDOW_S, run if is_whole else own, is_whole)


@dataclass(slots=True)
class _BoardTime:
    """When a GPU was seen: first and last window (Unix seconds), and seconds in total."""

    first: float
    last: float
    total: float = 0.0
    in_first: float = 0.0
    in_last: float = 0.0

    @property
    def gap(self) -> float:
        """Seconds without samples between the first and the last window."""
        if self.last <= self.first:
            return 0.0
        inside = self.total - self.in_first - self.in_last
        return max(0.0, self.last - self.first - WINDOW_S - inside)


class CellSums:
    """Adds up cells. Cells of one unit must come in the order of time."""

    def __init__(self, price_of: Callable[[str, str], float | None]) -> None:
        """`price_of`: returns the price of a GPU-hour by model and cluster, None without a price."""
        self._price_of = price_of
        self._sums: defaultdict[tuple[HolderId, str], _Sum] = defaultdict(_Sum)
        self._lives: defaultdict[HolderId, _Life] = defaultdict(_Life)
        self._hours: defaultdict[float, defaultdict[tuple[str, str], _Sum]] = defaultdict(lambda: defaultdict(_Sum))
        self._floors: list[float] = []
        # By cluster, GPU and window: seconds of the GPU, of each of its instances, held, and in use without a holder.
        self._seen: dict[tuple[str, str, float], tuple[float, dict[str, float], float, float]] = {}
        self._models: dict[tuple[str, str], str] = {}
        self._capacity: defaultdict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        self._presence: dict[tuple[str, str], _BoardTime] = {}
        self._facts: dict[HolderId, HolderFacts] = {}
        # By source and cluster: units without a holder. If none of the source's units has one, it names no holders.
        self._free: defaultdict[tuple[str, str], defaultdict[tuple[float, str], _Sum]] = defaultdict(
            lambda: defaultdict(_Sum)
        )
        self._naming: set[tuple[str, str]] = set()
        self._nodes: set[tuple[str, str]] = set()  # of this chunk, as attribute.short_name
        self._unseen = self._dark = self._shared = self._zero_unnamed = 0.0
        self._gap: float | None = None
        self._last = 0.0  # start of the last window

    def add(self, cells: Iterable[Cell]) -> None:
        for cell in cells:
            unit, holder = cell.unit, cell.holder
            weight = share_of(unit)
            self._last = max(self._last, cell.start)
            self._see(cell, weight)
            if holder is None:
                if not cell.is_free:
                    self._free[cell.source, unit.cluster][cell.start, unit.model].add(cell, weight)
                continue
            if unit.uuid:
                self._naming.add((cell.source, unit.cluster))
            self._sums[holder, unit.model].add(cell, weight)
            self._lives[holder].add(cell)
            self._hours[cell.start][unit.cluster, unit.model].add(cell, weight)
            if cell.at_floors:
                self._floors = self._floors or [0.0] * len(FLOORS)
                for at, seconds in enumerate(cell.at_floors):
                    self._floors[at] += seconds * weight

    def _see(self, cell: Cell, weight: float) -> None:
        """Counts the presence of a unit. A cell without a unit belongs to a pod on GPUs that other cells count."""
        unit = cell.unit
        held = cell.seconds * weight if cell.holder is not None else 0.0
        self._shared += cell.is_shared * cell.unknown * weight
        if not cell.is_seen:
            self._unseen += held
            return
        if not unit.uuid:
            self._capacity[unit.cluster, unit.model][1] += held
            return
        self._nodes.add((unit.cluster, short_name(unit.node)))
        self._models.setdefault((unit.cluster, unit.uuid), unit.model)
        key = unit.cluster, unit.uuid, cell.start
        whole, instances, taken, outside = self._seen.get(key) or (0.0, {}, 0.0, 0.0)
        if unit.gi:
            instances[unit.gi] = instances.get(unit.gi, 0.0) + cell.seconds
        else:
            whole += cell.seconds
        if cell.holder is None:  # free only as far as it was zero
            outside += weight * max(0.0, cell.used + cell.low + cell.unknown - cell.claimed)
        self._seen[key] = whole, instances, taken + held, outside

    def end_chunk(self, offers: Mapping[tuple[str, str], float] | None = None) -> None:
        """Adds the capacity of a chunk after all its cells.

        `offers`: GPU-seconds that nodes offer, by cluster and node, for nodes whose GPUs no exporter shows.
        """
        for (cluster, node), seconds in (offers or {}).items():
            if (cluster, short_name(node)) not in self._nodes:
                self._dark += seconds
        for (cluster, uuid, start), (whole, instances, taken, outside) in sorted(
            self._seen.items(), key=lambda item: item[0][2]
        ):
            seconds = min(WINDOW_S, max(whole, *instances.values(), 0.0))
            total = self._capacity[cluster, self._models[cluster, uuid]]
            total[0] += seconds
            total[1] += min(taken, seconds)
            total[2] += min(outside, max(0.0, seconds - taken))
            seen = self._presence.setdefault((cluster, uuid), _BoardTime(start, start, in_first=seconds))
            seen.last, seen.in_last, seen.total = start, seconds, seen.total + seconds
        for life in self._lives.values():  # a run that has ended does not continue
            life.runs = {unit: run for unit, run in life.runs.items() if run[0] > self._last}
        self._seen.clear()
        self._nodes.clear()

    def note_gap(self, seconds: float) -> None:
        """Sets the GPU-seconds without samples between the first and the last sample of a GPU. For sources that know
        this time exactly; otherwise it is computed from the cells.
        """
        self._gap = seconds

    def know(self, facts: Mapping[HolderId, HolderFacts]) -> None:
        """Adds data about holders. An unknown value does not replace a known one."""
        for holder, more in facts.items():
            have = self._facts.get(holder, HolderFacts())
            self._facts[holder] = HolderFacts(more.workload or have.workload, more.team or have.team)

    def fill(self, report: UsageReport) -> None:
        unnamed = self._hold_unnamed()
        hours, number = self._join_short()
        uses: dict[HolderId, dict[Who, GpuHours]] = {}
        for (holder, model), total in sorted(self._sums.items()):
            uses.setdefault(holder, {})[self._who(holder, model)] = total.use(self._price_of(model, holder.cluster))
        report.lines = {who: use for lines in uses.values() for who, use in lines.items()}
        report.holders = [
            self._holder(holder, lines) for holder, lines in uses.items() if holder.name not in (NOT_KNOWN.name, SHORT)
        ]
        report.oversized = [each for each in report.holders if each.sufficient]
        if self._floors:
            report.floors = {floor: seconds / HOUR_S for floor, seconds in zip(FLOORS, self._floors, strict=True)}
        report.capacity = [
            _capacity(cluster, model, total, None if cluster in unnamed else held, outside)
            for (cluster, model), (total, held, outside) in sorted(self._capacity.items())
        ]
        self._fill_hours(report)
        self._fill_left_out(report, hours, number)

    def _hold_unnamed(self) -> set[str]:
        """Adds the units of sources that name no holders. Returns the clusters with such units.

        While in use, such a unit counts as held by an unknown holder. At zero, it was free, or held and idle.
        """
        unnamed = set()
        for (source, cluster), sums in self._free.items():
            if (source, cluster) in self._naming:
                continue
            unnamed.add(cluster)
            unknown = NOT_KNOWN._replace(cluster=cluster)
            for (start, model), total in sums.items():
                zero = total.idle + total.unproven
                self._zero_unnamed += zero
                total.held, total.known = total.used + total.low + total.unknown, max(0.0, total.known - zero)
                total.idle = total.unproven = 0.0
                for mine in (self._sums[unknown, model], self._hours[start][cluster, model]):
                    for name in _Sum.__slots__:
                        setattr(mine, name, getattr(mine, name) + getattr(total, name))
            self._lives[unknown].samples += SAMPLES_MIN
        return unnamed

    def _fill_hours(self, report: UsageReport) -> None:
        start = report.start
        while start < report.end:
            models = self._hours.get(start)
            report.hours[start] = None
            if models is not None:
                use = GpuHours()
                for (cluster, model), total in sorted(models.items()):
                    use.add(total.use(self._price_of(model, cluster)))
                report.hours[start] = use
            start += WINDOW_S
        known = [start for start, use in report.hours.items() if use is not None]
        since = min(known, default=None)
        is_late = since is not None and since > report.start
        report.covered = Covered(len(known) * WINDOW_S, report.end - report.start, since if is_late else None)

    def _join_short(self) -> tuple[float, int]:
        """Makes holders of a single sample one holder of their tenant, with unknown use: they are too short to be seen.
        Returns their GPU-hours and their number.
        """
        short = {holder for holder, life in self._lives.items() if life.samples < SAMPLES_MIN}
        hours = 0.0
        for holder, model in [key for key in self._sums if key[0] in short]:
            held = self._sums.pop((holder, model)).held
            total = self._sums[holder._replace(name=SHORT), model]
            total.held += held
            total.unknown += held
            hours += held / HOUR_S
        return hours, len(short)

    def _fill_left_out(self, report: UsageReport, short: float, number: int) -> None:
        gap = self._gap if self._gap is not None else sum(each.gap for each in self._presence.values())
        gaps = gap / HOUR_S
        if gaps >= SHOWN_MIN:
            report.left_out.append(
                f"{gaps:,.1f} GPU-hours between the first and the last sample of a GPU have no samples: scrapes "
                "failed, or the exporter or log stopped"
            )
        if self._dark >= SHOWN_MIN * HOUR_S:
            report.left_out.append(
                f"{self._dark / HOUR_S:,.1f} GPU-hours of nodes without a GPU exporter: install gpu-exporter there"
            )
        if self._unseen >= SHOWN_MIN * HOUR_S:
            report.missing.append(
                f"the use of {self._unseen / HOUR_S:,.1f} GPU-hours that pods requested while no exporter showed their "
                "GPUs: these hours are unknown"
            )
        if self._shared >= SHOWN_MIN * HOUR_S:
            report.missing.append(
                f"the use of {self._shared / HOUR_S:,.1f} GPU-hours of GPUs that several pods share: the exporter "
                "names at most one of these pods, so the hours are divided by their requests. Start dcgm-exporter with "
                "--kubernetes-virtual-gpus"
            )
        if self._zero_unnamed >= SHOWN_MIN * HOUR_S:
            report.left_out.append(
                f"{self._zero_unnamed / HOUR_S:,.1f} GPU-hours at zero of GPUs whose holders no source names: "
                "these GPUs were free, or held and idle"
            )
        outside = sum(seconds for _, _, seconds in self._capacity.values()) / HOUR_S
        if outside >= SHOWN_MIN and not self._zero_unnamed:
            report.left_out.append(f"{outside:,.1f} GPU-hours without a pod or job, in use or unknown")
        if number:
            report.missing.append(
                f"the use of {number:,} pods or jobs with a single sample: their {short:,.1f} GPU-hours are unknown"
            )
        if report.covered is not None and report.covered.since is not None:
            report.left_out.append(f"the time before {moment(report.covered.since)}: the source has no samples of it")

    def _who(self, holder: HolderId, model: str) -> Who:
        if holder.name == NOT_KNOWN.name:
            return Who(holder.cluster, holder="(holder not known)", model=model)
        facts = self._facts.get(holder, HolderFacts())
        if holder.name == SHORT:
            return Who(*holder[:3], holder.account, holder.user, holder=SHORT, model=model)
        title = f"{holder.namespace}/{holder.name}" if holder.scheduler == "kubernetes" else f"job {holder.name}"
        workload = facts.workload or (holder.name if holder.scheduler == "kubernetes" else "")
        return Who(
            holder.cluster,
            holder.scheduler,
            holder.namespace,
            holder.account,
            holder.user,
            facts.team,
            workload,
            title,
            model,
        )

    def _holder(self, holder: HolderId, lines: Mapping[Who, GpuHours]) -> HolderHours:
        total = GpuHours()
        for use in lines.values():
            total.add(use)
        life, models = self._lives[holder], {who.model for who in lines}
        who = next(iter(lines))
        if len(models) > 1:
            who = who._replace(model="")
        mean = total.busy / total.known if total.busy is not None and total.known else None
        size = ""
        if len(models) == 1 and life.is_whole and mean is not None and life.peak is not None:
            size = sufficient_size(next(iter(models)), total.known, mean, life.peak)
        return HolderHours(who, total, life.longest or None, round(life.zeros), mean, life.peak, size)


def _capacity(cluster: str, model: str, total: float, held: float | None, outside: float) -> Capacity:
    """`outside`: seconds in use, or unknown, without a holder."""
    if held is None:
        return Capacity(cluster, model, total / HOUR_S, None, None)
    total = max(total, held)  # pods on nodes without an exporter hold GPUs that no exporter shows
    return Capacity(cluster, model, total / HOUR_S, held / HOUR_S, max(0.0, total - held - outside) / HOUR_S)


def share_of(unit: Unit) -> float:
    """Returns the share of a MIG instance in its GPU, 1 for a whole GPU. An unknown profile counts as one slice of
    seven.
    """
    if not unit.profile and not unit.gi:
        return 1.0
    match = SLICES.match(unit.profile)
    return min(1.0, (int(match[1]) if match else 1) * slice_of(unit.model, unit.profile))
