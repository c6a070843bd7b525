"""Device memory. Memory in use does not prove activity: frameworks keep memory while they are idle."""

from __future__ import annotations

from gpu_exporter.agent.collectors.contract import SLOW_INTERVAL_S, Collector, Cycle
from gpu_exporter.agent.collectors.plausible import MEMORY_BYTES
from gpu_exporter.common.model.metrics import Family, Sample

_SOURCE = "nvmlDeviceGetMemoryInfo_v2"
GPU_MEMORY_USED = Family(
    "gpu_memory_used_bytes", "Memory that programs allocated", source=_SOURCE, plausible=MEMORY_BYTES
)
GPU_MEMORY_FREE = Family(
    "gpu_memory_free_bytes", "Memory that programs can allocate", source=_SOURCE, plausible=MEMORY_BYTES
)
GPU_MEMORY_RESERVED = Family(
    "gpu_memory_reserved_bytes", "Memory that driver and firmware reserve", source=_SOURCE, plausible=MEMORY_BYTES
)
GPU_MEMORY_TOTAL = Family("gpu_memory_total_bytes", "Memory of the board", source=_SOURCE, plausible=MEMORY_BYTES)


def collect_memory(cycle: Cycle) -> None:
    memory = cycle.read(cycle.device.read_memory)
    if memory is not None:
        parts = ((GPU_MEMORY_USED, memory.used), (GPU_MEMORY_FREE, memory.free), (GPU_MEMORY_RESERVED, memory.reserved))
        cycle.samples += read_parts(cycle, (GPU_MEMORY_TOTAL, memory.total), *parts)


def read_parts(cycle: Cycle, whole: tuple[Family, int], *parts: tuple[Family, int | None]) -> list[Sample]:
    """Returns samples of the total memory and its parts. Discards a part above the total as implausible."""
    total, samples = cycle.sample(*whole), []
    for family, size in parts:
        if total and size is not None and size > total[0].value:
            cycle.note_implausible(family)
        else:
            samples += cycle.sample(family, size)
    return samples + total


MEMORY = Collector(
    "memory",
    (GPU_MEMORY_USED, GPU_MEMORY_FREE, GPU_MEMORY_RESERVED, GPU_MEMORY_TOTAL),
    collect_memory,
    every_s=SLOW_INTERVAL_S,
)
