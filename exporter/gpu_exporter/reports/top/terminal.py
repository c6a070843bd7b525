"""`gpu-exporter top`: reads the nodes repeatedly and shows them until the user presses q."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Sequence

from gpu_exporter.common.address import Address
from gpu_exporter.common.exits import Exit
from gpu_exporter.common.service import stop_on_signal
from gpu_exporter.common.threads import start
from gpu_exporter.reports.top.nodes import (
    ClusterReading,
    NodeAnswer,
    list_problems,
    put_together,
    read_each,
    read_nodes,
)
from gpu_exporter.reports.top.screen import ORDERS, ViewOptions, choose, draw, summary, table

KEY_WAIT_MS = 200  # delay until the screen shows a new reading, or ends
BACKSPACE = frozenset((8, 127))
ESCAPE, ENTER = 27, frozenset((10, 13))


def print_once(nodes: Sequence[Address], wish: ViewOptions, fetch: Callable[..., str]) -> int:
    """Print the table and a summary. Returns the exit code: partial if a node is silent, no data if all are."""
    reading = read_nodes(nodes, fetch)
    for line in table(choose(reading.rows, wish), with_node=len(nodes) > 1) if reading.answered else ():
        sys.stdout.write(f"{line}\n")
    if reading.answered:
        sys.stdout.write(f"{summary(reading, len(nodes))}\n")
    for problem in list_problems(reading):
        sys.stderr.write(f"gpu-exporter: {problem}\n")
    if not reading.answered:
        return Exit.NO_DATA
    return Exit.PARTIAL if reading.problems else Exit.DONE


class _KeyReader:
    """Reads in a separate thread, so that a silent node does not delay keys."""

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
        """Stop reading."""
        self._over.set()


def run_top(nodes: Sequence[Address], wish: ViewOptions, interval_s: float, fetch: Callable[..., str]) -> int:
    """Show the nodes on the whole terminal until q or a signal. Raises curses.error if the terminal is unsuitable."""
    import curses

    stop = stop_on_signal()  # not the default, which would leave the terminal as curses has set it
    reader = _KeyReader(nodes, interval_s, fetch)

    def show(window: curses.window) -> None:
        nonlocal wish
        with contextlib.suppress(curses.error):  # some terminals cannot hide the cursor
            curses.curs_set(0)
        window.timeout(KEY_WAIT_MS)
        writing = False
        while not stop.is_set():
            height, width = window.getmaxyx()
            window.erase()
            for y, line in enumerate(draw(reader.reading, wish, len(nodes), height, width - 1)):
                mark = curses.A_BOLD if y == 0 else curses.A_REVERSE if y == height - 1 else curses.A_NORMAL
                with contextlib.suppress(curses.error):  # the window has just become smaller
                    window.addstr(y, 0, line, mark)
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
                wish = _follow(wish, key, max(1, height - 4), curses)

    try:
        curses.wrapper(show)
    finally:
        reader.end()
    return Exit.DONE


def _write(wish: ViewOptions, key: int) -> tuple[ViewOptions, bool]:
    """The filter words after a key, and whether typing continues."""
    if key in ENTER:
        return wish, False
    if key == ESCAPE:
        return wish._replace(words=""), False
    if key in BACKSPACE or key == 263:  # KEY_BACKSPACE
        return wish._replace(words=wish.words[:-1], skip=0), True
    if 32 <= key < 127:
        return wish._replace(words=wish.words + chr(key), skip=0), True
    return wish, True


def _follow(wish: ViewOptions, key: int, page: int, keys: object) -> ViewOptions:
    """The choices after a key: another order, or other rows."""
    if key == ord("s"):
        names = list(ORDERS)
        return wish._replace(order=names[(names.index(wish.order) + 1) % len(names)], skip=0)
    steps = {"KEY_DOWN": 1, "KEY_UP": -1, "KEY_NPAGE": page, "KEY_PPAGE": -page, "KEY_HOME": -wish.skip}
    moved = next((step for name, step in steps.items() if getattr(keys, name) == key), 0)
    return wish._replace(skip=max(0, wish.skip + moved))
