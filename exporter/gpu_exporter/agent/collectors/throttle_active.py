"""The present reasons for low clocks.

Off by default, because it adds eight series for each GPU that contain less information than the counters.
"""

from __future__ import annotations

from gpu_exporter.agent.collectors.contract import SLOW_INTERVAL_S, Collector, Cycle
from gpu_exporter.agent.collectors.plausible import SWITCH
from gpu_exporter.common.model.metrics import Family

GPU_THROTTLE_ACTIVE = Family(
    "gpu_throttle_active",
    "1 if the throttle reason is active, 0 if not. Reasons overlap",
    ("reason",),
    source="nvmlDeviceGetCurrentClocksEventReasons, else nvmlDeviceGetCurrentClocksThrottleReasons",
    plausible=SWITCH,
)


def collect_throttle_active(cycle: Cycle) -> None:
    for reason, active in (cycle.read(cycle.device.read_throttle_active) or {}).items():
        cycle.add(GPU_THROTTLE_ACTIVE, float(active), reason)


THROTTLE_ACTIVE = Collector("throttle-active", (GPU_THROTTLE_ACTIVE,), collect_throttle_active, every_s=SLOW_INTERVAL_S)
