"""One row of the table of GPUs, which the exporter prints and `top` shows for several nodes."""

from __future__ import annotations

from typing import NamedTuple

from gpu_exporter.common.durations import format_age
from gpu_exporter.common.model.views import Throttling

UNKNOWN = "-"
NAMES = ("GPU", "NAME", "UTIL", "MEMORY", "POWER", "TEMP", "HOLDER", "OWNER", "HELD", "IDLE", "STATE", "CAUSE", "WHY")
NUMBERS = frozenset(("UTIL", "MEMORY", "POWER", "TEMP", "HELD", "IDLE"))
GIB = 1024**3


class Row(NamedTuple):
    """`gpu`: the index, for a MIG instance index:instance. While unknown: None for a number, "" for a text.

    `utilization`: 0 to 1. `held_s`: how long the holder has held it. `idle_s`: length of the current idle run.
    `stalled_s`: length of the current stall. `throttling`: of the GPU over the last window. `age_s`: age of the GPU's
    last reading. `cause`: the most certain one with its confidence. `advice`: what to change, once per holder.
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
    def wasted_s(self) -> float:
        """How long its holder has not used it: the present idle run, or the present stall."""
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
            f"{self.why} -> {self.advice}" if self.advice else self.why,
        )


def format_ratio(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.0%}"


def format_gib(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value / GIB:.1f} GiB"


def format_unit(value: float | None, unit: str) -> str:
    return UNKNOWN if value is None else f"{value:.0f}{unit}"
