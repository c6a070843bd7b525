"""The least that a Python exporter of GPUs costs: prometheus_client and NVIDIA's binding, 13 values of each GPU at each scrape.

    python -m tests.bench.floor PORT

Without holders, idle time, MIG, states, limits of time, or an answer if the driver fails.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pynvml
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


def read(handle: object) -> dict[str, float]:
    """13 values of one GPU, in the driver's units."""
    rates, memory = pynvml.nvmlDeviceGetUtilizationRates(handle), pynvml.nvmlDeviceGetMemoryInfo(handle)
    return {
        "gpu_utilization": rates.gpu,
        "gpu_memory_busy": rates.memory,
        "gpu_memory_used": memory.used,
        "gpu_memory_free": memory.free,
        "gpu_memory_total": memory.total,
        "gpu_power": pynvml.nvmlDeviceGetPowerUsage(handle),
        "gpu_power_limit": pynvml.nvmlDeviceGetEnforcedPowerLimit(handle),
        "gpu_energy": pynvml.nvmlDeviceGetTotalEnergyConsumption(handle),
        "gpu_temperature": pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
        "gpu_sm_clock": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
        "gpu_memory_clock": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM),
        "gpu_performance_state": pynvml.nvmlDeviceGetPerformanceState(handle),
        "gpu_encoder": pynvml.nvmlDeviceGetEncoderUtilization(handle)[0],
    }


class Gpus(Collector):
    def __init__(self) -> None:
        pynvml.nvmlInit()
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        self._handles = [(str(pynvml.nvmlDeviceGetUUID(handle)), handle) for handle in handles]

    def collect(self) -> Iterator[Metric]:
        families: dict[str, GaugeMetricFamily] = {}
        for uuid, handle in self._handles:
            for name, value in read(handle).items():
                families.setdefault(name, GaugeMetricFamily(name, name, labels=["uuid"])).add_metric([uuid], value)
        yield from families.values()


if __name__ == "__main__":
    registry = CollectorRegistry()
    registry.register(Gpus())
    start_http_server(int(sys.argv[1]), "127.0.0.1", registry)
    threading.Event().wait()
