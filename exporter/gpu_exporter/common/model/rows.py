"""One row of the table of GPUs, which the exporter prints and `top` shows for several nodes."""

from __future__ import annotations

from typing import NamedTuple

from gpu_exporter.common.durations import format_age
from gpu_exporter.common.model.views import Throttling

WHY_MAX = 120  # characters of WHY in a table: one sentence; JSON, `top` and `explain` have everything
GOOD, NEUTRAL, WARN, BAD = "good", "neutral", "warn", "bad"
TONES = {  # of a state
    "healthy": GOOD,
    "free": NEUTRAL,
    "mig": NEUTRAL,
    "away": NEUTRAL,
    "unknown": NEUTRAL,
    "low": WARN,
    "bursty": WARN,
    "busy_inefficient": WARN,
    "throttled": WARN,
    "stalled": BAD,
    "held_idle": BAD,
    "held_no_process": BAD,
    "lost": BAD,
    "missing": BAD,
    "hung": BAD,
    "stale": BAD,
}
UNKNOWN = "-"
NAMES = ("GPU", "NAME", "UTIL", "MEMORY", "POWER", "TEMP", "HOLDER", "OWNER", "HELD", "IDLE", "STATE", "CAUSE", "WHY")
NUMBERS = frozenset(("UTIL", "MEMORY", "POWER", "TEMP", "HELD", "IDLE"))
GIB = 1024**3


class Row(NamedTuple):
    """One row of the table. An unknown number is None, an unknown text is "".

    - `gpu`: the GPU's index; index:instance for a MIG instance. `utilization`: 0 to 1.
    - `held_s`: seconds since the holder got the unit. `idle_s`, `stalled_s`: length of the present idle run and stall.
    - `throttling`: of the GPU over the last window. `age_s`: seconds since the GPU's last reading.
    - `cause`: the most certain cause with its confidence. `advice`: the change to make, once per holder.
    """

    gpu: str
    name: str
    utilization: float | None
    memory_bytes: float | None
    power_w: float | None
    temperature_celsius: float | None
    holder: str
    owner: str
    held_s: float | None
    idle_s: float | None
    state: str
    why: str
    throttling: Throttling | None = None
    age_s: float | None = None
    stalled_s: float | None = None
    cause: str = ""
    advice: str = ""

    @property
    def short_why(self) -> str:
        """The reason, cut before the first part (after `; `) that does not fit into a cell."""
        first, *parts = self.why.split("; ")
        for part in parts:
            if len(first) + len(part) + 2 > WHY_MAX:
                break
            first = f"{first}; {part}"
        return first if len(first) <= WHY_MAX else f"{first[: WHY_MAX - 1].rsplit(' ', 1)[0]}…"

    @property
    def tone(self) -> str:
        """The tone of the state, which decides its colour: GOOD, NEUTRAL, WARN or another."""
        return TONES.get(self.state, NEUTRAL)

    @property
    def wasted_s(self) -> float:
        """Seconds for which the holder has not used the GPU: the length of the present idle run or stall."""
        return max(self.idle_s or 0.0, self.stalled_s or 0.0) if self.holder else 0.0

    @property
    def texts(self) -> tuple[str, ...]:
        """The cells as text, in the order of NAMES; UNKNOWN for unknown values."""
        return (
            self.gpu,
            self.name,
            format_ratio(self.utilization),
            format_gib(self.memory_bytes),
            format_unit(self.power_w, " W"),
            format_unit(self.temperature_celsius, " °C"),
            self.holder or UNKNOWN,
            self.owner or UNKNOWN,
            UNKNOWN if self.held_s is None else format_age(self.held_s),
            UNKNOWN if self.idle_s is None else format_age(self.idle_s),
            self.state,
            self.cause,
            f"{self.short_why} -> {self.advice}" if self.advice else self.short_why,
        )


def format_ratio(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.0%}"


def format_gib(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value / GIB:.1f} GiB"


def format_unit(value: float | None, unit: str) -> str:
    return UNKNOWN if value is None else f"{value:.0f}{unit}"
