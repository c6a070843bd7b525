"""Subtracts the GPUs that were already taken back from the GPUs that pods or jobs wait for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from gpu_exporter.common.clock import Clock

FREED_S = 6 * 3600.0  # after this time, freed GPUs no longer reduce the demand


class _Freed(NamedTuple):
    """GPUs of a pool that the reconciler took back at `at` (monotonic seconds).

    `waiting`: GPUs that pods or jobs waited for at that time.
    """

    at: float
    pool: str
    gpus: int
    waiting: float


class FreedGpus:
    """Remembers GPUs that were taken back.

    The demand metric falls only some time after a pod is scheduled, and never for an unschedulable pod.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._freed: list[_Freed] = []

    def observe(self, demand: Iterable[Mapping[str, float]]) -> None:
        """Forgets freed GPUs when the demand has fallen by their number, or after FREED_S.

        `demand`: for each holder of this cycle, the GPUs that others wait for, by pool.
        """
        least: dict[str, float] = {}
        for pools in demand:
            for pool, waiting in pools.items():
                least[pool] = min(waiting, least.get(pool, waiting))
        self._freed = [
            freed
            for freed in self._freed
            if self._counts(freed) and least.get(freed.pool, math.inf) > freed.waiting - freed.gpus
        ]

    def wanted(self, by_holder: Sequence[Mapping[str, float]]) -> dict[str, float]:
        """GPUs that others wait for, minus the GPUs already taken back, by pool.

        `by_holder`: for each holder, the GPUs that others wait for, by pool. Omits a pool that is missing for one of
        these holders, and a pool with less than one GPU remaining.
        """
        pools = set(by_holder[0]).intersection(*by_holder[1:]) if by_holder else set()
        found: dict[str, float] = {}
        for pool in pools:
            freed = sum(each.gpus for each in self._freed if each.pool == pool and self._counts(each))
            left = min(each[pool] for each in by_holder) - freed
            if left >= 1:
                found[pool] = left
        return found

    def note(self, gpus: int, waited_for: Mapping[str, float], age_s: float = 0.0) -> None:
        """Notes that `gpus` GPUs were taken back `age_s` seconds ago, or may have been."""
        at = self._clock.monotonic() - age_s
        self._freed += [_Freed(at, pool, gpus, waiting) for pool, waiting in waited_for.items()]

    def _counts(self, freed: _Freed) -> bool:
        return self._clock.monotonic() - freed.at < FREED_S
