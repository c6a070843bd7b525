"""Power and energy of the whole board. NVML does not report them for MIG instances; mig.py estimates them."""

from __future__ import annotations

from gpu_exporter.agent.collectors.contract import Collector, Cycle
from gpu_exporter.agent.collectors.plausible import JOULES, WATTS
from gpu_exporter.common.model.metrics import Family

GPU_POWER = Family(
    "gpu_power_watts",
    "Power of the board: a mean over one second on Ampere (except GA100) and newer, otherwise the current value",
    source="nvmlDeviceGetPowerUsage",
    plausible=WATTS,
)
GPU_POWER_LIMIT = Family(
    "gpu_power_limit_watts", "Enforced power limit", source="nvmlDeviceGetEnforcedPowerLimit", plausible=WATTS
)
GPU_ENERGY = Family(
    "gpu_energy_joules_total",
    "Energy since the driver was loaded. Its rate() is the true mean power",
    source="nvmlDeviceGetTotalEnergyConsumption",
    generations="Volta and newer",
    plausible=JOULES,
)


SLACK_S = 1.0  # the counter increases in steps of up to a second of power draw
SENTINEL_J = (
    0xFFFFFFFF / 1000.0
)  # 32 bits of ones, in the driver's millijoules; a real count hardly has this exact value


def collect_power(cycle: Cycle) -> None:
    cycle.power_w = cycle.add(GPU_POWER, cycle.read(cycle.device.read_power), witness=True)
    limit = cycle.read(cycle.device.read_power_limit)
    cycle.power_limit_w = cycle.add(GPU_POWER_LIMIT, limit, witness=True)  # power is judged against the limit
    # Not published: only the detection of stalls needs it. A lower enforced limit does not change the power at rest.
    default = cycle.read(cycle.device.read_default_power_limit)
    cycle.default_limit_w = default if default is not None and WATTS.holds(default) else None
    joules = cycle.admit(GPU_ENERGY, cycle.read(cycle.device.read_energy), witness=True)
    cycle.energy_at = cycle.now()
    cycle.energy_j = None if joules is None else _judge_energy(cycle, joules)
    cycle.put(GPU_ENERGY, cycle.energy_j)


def _judge_energy(cycle: Cycle, joules: float) -> float | None:
    """Returns the energy counter in joules, None if it is implausible. Counts implausible values.

    - A driver's code for "no value" may lie within the counter's range, above or below the true value.
    - A lower value is accepted only if the next reading continues from it; the driver was then reloaded.
    - After an implausible value, a reading that continues from the last plausible value is accepted.
    - A board that has only reported 0 has no counter: None, not counted.
    """
    believed = cycle.totals.last("energy")
    if believed is None and joules == 0.0:
        return None
    last_read = cycle.totals.last("energy-read")
    goes_on = cycle.totals.step("energy-read", joules)
    span = cycle.totals.step("energy-read-time", cycle.energy_at)
    if abs(joules - SENTINEL_J) < 0.001:
        is_believed = False
    elif believed is None:
        is_believed = True
    elif joules >= believed:
        since = cycle.energy_at - (cycle.totals.last("energy-time") or 0.0)
        # A rejected value that has not changed since is still the same code for "no value".
        is_believed = _can_be_drawn(joules - believed, since) and (last_read == believed or last_read != joules)
    else:
        is_believed = bool(goes_on) and _can_be_drawn(goes_on or 0.0, span or 0.0)
    if not is_believed:
        cycle.note_implausible(GPU_ENERGY, witness=True)
        return None
    cycle.totals.step("energy", joules)
    cycle.totals.step("energy-time", cycle.energy_at)
    return joules


def _can_be_drawn(joules: float, seconds: float) -> bool:
    return joules <= WATTS.high * (seconds + SLACK_S)


POWER = Collector("power", (GPU_POWER, GPU_POWER_LIMIT, GPU_ENERGY), collect_power, witness=True)
