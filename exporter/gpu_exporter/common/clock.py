"""The clocks of the project: the machine's clock, a compressed clock for the demo, a manual clock for tests.

Code that needs the time takes a clock as an argument. Only timeouts of sockets, threads and child processes use
time.monotonic, because they always run in the machine's time (a test lists these modules). Monotonic seconds are for
arithmetic. Wall seconds (Unix epoch) are for people and for time stamps of the driver.
"""

from __future__ import annotations

import threading
import time
from typing import Protocol


class Clock(Protocol):
    """The time source of all packages. All values are seconds."""

    def monotonic(self) -> float:
        """Returns seconds of CLOCK_MONOTONIC: it never steps, and it stops during suspend."""

    def wall(self) -> float:
        """Returns seconds since the Unix epoch; this clock may step."""

    def wait(self, event: threading.Event, seconds: float) -> bool:
        """Waits until `event` is set or `seconds` of this clock have passed; true if the event is set."""


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
    """A clock that runs `speed` times as fast as the machine's, from its creation on. Demo only.

    Between two calls it advances by at most `step_s`. Otherwise, a busy machine would leave minutes of the simulation
    without a reading.
    """

    def __init__(self, speed: float, step_s: float) -> None:
        if not speed > 0:
            raise ValueError(f"--speed {speed:g}: must be above 0")
        self.speed = speed
        self.elapsed_s = 0.0
        self._step_s = step_s
        self._monotonic_start = self._looked = time.monotonic()
        self._wall_start = time.time()
        self._lock = threading.Lock()

    def _elapsed(self) -> float:
        with self._lock:
            now = time.monotonic()
            self.elapsed_s += min((now - self._looked) * self.speed, self._step_s)
            self._looked = now
            return self.elapsed_s

    def monotonic(self) -> float:
        return self._monotonic_start + self._elapsed()

    def wall(self) -> float:
        return self._wall_start + self._elapsed()

    def wait(self, event: threading.Event, seconds: float) -> bool:
        return event.wait(max(0.0, seconds / self.speed))


class ManualClock:
    """A clock that moves only when a test moves it; wall and monotonic time can be moved separately. For tests."""

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
        """Moves only the wall clock, as an administrator or NTP does."""
        self._wall += seconds
