"""Reads the MIG instances. Lists them again in each cycle, because the driver may reuse a handle for another instance.

NVML measures power only for the whole board, so the energy of an instance is an estimate:

- Energy at rest is divided by compute slices. The part of unassigned slices belongs to no instance.
- The remaining energy is divided by slices times activity.
- All parts together are exactly the board's energy.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

from gpu_exporter.agent.collectors.contract import Collector, Cycle, InstanceCycle
from gpu_exporter.agent.collectors.gpm import HOPPER, refine
from gpu_exporter.agent.collectors.memory import read_parts
from gpu_exporter.agent.collectors.plausible import CELSIUS, MEMORY_BYTES, RATIO
from gpu_exporter.agent.collectors.thermal import GPU_TEMPERATURE
from gpu_exporter.agent.devices.protocol import Gpm, Instance, InstanceIdentity
from gpu_exporter.common.model.metrics import Family, Sample
from gpu_exporter.common.shares import REST_MAX_SHARE, count_slices

GPU_MIG_INFO = Family(
    "gpu_mig_info",
    "Identity of a MIG instance, always 1",
    ("profile", "sm_slices", "memory_slices"),
    source="nvmlDeviceGetAttributes_v2",
    unbounded="identity",
)
GPU_MIG_MEMORY_USED = Family(
    "gpu_mig_memory_used_bytes",
    "Memory in use in the instance",
    source="nvmlDeviceGetMemoryInfo_v2",
    plausible=MEMORY_BYTES,
)
GPU_MIG_MEMORY_TOTAL = Family(
    "gpu_mig_memory_total_bytes", "Memory of the instance", source="nvmlDeviceGetMemoryInfo_v2", plausible=MEMORY_BYTES
)
GPU_MIG_TEMPERATURE = Family(
    "gpu_mig_temperature_celsius",
    "Temperature of the board, which has one sensor for all its instances",
    source="nvmlDeviceGetTemperatureV",
    plausible=CELSIUS,
)
GPU_MIG_ACTIVITY_SUPPORTED = Family(
    "gpu_mig_activity_supported",
    "1 if the exporter can read the instance's activity, 0 if not",
    unbounded="depends on which calls answered",
)
RATIOS = {
    name: Family(
        f"gpu_mig_{name}_active_ratio",
        f"{text}. Absent on hardware without it",
        source=source,
        generations=HOPPER,
        plausible=RATIO,
    )
    for name, text, source in (
        ("graphics", "Share of time in which the instance's engine was active", "nvmlGpmMetricsGet 1"),
        ("sm", "Share of the instance's SMs that had work", "nvmlGpmMetricsGet 248 and 249, else 2"),
        ("tensor", "Share of time in which a tensor pipe was active", "nvmlGpmMetricsGet 5"),
        ("dram", "Memory bandwidth in use, as a share of the maximum", "nvmlGpmMetricsGet 10"),
    )
}
SLOW_READ_S = 0.1  # the shortest GPM window, in seconds
METHODS = ("slices", "activity")  # without and with known activity
_ESTIMATE = "nvmlDeviceGetTotalEnergyConsumption, divided"
_DIVIDED = "a part of energy that was checked"
GPU_MIG_POWER = Family(
    "gpu_mig_power_watts",
    "Estimated part of the board's power, by method (activity, slices)",
    ("method",),
    source=_ESTIMATE,
    unbounded=_DIVIDED,
)
GPU_MIG_ENERGY = Family(
    "gpu_mig_energy_joules_total",
    "Estimated part of the board's energy, by method. The sum over all instances plus "
    "gpu_mig_unassigned_energy_joules_total grows like gpu_energy_joules_total",
    ("method",),
    source=_ESTIMATE,
    unbounded=_DIVIDED,
)
GPU_MIG_UNASSIGNED_ENERGY = Family(
    "gpu_mig_unassigned_energy_joules_total",
    "Energy of a board with MIG that belongs to no instance",
    source=_ESTIMATE,
    unbounded=_DIVIDED,
)


def divide_energy(
    joules: float, idle_joules: float, board_slices: int, parts: Sequence[tuple[str, float, float | None]]
) -> tuple[dict[str, float], float]:
    """Divides `joules` among `parts`, which are (uuid, slices, activity).

    Returns the joules by uuid, and the joules of unassigned slices. Their sum is exactly `joules`. `idle_joules`: the
    board's energy for the same time at rest. If the activity of an instance is unknown, or no instance is active, all
    energy is divided by slices.
    """
    whole = count_slices(board_slices, (slices for _, slices, _ in parts))
    weights = {uuid: slices * activity for uuid, slices, activity in parts if activity is not None}
    active = sum(weights.values())
    idle = min(joules, idle_joules) if len(weights) == len(parts) and active > 0 else joules
    shares = {uuid: idle * slices / whole for uuid, slices, _ in parts}
    for uuid, weight in weights.items():
        if active > 0:
            shares[uuid] += (joules - idle) * (weight / active)
    return shares, joules - sum(shares.values())


class _InstanceRead(NamedTuple):
    """Values of one instance. `supported`: the driver can report its activity, now or in a later cycle."""

    identity: InstanceIdentity
    gpm: Gpm | None
    gpm_at: float
    supported: bool
    samples: list[Sample]


def collect_mig(cycle: Cycle) -> None:
    listed = cycle.read(cycle.device.list_instances)
    cycle.instances_known = listed is not None and cycle.device.instances_complete
    temperature = cycle.value(GPU_TEMPERATURE) if listed else None
    read = [_read_instance(cycle, instance, temperature) for instance in listed or ()]
    energies: Mapping[str, float] = {}
    if cycle.device.identity.mig_mode == "enabled":
        energies = _charge(cycle, read)  # all energy is unassigned while the instances cannot be listed
    else:
        cycle.totals.forget_step("mig-time", "mig-energy")  # without MIG, energy belongs to no instance
    for entry in read:
        identity = entry.identity
        cycle.instances.append(
            InstanceCycle(
                identity.uuid,
                identity.mig,
                identity.profile,
                identity.sm_slices,
                tuple(entry.samples),
                entry.gpm,
                entry.gpm_at,
                energies.get(identity.uuid),
                identity.placement,
                has_memory=identity.memory == "own",
            )
        )
    if cycle.instances_known:
        present = {entry.identity.uuid for entry in read}
        cycle.totals.forget(lambda key: _subject(key).startswith("MIG-") and _subject(key) not in present)


def _read_instance(cycle: Cycle, instance: Instance, temperature: float | None) -> _InstanceRead:
    identity = instance.identity
    begin = cycle.now()
    before, gpm = (cycle.answers, len(cycle.errors)), cycle.read(instance.read_gpm)
    at = cycle.now()
    supported = (cycle.answers, len(cycle.errors)) != before  # a failed call does not mean that the source is missing
    if gpm is not None:
        gpm = refine(cycle, identity.uuid, gpm)
        if at - begin > SLOW_READ_S:  # the time of the sample is uncertain, so a quiet sample proves nothing
            gpm = gpm._replace(missing=True)
    memory = cycle.read(instance.read_memory) if identity.memory != "none" else None
    slices = str(identity.memory_slices) if identity.memory_slices else ""
    samples = [
        Sample(GPU_MIG_INFO, (identity.profile, f"{identity.sm_slices:g}", slices), 1.0),
        Sample(GPU_MIG_ACTIVITY_SUPPORTED, (), float(supported)),
    ]
    if memory is not None:
        samples += read_parts(cycle, (GPU_MIG_MEMORY_TOTAL, memory.total), (GPU_MIG_MEMORY_USED, memory.used))
    if temperature is not None:
        samples.append(Sample(GPU_MIG_TEMPERATURE, (), temperature))
    if gpm is not None:
        values = ((family, getattr(gpm, name)) for name, family in RATIOS.items())
        samples += [Sample(family, (), value) for family, value in values if value is not None]
    return _InstanceRead(identity, gpm, at, supported, samples)


def _subject(key: Hashable) -> str:
    """Returns the uuid in a key (uuid, name) of an instance's sums and counters, "" for other keys."""
    return key[0] if isinstance(key, tuple) and isinstance(key[0], str) else ""


