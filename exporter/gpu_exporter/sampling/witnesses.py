"""The witnesses of idleness beside utilization: engines, GPM, traffic and power, each read as active, quiet or unknown.

Pure, but for what has to be remembered of a device: last counters, and the learned power at rest.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from gpu_exporter.collectors.contract import Cycle
from gpu_exporter.devices.protocol import Traffic


class ActivityRules(NamedTuple):
    """`interval_s`: sampling interval; see defaults.yaml for the rest.

    `driver_period_max_s`: the longest time that one utilization of the driver stands for; nvmlUtilization_t says that
    its sample period is between 1/6 and 1 s.
    """

    interval_s: float
    gap_intervals: int
    power_floor_max_ratio: float
    power_active_step: float
    driver_period_max_s: float = 1.0
    gpm_idle_max_ratio: float = 0.001
    pcie_idle_max_bytes_per_second: float = 10e6
    nvlink_idle_max_bytes_per_second: float = 1e6


class PowerFloor:
    """Learns the power of the GPU at rest, and judges whether a draw is clearly above it.

    The floor never rises, so that long work is not taken for rest. It is the lowest median of three readings in a row:
    a single wrong reading would otherwise lower it for good, and the GPU would never be idle again.
    """

    READINGS = 3
    LEAST = (
        0.5  # of the floor: what is drawn at less is a wrong reading, until a median says that the floor was too high
    )

    def __init__(self, rules: ActivityRules) -> None:
        self._rules = rules
        self._recent: deque[float] = deque(maxlen=self.READINGS)
        self._floor = float("inf")

    def is_active(self, power_w: float, limit_w: float) -> bool | None:
        """True when `power_w` lies more than a step of the way from the floor to the limit.

        None when it is so far below the floor that it cannot be true.
        """
        self._recent.append(power_w)
        if len(self._recent) == self.READINGS:
            self._floor = min(self._floor, sorted(self._recent)[1])
        # Two readings have no median: until there are three the lower one stands in, and is not remembered.
        learned = min(self._recent) if self._floor == float("inf") else self._floor
        floor = min(learned, self._rules.power_floor_max_ratio * limit_w)
        if power_w < self.LEAST * floor:
            return None
        return power_w > floor + self._rules.power_active_step * (limit_w - floor)


class TrafficRate:
    """Bytes per second from counters of the driver that may wrap."""

    def __init__(self) -> None:
        self._last: tuple[float, Traffic] | None = None

    def step(self, traffic: Traffic | None, at: float) -> float | None:
        """The mean since the last step, both directions together; None while it is not known."""
        last, self._last = self._last, None if traffic is None else (at, traffic)
        if last is None or traffic is None or at <= last[0]:
            return None
        moved = (traffic.rx - last[1].rx, traffic.tx - last[1].tx)
        return sum(moved) / (at - last[0]) if min(moved) >= 0 else None


class Witnesses:
    """The witnesses of one board, from cycle to cycle."""

    def __init__(self, rules: ActivityRules) -> None:
        self._rules = rules
        self._floor = PowerFloor(rules)
        self._pcie, self._nvlink = TrafficRate(), TrafficRate()
        self._last_energy: tuple[float, float] | None = None

    def observe(self, cycle: Cycle) -> dict[str, bool | None]:
        """By name, whether each readable witness is active. None: not known before the next cycle."""
        rules, gpm = self._rules, cycle.gpm
        seen: dict[str, bool | None] = {engine: ratio > 0.0 for engine, ratio in cycle.engines.items()}
        if gpm is not None:
            ratios = (("GPM graphics", gpm.graphics), ("GPM SM", gpm.sm))
            seen |= {name: ratio > rules.gpm_idle_max_ratio for name, ratio in ratios if ratio is not None}
        pcie = self._pcie.step(cycle.pcie, cycle.pcie_at)
        nvlink = self._nvlink.step(cycle.nvlink, cycle.nvlink_at)
        for name, traffic, counted, reported, floor in (
            ("PCIe", cycle.pcie, pcie, gpm.pcie if gpm else None, rules.pcie_idle_max_bytes_per_second),
            ("NVLink", cycle.nvlink, nvlink, gpm.nvlink if gpm else None, rules.nvlink_idle_max_bytes_per_second),
        ):
            # Of the driver's byte counters and the rate of GPM the higher: a counter may have wrapped. A counter that
            # needs a second reading leaves open whether a quiet GPM is right.
            rates = [rate for rate in (counted, reported) if rate is not None]
            if rates and max(rates) > floor:
                seen[name] = True
            elif traffic is not None and counted is None:
                seen[name] = None
            elif rates:
                seen[name] = False
        power = self._highest_power(cycle)
        if power is not None and cycle.power_limit_w:
            seen["power"] = self._floor.is_active(power, cycle.power_limit_w)
        return seen

    def _highest_power(self, cycle: Cycle) -> float | None:
        """The power now, or the mean since the last cycle where that is higher: work between two reads costs energy,
        though the moment of the read (power is a moment's value before Ampere and on GA100) may be a quiet one.
        """
        before = self._last_energy
        self._last_energy = None if cycle.energy_j is None else (cycle.energy_at, cycle.energy_j)
        if before is None or cycle.energy_j is None or cycle.energy_at <= before[0] or cycle.energy_j < before[1]:
            return cycle.power_w
        return max(cycle.power_w or 0.0, (cycle.energy_j - before[1]) / (cycle.energy_at - before[0]))
