"""`gpu-exporter top`: reads the nodes repeatedly and shows them until the user presses q."""

from __future__ import annotations

import contextlib
import locale
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from gpu_exporter.common.address import Address
from gpu_exporter.common.exits import Exit
from gpu_exporter.common.model.rows import BAD, GOOD, WARN
from gpu_exporter.common.plain import one_line
from gpu_exporter.common.service import stop_on_signal
from gpu_exporter.common.threads import start
from gpu_exporter.reports.top.nodes import (
    ClusterReading,
    NodeAnswer,
    list_problems,
    put_together,
    read_each,
    read_nodes,
    render_json,
)
from gpu_exporter.reports.top.screen import (
    CHOSEN,
    KEYS,
    ORDERS,
    PLAIN,
    TITLE,
    ScreenLine,
    ViewOptions,
    choose,
    draw,
    move,
    summary,
    table,
)

if TYPE_CHECKING:
    import curses

KEY_WAIT_MS = 200  # delay until the screen shows a new reading, or ends
BACKSPACE = frozenset((8, 127))
ESCAPE, ENTER = 27, frozenset((10, 13))
# Text and background of a state, so that neither a light nor a dark terminal makes it unreadable. The numbers are those
# of xterm, of 256 colours, which themes do not change, and of 8 colours.
COLOURS = {BAD: ((231, 124), (7, 1)), WARN: ((16, 214), (0, 3)), GOOD: ((231, 22), (0, 2))}


def print_once(nodes: Sequence[Address], wish: ViewOptions, fetch: Callable[..., str], form: str = "table") -> int:
    """Prints the rows, as a table with a summary or as JSON. Returns the exit code: PARTIAL if a node has a problem,
    NO_DATA if no node has answered.
    """
    reading = read_nodes(nodes, fetch)
    rows = choose(reading.rows, wish)
    if form == "json":
        sys.stdout.write(render_json(nodes, reading, rows))
    elif reading.answered:
        lines = [*table(rows, with_node=len(nodes) > 1), summary(reading, len(nodes))]
        sys.stdout.write("".join(f"{line}\n" for line in lines))
    for problem in list_problems(reading):
        sys.stderr.write(f"gpu-exporter: {problem}\n")
    if not reading.answered:
        return Exit.NO_DATA
    return Exit.PARTIAL if reading.problems else Exit.DONE


def find_obstacle(environment: Mapping[str, str]) -> str:
    """Returns why this terminal cannot show a live table, "" if it can."""
    try:
        import curses
    except ImportError:
        return "this Python has no module curses"
    name = environment.get("TERM", "")
    if not name:
        return "TERM is not set"
    try:
        curses.setupterm(name, sys.stdout.fileno())
        if curses.tigetstr("cup") is None:
            return f"a terminal of type {one_line(name)!r} cannot move the cursor"
    except curses.error:
        return f"terminals of type {one_line(name)!r} are unknown on this host"
    return ""


class _KeyReader:
    """Reads the nodes in a separate thread, so that keys work immediately even if a node does not answer."""

    def __init__(self, nodes: Sequence[Address], interval_s: float, fetch: Callable[..., str]) -> None:
        self._nodes = nodes
        self._fetch = fetch
        self._interval_s = interval_s
        self._over = threading.Event()
        self._answers: dict[Address, NodeAnswer] = {}
        self.reading = put_together(nodes, {})
        start(threading.Thread(target=self._read, name="top", daemon=True))

    def _read(self) -> None:
        while not self._over.is_set():
            try:
                for node, answer in read_each(self._nodes, self._fetch):
                    self._answers[node] = answer
                    self.reading = put_together(self._nodes, self._answers)
            except Exception as exc:  # the next reading follows soon, and old values are not shown as new
                self.reading = ClusterReading([], 0, {"top": f"cannot read: {type(exc).__name__}: {exc}"})
            self._over.wait(self._interval_s)

    def end(self) -> None:
        self._over.set()


