"""Detects a utilization that stays at 100 % while all other values show that the GPU does nothing.

After some faults the driver's counter stays at 100 % for days (NVIDIA/open-gpu-kernel-modules#1138: 100 % at 8 W of 145
W, P8, without a process). The value then proves neither work nor idleness. The contradiction must last LASTS_S, because
a GPU that just began to work looks the same: clocks and processes are read less often.
"""

from __future__ import annotations

from gpu_exporter.agent.collectors.clocks import GPU_PERFORMANCE_STATE
from gpu_exporter.agent.collectors.contract import Cycle
from gpu_exporter.agent.collectors.processes import GPU_COMPUTE_PROCESSES, GPU_GRAPHICS_PROCESSES

FULL = 0.99
RESTING_STATE = 8  # P8 and higher numbers are the clocks of a GPU at rest
RESTING_POWER = 0.25  # share of the limit: a spinning kernel at P0 draws more
LASTS_S = 60.0


class StuckCounter:
    """Watches the utilization of one device. Not thread-safe: used by the device's one thread."""

    def __init__(self) -> None:
        self._since: float | None = None

    def judge(self, cycle: Cycle, monotonic: float) -> str:
        """Returns why the utilization is not valid evidence, "" if it is valid."""
        if not _contradicts(cycle):
            self._since = None
            return ""
        self._since = monotonic if self._since is None else self._since
        if monotonic - self._since < LASTS_S:
            return ""
        state, power = cycle.value(GPU_PERFORMANCE_STATE), cycle.power_w
        rest = f"P{state:.0f}" + (f", {power:.0f} W" if power is not None else "")
        return f"the driver reports 100 % at rest ({rest}) and lists no process: the counter is stuck"


def _contradicts(cycle: Cycle) -> bool:
    state, power, limit = cycle.value(GPU_PERFORMANCE_STATE), cycle.power_w, cycle.power_limit_w
    rests = (
        state is not None and state >= RESTING_STATE and (power is None or not limit or power <= RESTING_POWER * limit)
    )
    processes = (cycle.value(GPU_COMPUTE_PROCESSES), cycle.value(GPU_GRAPHICS_PROCESSES))
    return (
        rests
        and cycle.utilization is not None
        and cycle.utilization >= FULL
        and processes[0] == 0.0
        and not processes[1]
    )
