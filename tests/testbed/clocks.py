"""A clock for tests with real servers, which use the machine's clock."""

from __future__ import annotations

from gpu_exporter.common.clock import SystemClock


class StoppableClock(SystemClock):
    """The machine's clock, `ahead` seconds ahead; a test can stop its times.

    `stopped`: Unix seconds at which the wall time is stopped, for a test whose steps may take any time. `halted`: the
    same for the monotonic time. `later`: seconds that have passed only for this clock.
    """

    def __init__(self) -> None:
        self.stopped: float | None = None
        self.halted: float | None = None
        self.ahead = 0.0
        self.later = 0.0

    def wall(self) -> float:
        return (super().wall() if self.stopped is None else self.stopped) + self.ahead + self.later

    def monotonic(self) -> float:
        return (super().monotonic() if self.halted is None else self.halted) + self.later