def run_top(nodes: Sequence[Address], wish: ViewOptions, interval_s: float, fetch: Callable[..., str]) -> int:
    """Shows the nodes on the whole terminal until q or a signal. Call it only if find_obstacle finds no obstacle."""
    import curses

    stop = stop_on_signal()  # the default action would leave the terminal in the mode of curses
    reader = _KeyReader(nodes, interval_s, fetch)

    def show(window: curses.window) -> None:
        nonlocal wish
        with contextlib.suppress(curses.error):  # some terminals cannot hide the cursor
            curses.curs_set(0)
        tones = _set_colours(os.environ)
        window.timeout(KEY_WAIT_MS)
        writing = False
        while not stop.is_set():
            height, width = window.getmaxyx()
            window.erase()
            reading = reader.reading
            for y, line in enumerate(draw(reading, wish, len(nodes), height, width - 1)):
                with contextlib.suppress(curses.error):  # the window has just become smaller
                    _put(window, y, line, tones)
            if writing:
                with contextlib.suppress(curses.error):
                    window.addstr(height - 1, 0, f"filter: {wish.words}_ "[: width - 1], curses.A_REVERSE)
            window.refresh()
            key = window.getch()
            if writing:
                wish, writing = _write(wish, key)
            elif key in (ord("q"), ESCAPE):
                return
            elif key == ord("/"):
                writing = True
            else:
                wish = _follow(reading, wish, key, max(1, height - 4), curses)

    try:
        curses.wrapper(show)
    finally:
        reader.end()
    return Exit.DONE


def _set_colours(environment: Mapping[str, str]) -> dict[str, int]:
    """Returns the curses attribute for each tone of a state. Empty without colours, or with NO_COLOR (no-color.org)."""
    import curses

    try:
        curses.use_default_colors()  # otherwise all text is white on black
        if environment.get("NO_COLOR"):
            return {}
        for number, colours in enumerate(COLOURS.values(), 1):
            curses.init_pair(number, *colours[curses.COLORS < 256])
    except curses.error:  # a terminal without colours
        return {}
    return {tone: curses.color_pair(number) for number, tone in enumerate(COLOURS, 1)}


def _put(window: curses.window, y: int, line: ScreenLine, tones: Mapping[str, int]) -> None:
    """Writes one line. Raises curses.error if the window is too small."""
    import curses

    styles = {PLAIN: curses.A_NORMAL, TITLE: curses.A_BOLD, CHOSEN: curses.A_REVERSE, KEYS: curses.A_REVERSE}
    bar = window.getmaxyx()[1] - 1 if styles[line.style] == curses.A_REVERSE else 0
    code = locale.nl_langinfo(locale.CODESET)  # curses writes any other character as a blank, or as an invalid byte
    text = line.text.encode(code, "replace").decode(code).ljust(bar)
    window.addstr(y, 0, text, styles[line.style])
    if line.state is not None and line.state[2] in tones:
        first, last, tone = line.state
        window.addstr(y, first, text[first:last], tones[tone])


def _write(wish: ViewOptions, key: int) -> tuple[ViewOptions, bool]:
    """Applies a key to the filter. Returns the new choices, and whether the user is still typing."""
    if key in ENTER:
        return wish, False
    if key == ESCAPE:
        return wish._replace(words=""), False
    if key in BACKSPACE or key == 263:  # KEY_BACKSPACE
        return wish._replace(words=wish.words[:-1]), True
    if 32 <= key < 127:
        return wish._replace(words=wish.words + chr(key)), True
    return wish, True


def _follow(reading: ClusterReading, wish: ViewOptions, key: int, page: int, keys: object) -> ViewOptions:
    """Applies a key that selects another order or another row. Returns the new choices."""
    if key == ord("s"):
        names = list(ORDERS)
        return wish._replace(order=names[(names.index(wish.order) + 1) % len(names)], chosen=None, at=0)
    most = len(reading.rows)
    steps = {"KEY_DOWN": 1, "KEY_UP": -1, "KEY_NPAGE": page, "KEY_PPAGE": -page, "KEY_HOME": -most, "KEY_END": most}
    step = next((step for name, step in steps.items() if getattr(keys, name) == key), 0)
    return move(reading, wish, step) if step else wish
