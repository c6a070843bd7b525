"""Errors of NVLink, all links of the board together. Off by default, because it adds four series for each GPU."""

from __future__ import annotations

from gpu_exporter.agent.collectors.contract import SLOW_INTERVAL_S, Collector, Cycle
from gpu_exporter.agent.collectors.plausible import COUNT
from gpu_exporter.common.model.metrics import Family

GPU_NVLINK_ERRORS = Family(
    "gpu_nvlink_errors_total",
    "Errors of all NVLinks since the driver was loaded, by kind (crc_flit, crc_data, replay, recovery)",
    ("error",),
    source="nvmlDeviceGetFieldValues 38, 45, 52, 59",
    generations="boards with NVLink, up to Hopper",
    plausible=COUNT,
)


def collect_nvlink_errors(cycle: Cycle) -> None:
    for kind, count in (cycle.read(cycle.device.read_nvlink_errors) or {}).items():
        cycle.add(GPU_NVLINK_ERRORS, count, kind)


NVLINK_ERRORS = Collector("nvlink-errors", (GPU_NVLINK_ERRORS,), collect_nvlink_errors, every_s=SLOW_INTERVAL_S)
