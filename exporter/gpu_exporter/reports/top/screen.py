"""Makes the lines of the screen: selects and sorts rows, and fits them to the window. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from typing import NamedTuple

from gpu_exporter.common.model.rows import NAMES, NUMBERS, Row
from gpu_exporter.common.plain import layout, one_line
from gpu_exporter.reports.top.columns import narrow
from gpu_exporter.reports.top.nodes import ClusterReading, NodeRow, list_problems

IDLE_STATES = ("held_idle", "held_no_process")
QUIET_S = 60.0
SILENT_STATES = ("lost", "hung", "stale")
PLAIN, TITLE, CHOSEN, KEYS = "plain", "title", "chosen", "keys"  # styles of a line
VALUES = ("UTIL", "MEMORY", "POWER", "TEMP", "HELD", "IDLE")  # of the chosen row, also those that have no column


def _number(value: float | None) -> float:
    """Returns a sort key: largest first, unknown values last."""
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
    """The user's choices. `words`: only rows that contain all of them are shown. `chosen`: node, GPU and holder of the
    chosen row, None before the user has chosen one. `at`: position of the chosen row, used after the row has
    disappeared.
    """

    order: str = "waste"
    words: str = ""
    chosen: tuple[str, str, str] | None = None
    at: int = 0


class ScreenLine(NamedTuple):
    """A line of the screen. `state`: first and last column of the state, and its tone; None without a state."""

    text: str
    style: str = PLAIN
    state: tuple[int, int, str] | None = None


def choose(rows: Sequence[NodeRow], wish: ViewOptions) -> list[NodeRow]:
    """Returns the rows that contain all of the user's words, sorted. Equal rows keep the order of nodes and GPUs."""
    words = wish.words.lower().split()
    wanted = [
        each
        for each in rows
        if all(word in f"{each.node} {' '.join(each.row.texts)} {each.row.why}".lower() for word in words)
    ]
    return sorted(wanted, key=lambda each: -ORDERS[wish.order](each.row))


def find_chosen(rows: Sequence[NodeRow], wish: ViewOptions) -> int:
    """Returns the position of the chosen row, also after a new reading has moved the row."""
    places = [(each.node, each.row.gpu, each.row.holder) for each in rows]
    return places.index(wish.chosen) if wish.chosen in places else max(0, min(wish.at, len(rows) - 1))


def move(reading: ClusterReading, wish: ViewOptions, step: int) -> ViewOptions:
    """Returns the choices after the user has moved `step` rows down (up if negative)."""
    rows = choose(reading.rows, wish)
    at = max(0, min(find_chosen(rows, wish) + step, len(rows) - 1))
    return wish._replace(at=at, chosen=(rows[at].node, rows[at].row.gpu, rows[at].row.holder) if rows else None)


def summary(reading: ClusterReading, nodes: int) -> str:
    shown = [each for each in reading.rows if each.row.state != "mig"]

    def count(is_so: Callable[[Row], object]) -> int:
        """Counts the units in the matching rows. A shared GPU has one row for each holder, and counts once."""
        return len({(each.node, each.row.gpu) for each in shown if is_so(each.row)})

    closed = count(lambda row: row.state == "closed")
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
        f"{closed} closed" if closed else "",
        f"{count(lambda row: row.state == 'unknown')} unknown" + (f" ({quiet} idle so far)" if quiet else ""),
        f"{silent} not answering" if silent else "",
        f"{sum(power.values()) / 1000:.1f} kW",
    ]
    return ", ".join(filter(None, parts))


def table(rows: Sequence[NodeRow], *, with_node: bool, width: int | None = None, order: str = "") -> list[str]:
    """Returns header and rows. `width`: characters of the window, None for no limit. Columns that do not fit are
    dropped, except the ones that are always shown and the column of the order.
    """
    names = [*(["NODE"] if with_node else []), *NAMES]
    cells = [[*([each.node] if with_node else []), *each.row.texts] for each in rows]
    if width is None:
        return layout(names, cells, NUMBERS)
    return [_cut(line, width) for line in layout(*narrow(names, cells, width, order.upper()), NUMBERS)]


def describe(each: NodeRow, rows: Sequence[NodeRow], *, with_node: bool) -> list[str]:
    """Describes the chosen row in sentences: title, full reason, advice and values. `rows`: all rows, because only a
    holder's first row has its advice.
    """
    row, values = each.row, dict(zip(NAMES, each.row.texts, strict=True))
    node = f"{each.node} " if with_node else ""
    holder = f"{row.holder}{f' of {row.owner}' if row.owner else ''}" if row.holder else "no holder"
    others = (other.row for other in rows if (other.node, other.row.holder) == (each.node, row.holder))
    advice = row.advice or next((other.advice for other in others if other.cause == row.cause and other.advice), "")
    return [
        ", ".join(filter(None, (f"{node}GPU {row.gpu}: {holder}", row.state, row.cause))),
        *([f"why: {row.why}"] if row.why else []),
        *([f"to change: {advice}"] if advice else []),
        ", ".join([row.name, *(f"{name.lower()} {values[name]}" for name in VALUES)]),
    ]


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


def _wrap(texts: Sequence[str], width: int, most: int) -> list[str]:
    """Wraps the texts into at most `most` lines of `width` characters."""
    lines = [line for text in texts for line in textwrap.wrap(one_line(text), width, subsequent_indent="  ")]
    return lines if len(lines) <= most else [*lines[: most - 1], f"{lines[most - 1][: width - 2]} …"]


def draw(reading: ClusterReading, wish: ViewOptions, nodes: int, height: int, width: int) -> list[ScreenLine]:
    """Returns at most `height` lines of `width` characters: summary, problems, table, chosen row in sentences, keys."""
    problems = list_problems(reading)
    room = max(1, height // 4)
    if len(problems) > room:
        problems = [*problems[: room - 1], f"and {len(problems) - room + 1} more problems of nodes"]
    rows = choose(reading.rows, wish)
    at = find_chosen(rows, wish)
    head, *body = table(rows, with_node=nodes > 1, width=width, order=wish.order)
    room = height - 3 - len(problems)  # for rows and the chosen row
    texts = describe(rows[at], reading.rows, with_node=nodes > 1) if rows and width > len("to change: ") else []
    below = _wrap(texts, width, room // 2) if room >= 4 else []
    fits = max(0, room - len(below) - bool(below))
    first = max(0, min(at - fits // 2, len(body) - fits))
    shown = [ScreenLine(body[i], CHOSEN if i == at else PLAIN, _mark(head, rows[i])) for i in range(first, len(body))][
        :fits
    ]
    lines = [ScreenLine(summary(reading, nodes), TITLE), *map(ScreenLine, problems), ScreenLine(head, TITLE), *shown]
    lines += [ScreenLine("")] * (height - 1 - len(below) - len(lines))
    lines += [ScreenLine(text, PLAIN if number else TITLE) for number, text in enumerate(below)]
    more = len(body) - fits
    words = f", with '{one_line(wish.words)}'" if wish.words else ""
    keys = f"by {wish.order}{words}   s: sort  /: filter  arrows: choose  q: quit" + (
        f"   {first} rows above, {more - first} below" if more > 0 else ""
    )
    return [line._replace(text=_cut(line.text, width)) for line in (*lines[: height - 1], ScreenLine(keys, KEYS))]


def _mark(head: str, each: NodeRow) -> tuple[int, int, str] | None:
    """Returns first and last column of the state in a table row, and the state's tone. None without the column."""
    start = head.find("STATE")
    return (start, start + len(each.row.state), each.row.tone) if start >= 0 else None
