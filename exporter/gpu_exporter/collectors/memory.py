"""Device memory. Memory in use is no proof of activity: frameworks keep it while they idle."""

from __future__ import annotations

from gpu_exporter.collectors.contract import UNHURRIED_S, Collector, Cycle
from gpu_exporter.model import Family

_SOURCE = "nvmlDeviceGetMemoryInfo_v2"
GPU_MEMORY_USED = Family("gpu_memory_used_bytes", "gauge", "Memory allocated by programs", source=_SOURCE)
GPU_MEMORY_FREE = Family("gpu_memory_free_bytes", "gauge", "Memory that can be allocated", source=_SOURCE)
GPU_MEMORY_RESERVED = Family(
    "gpu_memory_reserved_bytes", "gauge", "Memory that driver and firmware keep", source=_SOURCE
)
GPU_MEMORY_TOTAL = Family("gpu_memory_total_bytes", "gauge", "Memory of the board", source=_SOURCE)


def collect_memory(cycle: Cycle) -> None:
    memory = cycle.read(cycle.device.read_memory)
    if memory is not None:
        cycle.add(GPU_MEMORY_USED, memory.used)
        cycle.add(GPU_MEMORY_FREE, memory.free)
        cycle.add(GPU_MEMORY_RESERVED, memory.reserved)
        cycle.add(GPU_MEMORY_TOTAL, memory.total)


MEMORY = Collector(
    "memory",
    (GPU_MEMORY_USED, GPU_MEMORY_FREE, GPU_MEMORY_RESERVED, GPU_MEMORY_TOTAL),
    collect_memory,
    every_s=UNHURRIED_S,
)
