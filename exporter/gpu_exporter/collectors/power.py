"""Power and energy of the board. NVML tells none per MIG instance; mig.py estimates."""

from __future__ import annotations

from gpu_exporter.collectors.contract import Collector, Cycle
from gpu_exporter.model import Family

GPU_POWER = Family(
    "gpu_power_watts",
    "gauge",
    "Power draw of the board; a mean over one second on Ampere (except GA100) and newer, else a moment's value",
    source="nvmlDeviceGetPowerUsage",
)
GPU_POWER_LIMIT = Family(
    "gpu_power_limit_watts", "gauge", "Enforced power limit", source="nvmlDeviceGetEnforcedPowerLimit"
)
GPU_ENERGY = Family(
    "gpu_energy_joules_total",
    "counter",
    "Energy since the driver was loaded; rate() is the true mean power",
    source="nvmlDeviceGetTotalEnergyConsumption",
    generations="Volta and newer",
)


def collect_power(cycle: Cycle) -> None:
    cycle.power_w = cycle.read(cycle.device.read_power)
    cycle.power_limit_w = cycle.read(cycle.device.read_power_limit)
    cycle.energy_j = cycle.read(cycle.device.read_energy)
    cycle.energy_at = cycle.now()
    cycle.add(GPU_POWER, cycle.power_w)
    cycle.add(GPU_POWER_LIMIT, cycle.power_limit_w)
    cycle.add(GPU_ENERGY, cycle.energy_j)


POWER = Collector("power", (GPU_POWER, GPU_POWER_LIMIT, GPU_ENERGY), collect_power, witness=True)
