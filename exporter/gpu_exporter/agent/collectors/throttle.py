"""Seconds of low clocks, by reason. Only the driver's nanosecond counters are used, no sampled states."""

from __future__ import annotations

from gpu_exporter.agent.collectors.contract import SLOW_INTERVAL_S, Collector, Cycle
from gpu_exporter.agent.collectors.plausible import SECONDS
from gpu_exporter.common.model.metrics import Family

GPU_THROTTLE_SECONDS = Family(
    "gpu_throttle_seconds_total",
    "Time for which each throttle reason was active. Reasons overlap, so do not add them up",
    ("reason",),
    source="nvmlDeviceGetFieldValues 74-79, 269-271",
    plausible=SECONDS,
)


def collect_throttle(cycle: Cycle) -> None:
    for reason, seconds in (cycle.read(cycle.device.read_throttle_seconds) or {}).items():
        cycle.add(GPU_THROTTLE_SECONDS, seconds, reason)


THROTTLE = Collector("throttle", (GPU_THROTTLE_SECONDS,), collect_throttle, every_s=SLOW_INTERVAL_S)
