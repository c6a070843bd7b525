"""A clock for tests on real servers, which go by the machine's."""

from __future__ import annotations

from gpu_exporter.clock import SystemClock


class StoppableClock(SystemClock):
    """The machine's clock, `ahead` seconds ahead; its wall time stands still where a test stops it.

    `stopped`: Unix seconds, for a test whose steps may take any time. `later`: seconds that have passed for nobody but
    this clock.
    """

    def __init__(self) -> None:
        self.stopped: float | None = None
        self.ahead = 0.0
        self.later = 0.0

    def wall(self) -> float:
        return (super().wall() if self.stopped is None else self.stopped) + self.ahead + self.later

    def monotonic(self) -> float:
        return super().monotonic() + self.later
