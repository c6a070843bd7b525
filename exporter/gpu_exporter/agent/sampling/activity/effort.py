"""Reads signs of a GPU's work between two cycles beside its utilization: power, traffic and GPM values."""

from __future__ import annotations

from gpu_exporter.agent.collectors.contract import Cycle
from gpu_exporter.agent.collectors.memory import GPU_MEMORY_USED
from gpu_exporter.agent.devices.protocol import Gpm
from gpu_exporter.agent.sampling.activity.witnesses import TrafficRate
from gpu_exporter.common.model.readings import Effort

PIPES = ("tensor", "fp64", "fp32", "fp16")


class EffortReader:
    """Reads the work of one device, and keeps its last counters. Not thread-safe: used by the device's one thread."""

    def __init__(self) -> None:
        self._last_at: float | None = None
        self._last_energy: tuple[float, float] | None = None  # (monotonic seconds, joules)
        self._pcie, self._nvlink = TrafficRate(), TrafficRate()

    def read(self, cycle: Cycle, gpm: Gpm | None, monotonic: float) -> Effort | None:
        """Returns the GPU's work since the last cycle, None for the first cycle.

        `gpm`: GPM as the driver reported it. Zeros that contradict the utilization prove no idleness elsewhere, but
        count here, because a kernel that only waits may cause them.
        """
        previous, self._last_at = self._last_at, monotonic
        power_w = self._mean_power(cycle)
        pcie = self._pcie.step(cycle.pcie, cycle.pcie_at)
        nvlink = self._nvlink.step(cycle.nvlink, cycle.nvlink_at)
        if previous is None:
            return None
        gpm = gpm or Gpm(0.0)
        return Effort(
            previous,
            monotonic,
            power_w,
            cycle.power_w,
            cycle.power_limit_w,
            cycle.default_limit_w,
            cycle.value(GPU_MEMORY_USED),
            _higher(pcie, gpm.pcie),
            _higher(nvlink, gpm.nvlink),
            gpm.sm,
            _busiest(gpm),
            gpm.dram,
        )

    def _mean_power(self, cycle: Cycle) -> float | None:
        """Returns the mean power since the last cycle in watts, None without two readings of the energy counter."""
        before = self._last_energy
        self._last_energy = None if cycle.energy_j is None else (cycle.energy_at, cycle.energy_j)
        if before is None or self._last_energy is None:
            return None
        span_s, joules = self._last_energy[0] - before[0], self._last_energy[1] - before[1]
        return joules / span_s if span_s > 0.0 and joules >= 0.0 else None


def _busiest(gpm: Gpm) -> float | None:
    found = [value for name in PIPES if (value := getattr(gpm, name)) is not None]
    return max(found) if len(found) == len(PIPES) else None


def _higher(one: float | None, other: float | None) -> float | None:
    """Returns the higher of two readings of the same traffic. A wrapped counter is too low, and GPM may be missing."""
    return max((value for value in (one, other) if value is not None), default=None)
