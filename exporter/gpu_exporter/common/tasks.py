"""Tasks: loops that run as long as their process. One pass of a loop is a turn.

An error ends only the current turn, and is logged and counted. A task that has stopped turning is reported.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
import traceback
from collections.abc import Mapping
from types import TracebackType

log = logging.getLogger(__name__)
SAY_AGAIN_S = 3600.0  # an error of the same kind is logged once in this time, and always counted
KINDS_MAX = 32  # kinds of errors that are logged within that time; a kind is a class of exceptions at one line


class Task:
    """Surrounds each turn of a loop: an exception inside `with task: ...` ends only this turn."""

    def __init__(self, name: str, late_s: float = math.inf) -> None:
        """`late_s`: the longest normal time between the starts of two turns (seconds); a longer time is reported.
        Infinite if another part of the program reports a hang of this task.
        """
        self.name = name
        self.failures = 0
        self._late_s = late_s
        self._turned: float | None = None  # when a turn began, monotonic; None: before the first turn, and at rest
        self._lock = threading.Lock()  # taken only after an error; several threads may be one task
        self._said: dict[tuple[object, ...], float] = {}

    def turn(self) -> None:
        """Notes that a turn begins, for a loop that runs inside a turn. Other loops use `with task`."""
        self._turned = time.monotonic()

    def __enter__(self) -> Task:
        self.turn()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self.note(error)
        return True

    def note(self, error: Exception) -> None:
        """Logs and counts an error that the loop has caught itself."""
        with self._lock, contextlib.suppress(Exception):  # a full memory must not end the task here
            self.failures += 1
            if self._is_new(error):
                log.error("one turn of the task %s failed; the task continues", self.name, exc_info=error)

    def _is_new(self, error: Exception) -> bool:
        at = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)][-1:]
        kind, now = (type(error), *at), time.monotonic()
        self._said = {each: said for each, said in self._said.items() if now - said < SAY_AGAIN_S}
        if kind in self._said or len(self._said) >= KINDS_MAX:
            return False
        self._said[kind] = now
        return True

    def rest(self) -> None:
        """Notes that the task has stopped on purpose, so it is not late."""
        self._turned = None

    def late_s(self) -> float | None:
        """Returns seconds since the last turn began; None while this is within the normal time."""
        turned = self._turned
        late_s = 0.0 if turned is None else time.monotonic() - turned
        return late_s if late_s > self._late_s else None


class Tasks:
    def __init__(self) -> None:
        self._all: list[Task] = []
        self._late: frozenset[str] = frozenset()

    def add(self, *tasks: Task) -> None:
        self._all += tasks

    def failures(self) -> Mapping[str, int]:
        return {task.name: task.failures for task in self._all}

    def list_late(self) -> list[str]:
        """Returns a text for each task that no longer turns."""
        late = [(task.name, task.late_s()) for task in self._all]
        return [_describe(name, seconds) for name, seconds in late if seconds is not None]

    def watch(self) -> None:
        """Logs each task that has stopped turning, and each that turns again. One thread calls this repeatedly."""
        late = {task.name: seconds for task in self._all if (seconds := task.late_s()) is not None}
        for name, seconds in late.items():
            if name not in self._late:
                log.error("%s", _describe(name, seconds))
        for name in self._late - late.keys():
            log.info("the task %s works again", name)
        self._late = frozenset(late)


def _describe(name: str, seconds: float) -> str:
    return (
        f"the task {name} has not worked for {seconds:.0f} s: a call hangs in it, or it has ended. Its data "
        "become old. Restart the process if the task does not continue"
    )
