"""GPM, the driver's GPU performance monitoring: activity of SMs, tensor cores and memory since the last cycle."""

from __future__ import annotations

from gpu_exporter.agent.collectors.contract import Collector, Cycle
from gpu_exporter.agent.collectors.plausible import BYTES_PER_SECOND, RATIO
from gpu_exporter.agent.devices import errors
from gpu_exporter.agent.devices.protocol import Gpm
from gpu_exporter.common.model.metrics import Family, Range

HOPPER = "Hopper and newer"
GPU_GRAPHICS_ACTIVE = Family(
    "gpu_graphics_active_ratio",
    "Share of the time since the last cycle in which the graphics or compute engine was active",
    source="nvmlGpmMetricsGet 1",
    generations=HOPPER,
    plausible=RATIO,
)
GPU_SM_ACTIVE = Family(
    "gpu_sm_active_ratio",
    "Share of the SMs that had work since the last cycle",
    source="nvmlGpmMetricsGet 248 and 249, else 2",
    generations=HOPPER,
    plausible=RATIO,
)
GPU_SM_OCCUPANCY = Family(
    "gpu_sm_occupancy_ratio",
    "Resident warps, as a share of the maximum",
    source="nvmlGpmMetricsGet 3",
    generations=HOPPER,
    plausible=RATIO,
)
GPU_TENSOR_ACTIVE = Family(
    "gpu_tensor_active_ratio",
    "Share of time in which a tensor pipe was active",
    source="nvmlGpmMetricsGet 5",
    generations=HOPPER,
    plausible=RATIO,
)
GPU_DRAM_ACTIVE = Family(
    "gpu_dram_active_ratio",
    "Memory bandwidth in use, as a share of the maximum",
    source="nvmlGpmMetricsGet 10",
    generations=HOPPER,
    plausible=RATIO,
)
RATIOS = {
    "graphics": GPU_GRAPHICS_ACTIVE,
    "sm": GPU_SM_ACTIVE,
    "occupancy": GPU_SM_OCCUPANCY,
    "tensor": GPU_TENSOR_ACTIVE,
    "dram": GPU_DRAM_ACTIVE,
}
PIPES = ("fp64", "fp32", "fp16")  # not published: only the search for stalls needs them
INTEGRALS = {
    name: Family(
        f"gpu_{name}_active_seconds_total",
        f"Integral of gpu_{name}_active_ratio. Its rate is the mean over any window",
        source=RATIOS[name].source,
        generations=HOPPER,
        unbounded="a sum of ratios that were checked",
    )
    for name in ("graphics", "sm", "tensor")
}
OUT_OF_RANGE = ("nvmlGpmMetricsGet", errors.OUT_OF_RANGE)
STUCK = ("nvmlGpmMetricsGet", "STUCK")
TOLERANCE = 0.001  # rounding by the driver, not a fault
CLAMPED = Range(-TOLERANCE, 2.0)  # a value outside is a code for "no value", not a ratio that is a little too high


def refine(cycle: Cycle, subject: str, gpm: Gpm) -> Gpm:
    """Limits GPM's ratios to 0 to 1. Computes SM activity from the driver's own cycle counters, if it has them.

    - Real hardware reports ratios above 1 (SM activity of 1.29, NVIDIA/DCGM#152). They are reduced to 1, and counted.
    - A value below 0 (the two samples do not fit together) or above 2 (a code for "no value") is discarded.
    - If the driver's cycle counter did not increase, the whole window is discarded, because its two samples are the
      same.
    """
    elapsed = active = None
    if gpm.elapsed_cycles is not None:
        elapsed = cycle.totals.step((subject, "elapsed_cycles"), gpm.elapsed_cycles)
        if elapsed == 0.0:
            cycle.remarks.append(STUCK)
            cycle.gpm_stuck.add(subject)
            return Gpm(gpm.span_s, missing=True)
        if elapsed is None:  # the counter may not increase, so a quiet window proves nothing
            gpm = gpm._replace(missing=True)
    if gpm.active_cycles is not None:
        active = cycle.totals.step((subject, "active_cycles"), gpm.active_cycles)
        if elapsed and active is not None:
            # The counters may cover more time than the window: the higher value counts.
            gpm = gpm._replace(sm=max(gpm.sm or 0.0, active / elapsed))
    for name in (*RATIOS, *PIPES, "engines"):
        value = getattr(gpm, name)
        if value is None or 0.0 <= value <= 1.0:
            continue
        if not -TOLERANCE <= value <= 1.0 + TOLERANCE:
            cycle.remarks.append(OUT_OF_RANGE)
        if not CLAMPED.holds(value):
            is_witness = name not in PIPES
            gpm = gpm._replace(missing=gpm.missing or is_witness, **{name: None})  # type: ignore[arg-type]
        else:
            gpm = gpm._replace(**{name: min(1.0, max(0.0, value))})
    for name in ("pcie", "nvlink"):
        rate = getattr(gpm, name)
        if rate is not None and not BYTES_PER_SECOND.holds(rate):
            cycle.remarks.append(OUT_OF_RANGE)
            gpm = gpm._replace(missing=True, **{name: None})  # type: ignore[arg-type]
    return gpm


def collect_gpm(cycle: Cycle) -> None:
    answers, gpm = cycle.answers, cycle.read(cycle.device.read_gpm)
    if gpm is None:
        cycle.witness_missing |= cycle.answers > answers  # available, but its first window is not complete yet
        return
    cycle.gpm = gpm = refine(cycle, "", gpm)
    cycle.witness_missing |= gpm.missing
    for name, family in RATIOS.items():
        cycle.add(family, getattr(gpm, name))
    for name, family in INTEGRALS.items():
        ratio = getattr(gpm, name)
        if ratio is not None:
            cycle.add(family, cycle.totals.grow(family.name, ratio * gpm.span_s))


GPM = Collector("gpm", (*RATIOS.values(), *INTEGRALS.values()), collect_gpm, witness=True)
