"""Temperatures, and the margin until the GPU slows down."""

from __future__ import annotations

from gpu_exporter.agent.collectors.contract import SLOW_INTERVAL_S, Collector, Cycle
from gpu_exporter.agent.collectors.plausible import CELSIUS
from gpu_exporter.common.model.metrics import Family

GPU_TEMPERATURE = Family(
    "gpu_temperature_celsius",
    "Temperature of the GPU. A board has one sensor for all its MIG instances",
    source="nvmlDeviceGetTemperatureV, else nvmlDeviceGetTemperature",
    plausible=CELSIUS,
)
GPU_MEMORY_TEMPERATURE = Family(
    "gpu_memory_temperature_celsius",
    "Temperature of the memory",
    source="nvmlDeviceGetFieldValues 82",
    generations="boards with HBM",
    plausible=CELSIUS,
)
GPU_TEMPERATURE_MARGIN = Family(
    "gpu_temperature_margin_celsius",
    "Degrees left until the GPU slows down, negative beyond that point",
    source="nvmlDeviceGetMarginTemperature",
    generations="Ada and newer",
    plausible=CELSIUS,
)
GPU_TEMPERATURE_LIMIT = Family(
    "gpu_temperature_limit_celsius",
    "Temperature at which the GPU slows down or shuts down. Newer boards report a margin instead",
    ("limit",),
    source="nvmlDeviceGetTemperatureThreshold",
    generations="before Ada",
    plausible=CELSIUS,
)


def collect_thermal(cycle: Cycle) -> None:
    margin = cycle.read(cycle.device.read_temperature_margin)
    limits = (cycle.read(cycle.device.read_temperature_limits) or {}) if margin is None else {}
    most = max(limits.values(), default=None)
    cycle.add_below(GPU_TEMPERATURE, cycle.read(cycle.device.read_temperature), most)
    cycle.add_below(GPU_MEMORY_TEMPERATURE, cycle.read(cycle.device.read_memory_temperature), most)
    cycle.add(GPU_TEMPERATURE_MARGIN, margin)
    for limit, celsius in limits.items():
        cycle.add(GPU_TEMPERATURE_LIMIT, celsius, limit)


THERMAL = Collector(
    "thermal",
    (GPU_TEMPERATURE, GPU_MEMORY_TEMPERATURE, GPU_TEMPERATURE_MARGIN, GPU_TEMPERATURE_LIMIT),
    collect_thermal,
    every_s=SLOW_INTERVAL_S,
)
