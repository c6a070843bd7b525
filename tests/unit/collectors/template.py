"""A collector to copy: into exporter/gpu_exporter/agent/collectors/NAME.py. test_template.py is its test.

Then add its name to `collectors/names.py`.
"""

from __future__ import annotations

from gpu_exporter.agent.collectors.contract import SLOW_INTERVAL_S, Collector, Cycle
from gpu_exporter.agent.collectors.plausible import RATIO
from gpu_exporter.common.model.metrics import Family

GPU_FAN_SPEED_RATIO = Family(
    "gpu_fan_speed_ratio",
    "Fan speed as a share of its maximum; absent on boards without a fan",
    source="nvmlDeviceGetFanSpeed",
    generations="boards with fans",
    plausible=RATIO,  # a value outside is discarded, and counted
)


def collect_fan(cycle: Cycle) -> None:
    """`read` counts a call that fails; `add` publishes nothing for None."""
    cycle.add(GPU_FAN_SPEED_RATIO, cycle.read(cycle.device.read_fan_speed))  # type: ignore[attr-defined]


FAN = Collector("fan", (GPU_FAN_SPEED_RATIO,), collect_fan, every_s=SLOW_INTERVAL_S)
