"""Clocks and performance state. All MIG instances of a board have the same values."""

from __future__ import annotations

from gpu_exporter.agent.collectors.contract import SLOW_INTERVAL_S, Collector, Cycle
from gpu_exporter.agent.collectors.plausible import HERTZ, PERFORMANCE_STATE
from gpu_exporter.common.model.metrics import Family

GPU_SM_CLOCK = Family("gpu_sm_clock_hertz", "SM clock", source="nvmlDeviceGetClockInfo", plausible=HERTZ)
GPU_MEMORY_CLOCK = Family("gpu_memory_clock_hertz", "Memory clock", source="nvmlDeviceGetClockInfo", plausible=HERTZ)
GPU_SM_CLOCK_MAX = Family(
    "gpu_sm_clock_max_hertz", "Highest SM clock of the product", source="nvmlDeviceGetMaxClockInfo", plausible=HERTZ
)
GPU_PERFORMANCE_STATE = Family(
    "gpu_performance_state",
    "P-state: 0 is the highest performance, 15 the lowest",
    source="nvmlDeviceGetPerformanceState",
    plausible=PERFORMANCE_STATE,
)


def collect_clocks(cycle: Cycle) -> None:
    clocks = cycle.read(cycle.device.read_clocks)
    if clocks is not None:
        cycle.add_below(GPU_SM_CLOCK, clocks.sm, clocks.sm_max)
        cycle.add(GPU_MEMORY_CLOCK, clocks.memory)
        cycle.add(GPU_SM_CLOCK_MAX, clocks.sm_max)
    cycle.add(GPU_PERFORMANCE_STATE, cycle.read(cycle.device.read_performance_state))


CLOCKS = Collector(
    "clocks",
    (GPU_SM_CLOCK, GPU_MEMORY_CLOCK, GPU_SM_CLOCK_MAX, GPU_PERFORMANCE_STATE),
    collect_clocks,
    every_s=SLOW_INTERVAL_S,
)
