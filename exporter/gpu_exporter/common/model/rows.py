"""Makes the table of GPUs, which the exporter prints, and which `top` shows for several nodes.

The JSON status contains each fact once: with its GPU, MIG instance or allocation. A row repeats the facts that it
needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

from gpu_exporter.common.durations import format_age
from gpu_exporter.common.model.views import Throttling

WHY_MAX = 120  # characters of WHY in a table: one sentence; JSON, `top` and `explain` have everything
GOOD, NEUTRAL, WARN, BAD = "good", "neutral", "warn", "bad"
TONES = {  # of a state
    "healthy": GOOD,
    "free": NEUTRAL,
    "closed": NEUTRAL,
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
Json: TypeAlias = Mapping[str, Any]


class Row(NamedTuple):
    """One row of the table. An unknown number is None, an unknown text is "".

    - `gpu`: the GPU's index; index:instance for a MIG instance. `utilization`: 0 to 1.
    - `held_s`: seconds since the holder got the unit. `idle_s`, `stalled_s`: length of the present idle run and stall.
    - `throttling`: the throttling of the GPU over the last window. `age_s`: seconds since the GPU's last reading.
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


def join_rows(status: Json) -> Iterator[Row]:
    """Yields a row for each allocation of a status (docs/status.schema.json), and for each unit without a holder. Rows
    are in the order of the GPUs. The rows of MIG instances follow the row of their board.

    Only the first row of a holder contains the advice. Values keep the types of the status. A malformed status raises
    various exceptions.
    """
    held: dict[tuple[str, str], list[Json]] = {}
    for allocation in status["allocations"]:
        held.setdefault((allocation["uuid"], allocation["mig_uuid"]), []).append(allocation)
    said: set[tuple[str, str]] = set()
    for gpu in status["gpus"]:
        for instance in (None, *gpu["instances"]):
            unit = gpu["uuid"], "" if instance is None else instance["mig_uuid"]
            for each in held.pop(unit, (None,)):  # in a malformed status, several GPUs may have one UUID
                row = _join_row(status["timestamp_seconds"], gpu, instance, each)
                yield row._replace(advice="") if (row.holder, row.advice) in said else row
                said.add((row.holder, row.advice))


def _join_row(wall: float, gpu: Json, instance: Json | None, held: Json | None) -> Row:
    label = str(gpu["gpu"]) if gpu["gpu"] is not None else gpu["pci_bus_id"] or gpu["uuid"]
    board: Json = gpu if instance is None else {}  # what only the row of a whole GPU shows
    values = held or board
    state, why, cause, advice = _judge(gpu, instance or gpu, held)
    if board:
        conditions = [each["text"] for each in board["conditions"] if board["up"] and each["text"] not in why]
        why = "; ".join(filter(None, (*conditions, why, board["read_error"])))
    throttled = board.get("throttle_ratio")
    return Row(
        gpu=f"{label}:{instance['mig']}" if instance else label,
        name=instance["profile"] if instance else gpu["name"] or ("" if held else UNKNOWN),
        utilization=values.get("utilization_ratio"),
        memory_bytes=values.get("memory_used_bytes"),
        power_w=(board or values).get("power_watts"),
        temperature_celsius=board.get("temperature_celsius"),
        holder=held["holder"] if held else "",
        owner="/".join(filter(None, (held["user"], held["account"]))) if held else "",
        held_s=wall - held["start_timestamp_seconds"] if held else None,
        idle_s=held["idle_run_seconds"] if held else None,
        state=state,
        why=why,
        throttling=None if throttled is None else Throttling(board["throttle_reason"], throttled),
        age_s=gpu["age_seconds"],
        stalled_s=held["stalled_run_seconds"] if held else None,
        cause=cause,
        advice=advice,
    )


def _judge(gpu: Json, unit: Json, held: Json | None) -> tuple[str, str, str, str]:
    """Returns state, reason, cause and advice of a row: those of the GPU if it does not answer, otherwise those of the
    holder or unit. The cause is the most certain one with its confidence. If the state needs a cause and none is found,
    the cause is `unknown`.
    """
    if not gpu["up"]:
        return gpu["state"], gpu["reason"] or gpu["error"], "", gpu["advice"]
    if held is None:
        return unit["state"], unit["reason"], "", ""
    state, why, advice = held["state"], held["evidence"], held["advice"]
    if held["causes"]:
        first = held["causes"][0]
        return state, first["evidence"], f"{first['name']} {first['confidence']}", first["advice"] or advice
    if held["cause_needs"]:
        why = "; ".join(filter(None, (why, f"not enough evidence: needs {held['cause_needs'][0]}")))
        return state, why, "unknown", advice
    return state, why, "", advice


def format_ratio(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.0%}"


def format_gib(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value / GIB:.1f} GiB"


def format_unit(value: float | None, unit: str) -> str:
    return UNKNOWN if value is None else f"{value:.0f}{unit}"