def _charge(cycle: Cycle, read: Sequence[_InstanceRead]) -> Mapping[str, float]:
    """Divides the board's energy since the last cycle among its instances.

    Returns the joules of each instance since the exporter's start, by uuid. Each method of estimation has its own sum,
    so that no energy is counted twice when the method changes.
    """
    if cycle.energy_j is None:
        return {}
    span = cycle.totals.step("mig-time", cycle.energy_at)
    joules = cycle.totals.step("mig-energy", cycle.energy_j)
    if joules is None or not span:
        return {}
    # A counter that did not increase was read twice within its own period: the reading shows no power.
    idle_w = cycle.totals.lowest("mig-idle-power", joules / span) if joules else 0.0
    if cycle.power_limit_w is not None:  # if instances are never idle together, the lowest power is not idle power
        idle_w = min(idle_w, REST_MAX_SHARE * cycle.power_limit_w)
    parts = [(r.identity.uuid, r.identity.sm_slices, r.gpm.graphics if r.gpm else None) for r in read]
    shares, rest = divide_energy(joules, idle_w * span, cycle.device.identity.mig_slices, parts)
    sums: dict[str, float] = {}
    for entry in read:
        uuid, method = entry.identity.uuid, METHODS[entry.supported]
        cycle.totals.grow((uuid, method), shares[uuid])
        entry.samples.append(Sample(GPU_MIG_POWER, (method,), shares[uuid] / span))
        for name in METHODS:
            if (so_far := cycle.totals.sum_of((uuid, name))) is not None:
                entry.samples.append(Sample(GPU_MIG_ENERGY, (name,), so_far))
                sums[uuid] = sums.get(uuid, 0.0) + so_far
    cycle.add(GPU_MIG_UNASSIGNED_ENERGY, cycle.totals.grow("mig-unassigned", rest))
    return sums


MIG = Collector(
    "mig",
    (GPU_MIG_UNASSIGNED_ENERGY,),
    collect_mig,
    (
        GPU_MIG_INFO,
        GPU_MIG_ACTIVITY_SUPPORTED,
        GPU_MIG_MEMORY_USED,
        GPU_MIG_MEMORY_TOTAL,
        GPU_MIG_TEMPERATURE,
        *RATIOS.values(),
        GPU_MIG_POWER,
        GPU_MIG_ENERGY,
    ),
)
