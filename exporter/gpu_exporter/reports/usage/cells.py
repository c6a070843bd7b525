"""The normal form of all sources: who held which unit in a window, and how it was used."""

from __future__ import annotations

from typing import NamedTuple

WINDOW_S = 3600.0


class Unit(NamedTuple):
    """A GPU, or a MIG instance (`gi`: its id, `profile`: such as 1g.10gb). Texts are "" if unknown."""

    cluster: str
    node: str
    uuid: str
    gi: str = ""
    profile: str = ""
    model: str = ""


class HolderId(NamedTuple):
    """A pod (`namespace`, `name`) or a job (`name`) as the source names it."""

    cluster: str
    scheduler: str
    namespace: str
    name: str
    user: str = ""
    account: str = ""


NOT_KNOWN = HolderId("", "", "", "")  # the holder of units whose source names none


class PlacedSeries(NamedTuple):
    """The labels of a series: unit, holder, and the pod in which a job ran. None without one."""

    unit: Unit
    holder: HolderId | None = None
    pod: HolderId | None = None


class Cell(NamedTuple):
    """Seconds of one unit in one window that begins at `start` (Unix seconds), by one holder, None if nobody held it.

    - `seconds`: the sum of `used`, `low`, `idle`, `unproven` and `unknown`, in seconds of the unit. A pod that shares a
      unit has a part of these seconds.
    - `at_floors`: idle seconds at each of model.FLOORS; `idle` is one of them.
    - `busy`: the integral of utilization over `known` seconds. `peak_memory`: bytes, None if unknown.
    - `wall`: seconds for which the holder was seen on the unit, which are more than `seconds` on a shared unit; 0 if
      unknown. `claimed`: seconds of a unit without a holder that pods hold which no exporter names.
    - `samples`: readings behind the cell. `source`: the exporter.
    - `pod`: the pod in which a job ran.
    - `is_seen`: false for time for which an exporter should have samples of the unit, but has none.
    - `is_free`: a unit without a holder is free. Otherwise the source may not name holders.
    """

    unit: Unit
    holder: HolderId | None
    start: float
    seconds: float
    samples: int
    used: float = 0.0
    low: float = 0.0
    idle: float = 0.0
    unproven: float = 0.0
    unknown: float = 0.0
    at_floors: tuple[float, ...] = ()
    busy: float = 0.0
    known: float = 0.0
    peak_memory: float | None = None
    is_seen: bool = True
    is_free: bool = False
    wall: float = 0.0
    claimed: float = 0.0
    source: str = ""
    pod: HolderId | None = None
