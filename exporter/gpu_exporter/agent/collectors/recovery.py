"""The recovery action (e.g. a reset) that the driver requests after a fault."""

from __future__ import annotations

from gpu_exporter.agent.collectors.contract import Collector, Cycle
from gpu_exporter.agent.collectors.plausible import ACTION
from gpu_exporter.common.model.metrics import Family

GPU_RECOVERY_ACTION = Family(
    "gpu_recovery_action",
    "Action that the driver requests: 0 none, 1 reset GPU, 2 reboot node, 3 drain peers, 4 drain and reset, 5 restart "
    "IMEX, 6 bus reset, 7 system reboot",
    source="nvmlDeviceGetFieldValues 230",
    plausible=ACTION,
)


def collect_recovery(cycle: Cycle) -> None:
    cycle.add(GPU_RECOVERY_ACTION, cycle.read(cycle.device.read_recovery_action))


RECOVERY = Collector("recovery", (GPU_RECOVERY_ACTION,), collect_recovery, every_s=10.0)
