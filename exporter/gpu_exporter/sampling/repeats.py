"""What happens again and again is logged at once, and then at most once a minute with the number of times since."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from gpu_exporter.clock import Clock

T = TypeVar("T", bound=Hashable)
QUIET_S = 60.0  # between two lines about one subject
MAX_SUBJECTS = 1000  # within that time; further ones are not logged


@dataclass(slots=True)
class _Line:
    """When the last line was written, and how often its subject happened since."""

    at: float
    more: int = 0


class Repeats(Generic[T]):
    """Says when a line is due. Not thread-safe: belongs to one loop, which asks `take_due` in each turn."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lines: dict[T, _Line] = {}

    def is_due(self, subject: T) -> bool:
        """Whether to write a line about this now; otherwise it is counted for the next one."""
        line = self._lines.get(subject)
        if line is not None:
            line.more += 1
            return False
        if len(self._lines) >= MAX_SUBJECTS:
            return False
        self._lines[subject] = _Line(self._clock.monotonic())
        return True

    def take_due(self) -> list[tuple[T, int]]:
        """Each subject whose last line is QUIET_S old and that happened again since, with the number of times."""
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
