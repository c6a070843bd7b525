"""The common format of all sources: who held which unit in a window, and how the unit was used."""

from __future__ import annotations

from typing import NamedTuple

WINDOW_S = 3600.0


class Unit(NamedTuple):
    """A GPU or a MIG instance. `gi`: the instance's id. `profile`: e.g. 1g.10gb. Texts are "" if unknown."""

    cluster: str
    node: str
    uuid: str
    gi: str = ""
    profile: str = ""
    model: str = ""


class HolderId(NamedTuple):
    """A pod (`namespace`, `name`) or a job (`name`), as the source names it."""

    cluster: str
    scheduler: str
    namespace: str
    name: str
    user: str = ""
    account: str = ""


NOT_KNOWN = HolderId("", "", "", "")  # the holder of units whose source names none


class PlacedSeries(NamedTuple):
    """The content of a series' labels: unit, holder, and the pod in which a job ran. Holder and pod may be None."""

    unit: Unit
    holder: HolderId | None = None
    pod: HolderId | None = None


class Cell(NamedTuple):
    """One unit in the window that begins at `start` (Unix seconds), with one holder. `holder`: None if nobody held it.

    - `seconds`: the unit's time, in seconds: `used`, `low`, `idle`, `unproven` and `unknown` together. If pods share a
      unit, each gets a part of this time.
    - `at_floors`: idle seconds at each of model.FLOORS; `idle` is one of them.
    - `busy`: integral of utilization over `known` seconds. `peak_memory`: bytes, None if unknown. `samples`: number of
      readings.
    - `wall`: seconds for which the holder was seen on the unit, 0 if unknown. On a shared unit it exceeds `seconds`.
    - `claimed`: seconds of a unit without a holder which probably belong to pods that no exporter names.
    - `source`: the exporter. `pod`: the pod in which a job ran.
    - `is_seen`: false for time in which the exporter should have samples of the unit and has none.
    - `is_free`: true if the unit is free without a holder. If false, the source may not name holders.
    - `is_shared`: pods that the exporter does not name may share the unit.
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
    is_shared: bool = False
