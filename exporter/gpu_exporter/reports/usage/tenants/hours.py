"""The hours of tenants and holders as Prometheus returned them, and those that are certain enough for the report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from gpu_exporter.common.promql.vector import VectorRow
from gpu_exporter.reconciler.evidence.records import HolderName, holder_name, title, users_id_of
from gpu_exporter.reports.usage.model import (
    EXACT,
    IDLE,
    PARTS,
    STALLED,
    UNKNOWN,
    UNPROVEN,
    USED,
    GpuHours,
    HolderHours,
    Who,
)

HOLDERS_MAX = 2000  # per day: includes the largest of the whole period, unless they are small on every day
# Parts of allocation:gpu_share:part. Its `used` also contains idle runs that are too short for the others.
PART_OF = {"idle_long": IDLE, "idle_short": IDLE, "unproven": UNPROVEN, "stalled": STALLED, "unknown": UNKNOWN}


@dataclass
class Hours:
    """GPU-hours, kilowatt-hours and costs, as Prometheus returned them.

    - `busy`: integral of utilization. `stalled`: fully busy without progress; None if no exporter has this counter.
    - `recorded`: GPU-hours that the rules recorded. `costs`: money for these hours, by part. `unpriced`: those of them
      without a price.
    - `unmetered`: GPU-hours without an energy counter. `unproven`: GPU-hours at zero that only one witness shows.
    """

    held: float = 0.0
    known: float | None = 0.0
    busy: float | None = 0.0
    idle: float | None = 0.0
    energy_kwh: float | None = None
    costs: dict[str, float] = field(default_factory=dict)
    unpriced: float = 0.0
    stalled: float | None = 0.0
    recorded: float = 0.0
    unmetered: float = 0.0
    unproven: float = 0.0

    @property
    def is_recorded(self) -> bool:
        """Whether the rules recorded exactly these hours. They record fewer while Prometheus is down, and more if
        stalled time first counted as used.
        """
        return abs(self.recorded - self.held) <= EXACT * self.held

    def use(self, *, has_money: bool = True) -> GpuHours:
        """Returns the hours by part. A part is None if a counter that it needs is missing."""
        known = {
            IDLE: self.idle,
            STALLED: self.stalled,
            UNPROVEN: self.unproven,
            USED: _rest(self.known, self.idle, self.stalled, self.unproven),
            UNKNOWN: _rest(self.held, self.known),
        }
        costs = {part: self.costs.get(part, 0.0) if known.get(part) is not None else None for part in PARTS}
        return GpuHours(
            self.held,
            {part: known.get(part) for part in PARTS},
            self.busy,
            self.known or 0.0,
            self.energy_kwh,
            costs if has_money and self.costs else None,
            self.unmetered,
            self.unpriced + self.held - self.recorded,
            sum(self.costs.values()),
        )

    def add(self, other: Hours) -> None:
        for name, more in vars(other).items():
            have = getattr(self, name)
            if name == "energy_kwh":  # None without any energy counter; `unmetered` has the missing hours
                setattr(self, name, have if more is None else (have or 0.0) + more)
            elif name == "costs":
                self.costs = {part: have.get(part, 0.0) + more.get(part, 0.0) for part in {**have, **more}}
            else:
                setattr(self, name, None if have is None or more is None else have + more)


def _rest(whole: float | None, *parts: float | None) -> float | None:
    if whole is None or any(part is None for part in parts):
        return None
    return max(0.0, whole - sum(part or 0.0 for part in parts))


def add_up(parts: Iterable[Hours]) -> Hours:
    """Returns the sum of these hours. A number that is None in one of them is None in the sum."""
    total = Hours()
    for each in parts:
        total.add(each)
    return total


class IdleHours:
    """GPU-hours of holders that were idle or possibly idle, over all days."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, HolderName], tuple[Who, dict[str, float]]] = {}
        self._cuts: list[tuple[float, set[tuple[str, HolderName]]]] = []

    def add(self, rows: Sequence[VectorRow]) -> None:
        """Adds the answer for one day: one row for each holder and part."""
        of_the_day: dict[tuple[str, HolderName], float] = {}
        for row in rows:
            key = row.labels.get("cluster", ""), holder_name(row.labels)
            _, parts = self._found.get(key, (None, {}))
            part = PART_OF.get(row.labels.get("part", ""), "")
            parts[part] = parts.get(part, 0.0) + row.value
            self._found[key] = (who_of(row, key[1]), parts)
            of_the_day[key] = of_the_day.get(key, 0.0) + row.value * (part in (IDLE, UNPROVEN))
        if len(of_the_day) >= HOLDERS_MAX:
            self._cuts.append((min(of_the_day.values()), set(of_the_day)))

    def list(self) -> list[HolderHours]:
        """Returns the holders, most idle hours first. Omits a holder that may be missing in the answer for some day,
        because answers are limited.
        """
        found = [
            HolderHours(who, _use_of(parts))
            for key, (who, parts) in self._found.items()
            if sum(least for least, shown in self._cuts if key not in shown)
            <= EXACT * (parts.get(IDLE, 0.0) + parts.get(UNPROVEN, 0.0))
        ]
        return sorted(found, key=lambda each: -(each.use.parts[IDLE] or 0.0))


def who_of(row: VectorRow, name: HolderName, model: str = "") -> Who:
    """Returns the holder and its owner from the labels of a row."""
    cluster, account, user, team, workload = (
        row.labels.get(label, "") for label in ("cluster", "account", "user", "team", "workload")
    )
    known_as = title(name, users_id_of(row.labels))
    return Who(cluster, name.scheduler, name.namespace, account, user, team, workload, known_as, model)


def _use_of(parts: dict[str, float]) -> GpuHours:
    known = {part: parts.get(part, 0.0) for part in set(PART_OF.values())}
    held = sum(parts.values())
    return GpuHours(held, {part: known.get(part) for part in PARTS}, None, held - known[UNKNOWN])
