"""Decides whether a board's power reading is evidence. Discards readings that are impossible or that do not follow the
load.

- Impossible: more than ABSURD times the limit of the board. A driver fault of 2026 reported 588 W for minutes on a
  board of 35 W.
- Frozen: exactly the same for FROZEN_S, although the energy counter shows another mean. Without an energy counter:
  although the utilization has changed by MOVED. Equality alone proves nothing: a constant load gives equal values, and
  some sensors change only every ten seconds.

A discarded power reading is counted as implausible, is not published, and is no witness. For the first PATIENCE_S the
activity is unknown, because a valid power may come back. After that, only the other witnesses count. Power that is
discarded again within RECOVERED_S causes no second unknown time.

Without a power limit (GB10, Jetson, many vGPUs), the power at work is unknown, so power proves no work. But it can
contradict a utilization of 0: see RestWithoutLimit.
"""

from __future__ import annotations

import math

from gpu_exporter.agent.collectors.contract import Cycle
from gpu_exporter.agent.collectors.plausible import ABSURD
from gpu_exporter.agent.collectors.power import GPU_POWER
from gpu_exporter.agent.collectors.processes import GPU_COMPUTE_PROCESSES, GPU_GRAPHICS_PROCESSES

PATIENCE_S, RECOVERED_S = 60.0, 600.0
MOVED = 0.5  # of the utilization
REACT_S = 5.0  # within this time power follows the load: NVML reports means over a second
FROZEN_S = 30.0  # time over which the energy counter gives the mean power
APART, APART_W = 0.25, 5.0  # largest difference to the mean from energy: share of the mean, and watts
MINUTE_S, HOUR_S, HOURS = 60.0, 3600.0, 24
WORKING = 2.0  # times the rest; an H200 draws 79 W at rest and 122 W with an open context


class PowerTrust:
    """Reviews the power of one device in each cycle. Not thread-safe: used by the device's one thread.

    `note`: why the power is discarded now, for the rows of the GPU; "" if it is valid.
    """

    def __init__(self) -> None:
        self.note = ""
        self._discarded_at = self._doubted_at = -math.inf  # last and first discarded reading of this episode
        self._rest = RestWithoutLimit()
        self._frozen = FrozenPower()

    def review(self, cycle: Cycle, now: float) -> str:
        """Discards the cycle's power if it is not evidence. Returns why utilization is no evidence, "" if it is."""
        watts, limit = cycle.power_w, max(cycle.power_limit_w or 0.0, cycle.default_limit_w or 0.0)
        self.note = ""
        if watts is not None and limit and watts > ABSURD * limit:
            self.note = f"its power is not used: {watts:.0f} W on a board of {limit:.0f} W"
        elif watts is not None and self._frozen.judge(cycle, watts, now):
            self.note = f"its power is not used: it stays at {watts:.3f} W, whatever the load"
        if self.note:
            if now - self._discarded_at > RECOVERED_S:
                self._doubted_at = now
            self._discarded_at = now
            cycle.note_implausible(GPU_POWER, witness=now - self._doubted_at <= PATIENCE_S)
            cycle.samples = [sample for sample in cycle.samples if sample.family is not GPU_POWER]
            cycle.power_w = None
            return ""
        if watts is None:
            return ""
        return "" if limit else self._rest.judge(cycle, watts, now)


class FrozenPower:
    """Detects a power reading that no longer changes."""

    def __init__(self) -> None:
        self._watts, self._since = math.nan, math.inf
        self._low = self._high = 0.0
        self._moved_at = math.inf
        self._energy: tuple[float, float] | None = None  # joules and their time, when the value was first read

    def judge(self, cycle: Cycle, watts: float, now: float) -> bool:
        ratio = cycle.utilization
        if watts != self._watts:
            self._watts, self._since, self._moved_at = watts, now, math.inf
            self._low, self._high = math.inf, -math.inf
            self._energy = None if cycle.energy_j is None else (cycle.energy_j, cycle.energy_at)
            return False
        # After a change of load, the utilization still shows the time before: it is a mean over up to a second.
        if ratio is not None and now - self._since >= REACT_S:
            self._low, self._high = min(self._low, ratio), max(self._high, ratio)
        if self._high - self._low >= MOVED:
            self._moved_at = min(self._moved_at, now)
        if now - self._since < FROZEN_S:
            return False
        mean_w = self._mean(cycle)
        if mean_w is None:
            return now - self._moved_at >= REACT_S
        return abs(mean_w - watts) > max(APART_W, APART * mean_w)

    def _mean(self, cycle: Cycle) -> float | None:
        """Returns the mean power since the value was first read, in watts, None without a growing energy counter."""
        if self._energy is None or cycle.energy_j is None:
            return None
        joules, span_s = cycle.energy_j - self._energy[0], cycle.energy_at - self._energy[1]
        return joules / span_s if joules > 0.0 and span_s > 0.0 else None


class RestWithoutLimit:
    """Learns the power at rest, in watts, of a board without a power limit.

    This power is the lowest mean of a minute in the last day. Only minutes with an open context count, because an open
    context alone raises the power.
    """

    def __init__(self) -> None:
        self._hours: dict[int, float] = {}
        self._minute, self._sum, self._count, self._is_open = -1, 0.0, 0, True

    def judge(self, cycle: Cycle, watts: float, now: float) -> str:
        """Returns why a utilization of 0 is not evidence in this cycle, "" if it is."""
        self._learn(cycle, watts, now)
        rest = min(self._hours.values(), default=math.inf)
        busy = cycle.utilization is None or cycle.utilization or any(each.ratio for each in cycle.driver_samples)
        if busy or watts <= WORKING * rest:
            return ""
        return f"the driver reports utilization 0 at {watts:.0f} W, but at rest the board draws {rest:.0f} W"

    def _learn(self, cycle: Cycle, watts: float, now: float) -> None:
        minute, hour = int(now / MINUTE_S), int(now / HOUR_S)
        if minute != self._minute:
            if self._count and self._is_open:
                mean_w = self._sum / self._count
                self._hours[hour] = min(mean_w, self._hours.get(hour, mean_w))
            self._hours = {at: mean for at, mean in self._hours.items() if at > hour - HOURS}
            self._minute, self._sum, self._count, self._is_open = minute, 0.0, 0, True
        self._sum, self._count = self._sum + watts, self._count + 1
        contexts = (cycle.value(GPU_COMPUTE_PROCESSES) or 0.0) + (cycle.value(GPU_GRAPHICS_PROCESSES) or 0.0)
        self._is_open &= contexts > 0.0
