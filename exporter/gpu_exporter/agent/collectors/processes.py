"""Counts the processes with a context on the GPU. Publishes only their number, no pid and no name.

Attribution gets the list, and looks up the pod or job of each process.
"""

from __future__ import annotations

from gpu_exporter.agent.collectors.contract import SLOW_INTERVAL_S, Collector, Cycle
from gpu_exporter.agent.collectors.plausible import PROCESS_COUNT
from gpu_exporter.common.model.metrics import Family
from gpu_exporter.common.model.readings import ProcessList

GPU_COMPUTE_PROCESSES = Family(
    "gpu_compute_processes",
    "Processes with a compute context. Absent until the exporter has proof that it can see processes",
    source="nvmlDeviceGetComputeRunningProcesses",
    plausible=PROCESS_COUNT,
)
GPU_GRAPHICS_PROCESSES = Family(
    "gpu_graphics_processes",
    "Processes with a graphics context. Absent until the exporter has proof that it can see processes",
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


# Listing processes is by far the slowest call (4.5 ms measured on a laptop), so it is made less often.
PROCESSES = Collector(
    "processes", (GPU_COMPUTE_PROCESSES, GPU_GRAPHICS_PROCESSES), collect_processes, every_s=SLOW_INTERVAL_S
)
