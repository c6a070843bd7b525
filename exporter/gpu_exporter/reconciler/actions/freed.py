"""What is waited for, less what was taken back for those who wait."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gpu_exporter.clock import Clock

FREED_S = 6 * 3600.0  # after so long what was freed is no longer set against what is waited for


class _Freed(NamedTuple):
    """GPUs of a pool that were taken back at `at` (monotonic seconds), when so many were waited for."""

    at: float
    pool: str
    gpus: int
    waiting: float


class FreedGpus:
    """Remembers what was taken back: pods leave the numbers late, and one that can never be scheduled does not."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._freed: list[_Freed] = []

    def wanted(self, by_holder: Sequence[Mapping[str, float]]) -> dict[str, float]:
        """GPUs that are waited for and not yet freed, by pool, of the pools that all of these holders are of; at least
        one each.
        """
        pools = set(by_holder[0]).intersection(*by_holder[1:]) if by_holder else set()
        found: dict[str, float] = {}
        for pool in pools:
            waiting = min(each[pool] for each in by_holder)
            left = waiting - sum(freed.gpus for freed in self._counting(pool, waiting))
            if left >= 1:
                found[pool] = left
        return found

    def note(self, gpus: int, waited_for: Mapping[str, float], age_s: float = 0.0) -> None:
        """So many GPUs were taken back `age_s` seconds ago, or may have been."""
        now = self._clock.monotonic()
        self._freed = [freed for freed in self._freed if now - freed.at < FREED_S]
        self._freed += [_Freed(now - age_s, pool, gpus, waiting) for pool, waiting in waited_for.items()]

    def _counting(self, pool: str, waiting: float) -> list[_Freed]:
        """What was freed of a pool, until so many fewer are waited for."""
        now = self._clock.monotonic()
        self._freed = [
            freed
            for freed in self._freed
            if freed.pool != pool or (now - freed.at < FREED_S and waiting > freed.waiting - freed.gpus)
        ]
        return [freed for freed in self._freed if freed.pool == pool]
