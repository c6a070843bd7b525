"""Power and energy of the board. NVML tells none per MIG instance; mig.py estimates."""

from __future__ import annotations

from gpu_exporter.collectors.contract import Collector, Cycle
from gpu_exporter.collectors.plausible import JOULES, WATTS
from gpu_exporter.model import Family

GPU_POWER = Family(
    "gpu_power_watts",
    "gauge",
    "Power draw of the board; a mean over one second on Ampere (except GA100) and newer, else a moment's value",
    source="nvmlDeviceGetPowerUsage",
    plausible=WATTS,
)
GPU_POWER_LIMIT = Family(
    "gpu_power_limit_watts",
    "gauge",
    "Enforced power limit",
    source="nvmlDeviceGetEnforcedPowerLimit",
    plausible=WATTS,
)
GPU_ENERGY = Family(
    "gpu_energy_joules_total",
    "counter",
    "Energy since the driver was loaded; rate() is the true mean power",
    source="nvmlDeviceGetTotalEnergyConsumption",
    generations="Volta and newer",
    plausible=JOULES,
)


SLACK_S = 1.0  # the counter moves in steps, each up to a second of draw


def collect_power(cycle: Cycle) -> None:
    cycle.power_w = cycle.admit(GPU_POWER, cycle.read(cycle.device.read_power), witness=True)
    limit = cycle.read(cycle.device.read_power_limit)
    cycle.power_limit_w = cycle.admit(GPU_POWER_LIMIT, limit, witness=True)  # power is judged by it
    joules = cycle.admit(GPU_ENERGY, cycle.read(cycle.device.read_energy), witness=True)
    cycle.energy_at = cycle.now()
    if joules is not None and not _is_likely(cycle, joules):
        cycle.note_implausible(GPU_ENERGY, witness=True)
        joules = None
    cycle.energy_j = joules
    cycle.add(GPU_POWER, cycle.power_w)
    cycle.add(GPU_POWER_LIMIT, cycle.power_limit_w)
    cycle.add(GPU_ENERGY, cycle.energy_j)


def _is_likely(cycle: Cycle, joules: float) -> bool:
    """Whether the energy counter can have come to this since it was last read.

    A sentinel of 32 bits is 4.29 MJ, well within the range of a counter: it shows by a step that no board can draw. A
    fall is a driver that was loaded again, unless it is to exactly 0.
    """
    before = cycle.totals.last("energy")
    span = cycle.totals.step("energy-time", cycle.energy_at)
    used = cycle.totals.step("energy", joules)
    if used is None:
        return before is None or joules > 0.0
    return span is None or used <= WATTS.high * (span + SLACK_S)


POWER = Collector("power", (GPU_POWER, GPU_POWER_LIMIT, GPU_ENERGY), collect_power, witness=True)
