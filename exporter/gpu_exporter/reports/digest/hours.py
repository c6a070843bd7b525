"""The hours of a digest, by tenant and by holder. Only numbers that are certain enough are shown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gpu_exporter.common.promql.vector import VectorRow
from gpu_exporter.reconciler.evidence.records import HolderName, holder_name, title, users_id_of

HOLDERS_MAX = 2000  # per day: includes the largest of the whole period, unless they are small on every day
EXACT = 0.01  # a number may differ by this share from another source of it, else it is left out


class TenantName(NamedTuple):
    """A namespace, or an account and a user of Slurm. `cluster`: "" unless Prometheus has several clusters."""

    cluster: str
    scheduler: str
    namespace: str
    account: str
    user: str

    def __str__(self) -> str:
        name = self.namespace or "/".join(filter(None, (self.account, self.user))) or "(not named)"
        return f"{self.cluster}: {name}" if self.cluster else name


@dataclass
class Hours:
    """GPU-hours, kilowatt-hours and cost, as Prometheus returned them. Only `figures` has the values that may be shown.

    `busy`: integral of utilization. `stalled`: fully busy without progress. None: no exporter has the counter.
    `recorded`: GPU-hours that the rules recorded; `cost` covers only these. `unpriced`: recorded GPU-hours without a
    price. `unmetered`: GPU-hours on GPUs without an energy counter. `unproven`: at utilization 0, by one witness only.
    """

    held: float = 0.0
    known: float | None = 0.0
    busy: float | None = 0.0
    idle: float | None = 0.0
    energy_kwh: float | None = None
    cost: float = 0.0
    cost_idle: float = 0.0
    unpriced: float = 0.0
    stalled: float | None = 0.0
    cost_stalled: float = 0.0
    recorded: float = 0.0
    unmetered: float = 0.0
    unproven: float = 0.0

    @property
    def is_recorded(self) -> bool:
        """Whether the rules recorded exactly these hours. They record fewer while Prometheus does not run, and more if
        time of a stall first counted as used.
        """
        return abs(self.recorded - self.held) <= EXACT * self.held

    @property
    def is_priced(self) -> bool:
        return self.is_recorded and self.unpriced <= EXACT * self.held

    def figures(self) -> dict[str, float | None]:
        """The numbers that are certainly right, by their names in JSON; None for the others."""
        priced = self.is_priced
        return {
            "held_hours": self.held,
            "known_hours": self.known,
            "busy_hours": self.busy,
            "idle_hours": self.idle,
            "stalled_hours": self.stalled,
            "unproven_hours": self.unproven,
            "used_hours": _rest(self.known, self.idle, self.stalled, self.unproven),
            "unknown_hours": _rest(self.held, self.known),
            "idle_ratio": _share(self.idle, self.held),
            "busy_ratio": _share(self.busy, self.known),
            "energy_kwh": self.energy_kwh if self.unmetered <= EXACT * self.held else None,
            "cost": self.cost if priced else None,
            "cost_idle": self.cost_idle if priced else None,
            "cost_stalled": self.cost_stalled if priced else None,
            "unpriced_hours": self.unpriced if self.is_recorded else None,
        }

    def add(self, other: Hours) -> None:
        for name, more in vars(other).items():
            have = getattr(self, name)
            if name == "energy_kwh":  # None without any energy counter; `unmetered` has what is missing
                setattr(self, name, have if more is None else (have or 0.0) + more)
            else:
                setattr(self, name, None if have is None or more is None else have + more)


def _rest(whole: float | None, *parts: float | None) -> float | None:
    if whole is None or any(part is None for part in parts):
        return None
    return max(0.0, whole - sum(part or 0.0 for part in parts))


def _share(part: float | None, whole: float | None) -> float | None:
    """The share of `part` in `whole`, at most 1; None if unknown, or if `part` is larger than rounding can explain."""
    if part is None or not whole or part > (1.0 + EXACT) * whole:
        return None
    return min(1.0, part / whole)


def add_up(parts: Iterable[Hours]) -> Hours:
    """The sum of these hours. A number that is None in one part is None in the sum."""
    total = Hours()
    for each in parts:
        total.add(each)
    return total


class IdleHolder(NamedTuple):
    """A pod or job with its idle GPU-hours."""

    name: HolderName
    title: str
    owner: str
    idle: float
    cluster: str = ""


class IdleHours:
    """The idle GPU-hours of holders over all days."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, HolderName], IdleHolder] = {}
        self._cuts: list[tuple[float, set[tuple[str, HolderName]]]] = []

    def add(self, rows: Sequence[VectorRow]) -> None:
        """Adds the answer for a day."""
        for row in rows:
            name, cluster = holder_name(row.labels), row.labels.get("cluster", "")
            before = self._found[cluster, name].idle if (cluster, name) in self._found else 0.0
            known_as = title(name, users_id_of(row.labels))
            known_as = f"{cluster}: {known_as}" if cluster else known_as
            idle = before + row.value
            self._found[cluster, name] = IdleHolder(name, known_as, owner_of(row.labels), idle, cluster)
        if len(rows) >= HOLDERS_MAX:
            shown = {(row.labels.get("cluster", ""), holder_name(row.labels)) for row in rows}
            self._cuts.append((min(row.value for row in rows), shown))

    def list(self) -> list[IdleHolder]:
        """The holders, most idle hours first. Omits holders that the answer for some day may have cut off."""
        found = [
            each
            for key, each in self._found.items()
            if sum(least for least, shown in self._cuts if key not in shown) <= EXACT * each.idle
        ]
        return sorted(found, key=lambda each: -each.idle)


def owner_of(labels: Mapping[str, str]) -> str:
    """The user if Slurm names one, else a team or a workload."""
    person = "/".join(part for part in (labels.get("user", ""), labels.get("account", "")) if part)
    return person or labels.get("team", "") or labels.get("workload", "")
