"""How busy the GPU is: the driver's utilization and its sample ring."""

from __future__ import annotations

from gpu_exporter.collectors.contract import Collector, Cycle
from gpu_exporter.model import Family

GPU_UTILIZATION = Family(
    "gpu_utilization_ratio",
    "gauge",
    "Share of the driver's last sample period (1/6 to 1 s) with a kernel running; absent while MIG is on",
    source="nvmlDeviceGetUtilizationRates",
)
GPU_MEMORY_BUSY = Family(
    "gpu_memory_busy_ratio",
    "gauge",
    "Share of that period in which memory was read or written; absent while MIG is on",
    source="nvmlDeviceGetUtilizationRates",
)


def collect_utilization(cycle: Cycle) -> None:
    device = cycle.device
    cycle.driver_samples = cycle.read(lambda: device.read_utilization_samples(cycle.samples_since_wall)) or ()
    rates = cycle.read(device.read_utilization)
    cycle.utilization_at = cycle.now()
    if rates is not None and not 0.0 <= rates.gpu <= 1.0:
        # Seen with zombie processes. It is no measurement, and contradicts a ring that says 0.
        cycle.remarks.append(("nvmlDeviceGetUtilizationRates", "OUT_OF_RANGE"))
        cycle.witness_missing = True
    elif rates is not None:
        cycle.utilization = rates.gpu
        cycle.add(GPU_UTILIZATION, rates.gpu)
        cycle.add(GPU_MEMORY_BUSY, rates.memory)


UTILIZATION = Collector("utilization", (GPU_UTILIZATION, GPU_MEMORY_BUSY), collect_utilization, witness=True)
