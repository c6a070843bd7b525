"""Which processes have a context on the GPU. What is published is their number: no pid, no name.

The list itself goes to attribution, which looks up to which pod or job each process belongs.
"""

from __future__ import annotations

from gpu_exporter.collectors.contract import SLOW_INTERVAL_S, Collector, Cycle
from gpu_exporter.collectors.plausible import PROCESS_COUNT
from gpu_exporter.model.metrics import Family
from gpu_exporter.model.readings import ProcessList

GPU_COMPUTE_PROCESSES = Family(
    "gpu_compute_processes",
    "gauge",
    "Processes with a compute context; absent while it is not proven that processes can be seen from here",
    source="nvmlDeviceGetComputeRunningProcesses",
    plausible=PROCESS_COUNT,
)
GPU_GRAPHICS_PROCESSES = Family(
    "gpu_graphics_processes",
    "gauge",
    "Processes with a graphics context; absent while it is not proven that processes can be seen from here",
    source="nvmlDeviceGetGraphicsRunningProcesses",
    plausible=PROCESS_COUNT,
)


def collect_processes(cycle: Cycle) -> None:
    processes = cycle.read(cycle.device.read_processes)
    if processes is not None:
        cycle.add(GPU_COMPUTE_PROCESSES, processes.compute)
        cycle.add(GPU_GRAPHICS_PROCESSES, processes.graphics)
        if processes.listed is not None:
            cycle.processes = ProcessList(cycle.now(), processes.listed)


# Listing processes is by far the slowest call of all (4.5 ms measured on a laptop): now and then is enough.
PROCESSES = Collector(
    "processes", (GPU_COMPUTE_PROCESSES, GPU_GRAPHICS_PROCESSES), collect_processes, every_s=SLOW_INTERVAL_S
)
