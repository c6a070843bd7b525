"""Limits repeated log lines: writes the first immediately, then one a minute with the number of repeats."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from gpu_exporter.common.clock import Clock

T = TypeVar("T", bound=Hashable)
QUIET_S = 60.0  # shortest time between two lines about one subject
MAX_SUBJECTS = 1000  # subjects within that time; further subjects are not logged


@dataclass(slots=True)
class _Line:
    """The time of a subject's last log line, and the number of repeats since then."""

    at: float
    more: int = 0


class Repeats(Generic[T]):
    """Decides when to write repeated log lines. Not thread-safe: one loop uses it, with `take_due` in every turn."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lines: dict[T, _Line] = {}

    def is_due(self, subject: T) -> bool:
        """Returns whether to log this subject now. If not, the next line counts this repeat."""
        line = self._lines.get(subject)
        if line is not None:
            line.more += 1
            return False
        if len(self._lines) >= MAX_SUBJECTS:
            return False
        self._lines[subject] = _Line(self._clock.monotonic())
        return True

    def take_due(self) -> list[tuple[T, int]]:
        """Returns the subjects last logged QUIET_S ago or earlier, to log again, with their numbers of repeats."""
        now = self._clock.monotonic()
        old = [(subject, line) for subject, line in self._lines.items() if now - line.at >= QUIET_S]
        due: list[tuple[T, int]] = []
        for subject, line in old:
            if line.more:
                due.append((subject, line.more))
                self._lines[subject] = _Line(now)
            else:
                del self._lines[subject]
        return due
