"""The clocks of the project: the machine's, a compressed one for the demo, a manual one for tests.

Who asks for the time takes a clock as an argument. How long a socket, a thread or a child process is waited for is no
question of that time: they end in the machine's, and such deadlines use time.monotonic (a test lists their modules).
Monotonic seconds are for arithmetic, wall seconds (Unix epoch) are for people and for driver time stamps.
"""

from __future__ import annotations

import threading
import time
from typing import Protocol


class Clock(Protocol):
    """Time as the rooms see it. All values are seconds."""

    def monotonic(self) -> float:
        """Seconds of CLOCK_MONOTONIC: never steps, stops during suspend."""

    def wall(self) -> float:
        """Seconds since the Unix epoch; may step."""

    def wait(self, event: threading.Event, seconds: float) -> bool:
        """Wait until `event` is set or `seconds` of this clock have passed; true when the event is set."""


class SystemClock:
    """The machine's clocks, speed 1."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()

    def wait(self, event: threading.Event, seconds: float) -> bool:
        return event.wait(max(0.0, seconds))


SYSTEM_CLOCK = SystemClock()


class CompressedClock:
    """A clock that runs `speed` times as fast as the machine's, from the moment it is made. Demo only."""

    def __init__(self, speed: float) -> None:
        if speed <= 0:
            raise ValueError(f"clock: speed must be above 0, not {speed!r}")
        self.speed = speed
        self._monotonic_start = time.monotonic()
        self._wall_start = time.time()

    def _elapsed(self) -> float:
        return (time.monotonic() - self._monotonic_start) * self.speed

    def monotonic(self) -> float:
        return self._monotonic_start + self._elapsed()

    def wall(self) -> float:
        return self._wall_start + self._elapsed()

    def wait(self, event: threading.Event, seconds: float) -> bool:
        return event.wait(max(0.0, seconds / self.speed))


class ManualClock:
    """A clock that moves only when a test moves it; wall and monotonic can be moved apart. For tests."""

    def __init__(self, monotonic: float = 1_000.0, wall: float = 1_700_000_000.0) -> None:
        self._monotonic = monotonic
        self._wall = wall

    def monotonic(self) -> float:
        return self._monotonic

    def wall(self) -> float:
        return self._wall

    def wait(self, event: threading.Event, seconds: float) -> bool:
        self.advance(seconds)
        return event.is_set()

    def advance(self, seconds: float) -> None:
        self._monotonic += seconds
        self._wall += seconds

    def step_wall(self, seconds: float) -> None:
        """Move the wall clock alone, as an administrator or NTP does."""
        self._wall += seconds
