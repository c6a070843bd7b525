"""Subtracts the GPUs that were already taken back from the GPUs that pods or jobs wait for."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpu_exporter.common.clock import Clock
from gpu_exporter.reconciler.actor import DONE, Entry

AGAIN_S = 3600.0  # until this time after an action, a demand that fell and rises again is not new
FREED_S = 6 * 3600.0  # after this time, GPUs of an action that is done no longer reduce the demand


@dataclass(slots=True)
class _Freed:
    """GPUs of a pool that an action takes back since `at` (monotonic seconds).

    `low`: the least demand since the action. `served`: the number of these GPUs by which the demand has fallen.
    `is_done`: whether they are free.
    """

    at: float
    gpus: int
    low: float
    served: float = 0.0
    is_done: bool = False


class FreedGpus:
    """Remembers GPUs that were taken back, so that a waiting pod or job never costs others more GPUs than it needs.

    The GPUs of an action count while the action is open. After it is done, they count until the demand has fallen: the
    metric falls only some time after a pod is scheduled, and never for an unschedulable pod. After any other result,
    they no longer count. Each fall counts for one action, the oldest done action first. If the demand soon rises again,
    the rise is not new demand: an owner can withdraw a request and repeat it.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._freed: dict[tuple[str, str], _Freed] = {}  # by the action and the pool
        self.used: set[tuple[str, str]] = set()
        """Actions and pools whose GPUs count no longer, or only until AGAIN_S."""

    def follow(self, entries: Sequence[Entry], wall: float) -> None:
        """Takes over the actions of the journal, with their results. `wall`: the present time (Unix seconds)."""
        now = self._clock.monotonic()
        for entry in entries:
            for pool, waiting in entry.waited_for:
                key = entry.ident, pool
                if not entry.is_open and entry.told != DONE:
                    self._freed.pop(key, None)
                elif key not in self.used:
                    freed = self._freed.setdefault(key, _Freed(now - max(0.0, wall - entry.wall), entry.gpus, waiting))
                    freed.is_done = not entry.is_open
        waited_for = {entry.ident: dict(entry.waited_for) for entry in entries}
        for (ident, pool), freed in self._freed.items():
            if pool not in waited_for.get(ident, {}):  # the journal keeps open actions, so it has ended
                freed.is_done = True
                if ident in waited_for:  # this process or another leader has seen the fall
                    freed.served = freed.gpus
        self.used &= {(entry.ident, pool) for entry in entries for pool, _ in entry.waited_for}

    @property
    def pools(self) -> set[str]:
        """The pools whose demand is reduced."""
        return {pool for _, pool in self._freed}

    def observe(self, demand: Mapping[str, float]) -> None:
        """Forgets free GPUs when the demand has fallen by their number, or after FREED_S.

        `demand`: the GPUs that others wait for, by pool; 0 if no pod or job waits. A missing pool is unknown, so its
        demand has not fallen.
        """
        fell: defaultdict[str, float] = defaultdict(float)  # of each fall, the GPUs that count for an action
        for key, freed in sorted(self._freed.items(), key=lambda each: (not each[1].is_done, each[1].at)):
            now = demand.get(key[1], math.inf)
            part = min(freed.gpus - freed.served, max(0.0, freed.low - now - fell[key[1]]))
            freed.served, freed.low = freed.served + part, min(freed.low, now)
            fell[key[1]] += part
            is_served, age_s = freed.served >= freed.gpus, self._clock.monotonic() - freed.at
            if freed.is_done and (is_served or age_s >= FREED_S):
                self.used.add(key)
                if age_s >= AGAIN_S:
                    del self._freed[key]

    def wanted(self, by_holder: Sequence[Mapping[str, float]], gpus: int) -> dict[str, float]:
        """Returns by pool how many GPUs others wait for. `by_holder`: for each holder, this number by pool. `gpus`: the
        GPUs that the action would take back.

        Omits a pool that is missing for one of the holders, and a pool in which others wait for fewer than `gpus` GPUs
        beyond those already taken back. So a waiting pod or job never costs others more GPUs than it needs.
        """
        pools = set(by_holder[0]).intersection(*by_holder[1:]) if by_holder else set()
        found: dict[str, float] = {}
        for pool in pools:
            waiting = min(each[pool] for each in by_holder)
            if waiting - self._taken(pool, waiting) >= gpus:
                found[pool] = waiting
        return found

    def _taken(self, pool: str, waiting: float) -> float:
        """Returns how many GPUs of this pool count as taken back. If the demand has risen again, GPUs that had served
        it count again.
        """
        freed = [each for (_, of), each in self._freed.items() if of == pool]
        served = [each for each in freed if each.is_done and each.served]
        fell = sum(each.served for each in served)
        rose = waiting - min((each.low for each in served), default=waiting)
        return sum(each.gpus for each in freed) - fell + min(fell, max(0.0, rose))

    def note_shadow(self, title: str, gpus: int, waited_for: Mapping[str, float]) -> None:
        """Notes an action that mode act would take now. The action counts as done at once, because no exporter will
        show its effect.
        """
        now = self._clock.monotonic()
        for pool, waiting in waited_for.items():
            self._freed[f"{title} {now}", pool] = _Freed(now, gpus, waiting, is_done=True)
