"""The screen as lines of text: selection, order and size. Without side effects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from gpu_exporter.common.model.rows import NAMES, NUMBERS, Row
from gpu_exporter.common.plain import layout, one_line
from gpu_exporter.reports.top.nodes import ClusterReading, NodeRow

# Columns that a narrow window lacks, in this order, until the reason has REASON_MIN characters.
DROPPED = ("TEMP", "MEMORY", "NAME", "HELD", "POWER")
REASON_MIN = 50
IDLE_STATES = ("held_idle", "held_no_process")
QUIET_S = 60.0
SILENT_STATES = ("lost", "hung", "stale")


def _number(value: float | None) -> float:
    """Sort key: largest first, unknown values last."""
    return -1.0 if value is None else value


# Sort keys of rows by name. The first one is the default.
ORDERS: dict[str, Callable[[Row], float]] = {
    "waste": lambda row: row.wasted_s if row.holder and (row.idle_s is not None or row.stalled_s) else -1.0,
    "gpu": lambda row: 0.0,
    "util": lambda row: _number(row.utilization),
    "memory": lambda row: _number(row.memory_bytes),
    "power": lambda row: _number(row.power_w),
    "temp": lambda row: _number(row.temperature_celsius),
    "held": lambda row: _number(row.held_s),
}


class ViewOptions(NamedTuple):
    """Choices of the user. `words`: a row must contain all of them. `skip`: number of rows above the first shown."""

    order: str = "waste"
    words: str = ""
    skip: int = 0


def choose(rows: Sequence[NodeRow], wish: ViewOptions) -> list[NodeRow]:
    """The selected rows in the selected order. Equal rows are in the order of nodes and GPUs."""
    words = wish.words.lower().split()
    wanted = [each for each in rows if all(word in f"{each.node} {' '.join(each.row.texts)}".lower() for word in words)]
    return sorted(wanted, key=lambda each: -ORDERS[wish.order](each.row))


def summary(reading: ClusterReading, nodes: int) -> str:
    """The summary in one line."""
    shown = [each for each in reading.rows if each.row.state != "mig"]

    def count(is_so: Callable[[Row], object]) -> int:
        """Units with such a row: a shared GPU has one for each holder."""
        return len({(each.node, each.row.gpu) for each in shown if is_so(each.row)})

    stalled, silent = count(lambda row: row.state == "stalled"), count(lambda row: row.state in SILENT_STATES)
    # Before a state is published, its row already shows an idle time.
    quiet = count(lambda row: row.state == "unknown" and (row.idle_s or 0.0) >= QUIET_S)
    power = {(each.node, each.row.gpu): each.row.power_w or 0.0 for each in reading.rows if ":" not in each.row.gpu}
    parts = [
        f"{reading.answered} of {nodes} nodes" if nodes > 1 else "",
        f"{count(lambda row: True)} GPUs and instances",
        f"{count(lambda row: row.holder)} held",
        f"{count(lambda row: row.state in IDLE_STATES)} idle",
        f"{stalled} stalled" if stalled else "",
        f"{count(lambda row: row.state == 'free')} free",
        f"{count(lambda row: row.state == 'unknown')} unknown" + (f" ({quiet} idle so far)" if quiet else ""),
        f"{silent} not answering" if silent else "",
        f"{sum(power.values()) / 1000:.1f} kW",
    ]
    return ", ".join(filter(None, parts))


def table(rows: Sequence[NodeRow], *, with_node: bool, width: int | None = None, order: str = "") -> list[str]:
    """Header and rows at full width. In a window of `width` characters, columns make room for the reason, except the
    column of the order.
    """
    names = [*(["NODE"] if with_node else []), *NAMES]
    cells = [[*([each.node] if with_node else []), *each.row.texts] for each in rows]
    lines = layout(names, cells, NUMBERS)
    for name in DROPPED:
        if width is None or max(map(len, lines)) <= width or width - lines[0].index(names[-1]) >= REASON_MIN:
            break
        if name == order.upper():
            continue
        at = names.index(name)
        for line in (names, *cells):
            del line[at]
        lines = layout(names, cells, NUMBERS)
    return lines


def draw(reading: ClusterReading, wish: ViewOptions, nodes: int, height: int, width: int) -> list[str]:
    """At most `height` lines of `width` characters: summary, problems, table, and help for the keys."""
    problems = [one_line(f"{node}: {text}") for node, text in reading.problems.items()]
    room = max(1, height // 4)
    if len(problems) > room:
        problems = [*problems[: room - 1], f"and {len(problems) - room + 1} more nodes with problems"]
    rows = choose(reading.rows, wish)
    head, *body = table(rows, with_node=nodes > 1, width=width, order=wish.order)
    fits = max(0, height - 3 - len(problems))
    skip = min(wish.skip, max(0, len(body) - fits))
    below = len(body) - skip - fits
    words = f", with '{one_line(wish.words)}'" if wish.words else ""
    keys = f"by {wish.order}{words}   s: sort  /: filter  arrows: scroll  q: quit" + (
        f"   {below} more" if below > 0 else ""
    )
    lines = [summary(reading, nodes), *problems, head, *body[skip : skip + fits]]
    lines += [""] * (height - 1 - len(lines))
    return [line[:width] for line in (*lines[: height - 1], keys)]
