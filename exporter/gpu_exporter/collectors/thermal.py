"""Temperature and clocks."""

from __future__ import annotations

from gpu_exporter.collectors.contract import Collector, Cycle
from gpu_exporter.model import Family

GPU_TEMPERATURE = Family(
    "gpu_temperature_celsius",
    "gauge",
    "Temperature of the GPU, the board's one sensor for all MIG instances",
    source="nvmlDeviceGetTemperature",
)
GPU_SM_CLOCK = Family("gpu_sm_clock_hertz", "gauge", "SM clock", source="nvmlDeviceGetClockInfo")
GPU_MEMORY_CLOCK = Family("gpu_memory_clock_hertz", "gauge", "Memory clock", source="nvmlDeviceGetClockInfo")
GPU_SM_CLOCK_MAX = Family(
    "gpu_sm_clock_max_hertz", "gauge", "Highest SM clock of the product", source="nvmlDeviceGetMaxClockInfo"
)


def collect_thermal(cycle: Cycle) -> None:
    cycle.add(GPU_TEMPERATURE, cycle.read(cycle.device.read_temperature))
    clocks = cycle.read(cycle.device.read_clocks)
    if clocks is not None:
        cycle.add(GPU_SM_CLOCK, clocks.sm)
        cycle.add(GPU_MEMORY_CLOCK, clocks.memory)
        cycle.add(GPU_SM_CLOCK_MAX, clocks.sm_max)


THERMAL = Collector("thermal", (GPU_TEMPERATURE, GPU_SM_CLOCK, GPU_MEMORY_CLOCK, GPU_SM_CLOCK_MAX), collect_thermal)
