"""The NVLinks of a GPU that are up, and the GPU's registration with the fabric of NVSwitches.

On a board with NVSwitches CUDA fails (error 802) until the registration is completed, while NVML answers every call.
"""

from __future__ import annotations

from gpu_exporter.agent.collectors.contract import Collector, Cycle
from gpu_exporter.agent.collectors.plausible import COUNT, SECONDS
from gpu_exporter.agent.devices.protocol import COMPLETED
from gpu_exporter.common.model.metrics import Family

GPU_NVLINKS_ACTIVE = Family(
    "gpu_nvlinks_active", "NVLinks of the GPU that are up", source="nvmlDeviceGetNvLinkState", plausible=COUNT
)
GPU_NVLINKS_GONE = Family(
    "gpu_nvlinks_down_seconds",
    "Time for which no NVLink of the GPU has been up. Absent while a link is up",
    source="nvmlDeviceGetNvLinkState",
    plausible=SECONDS,
)
GPU_FABRIC_STATUS = Family(
    "gpu_fabric_status",
    "Registration with the NVLink fabric: 1 not started, 2 in progress, 3 completed, 4 failed. Label problem: the "
    "reason, or the degraded part",
    ("problem",),
    source="nvmlDeviceGetGpuFabricInfoV",
    generations="boards with NVSwitches, Hopper and newer",
    plausible=COUNT,
)
GPU_FABRIC_WAIT = Family(
    "gpu_fabric_not_ready_seconds",
    "Time without a completed registration with the NVLink fabric. Counts from the host's boot if the exporter has "
    "never seen a completed one. Absent when completed or failed",
    source="nvmlDeviceGetGpuFabricInfoV",
    generations="boards with NVSwitches, Hopper and newer",
    plausible=SECONDS,
)


def collect_fabric(cycle: Cycle) -> None:
    # `lowest` is forgotten while the GPU does not answer: the time of a loss or a release does not count.
    links = cycle.add(GPU_NVLINKS_ACTIVE, cycle.read(cycle.device.read_nvlinks_active))
    if links == 0:
        cycle.add(GPU_NVLINKS_GONE, cycle.now() - cycle.totals.lowest(GPU_NVLINKS_GONE.name, cycle.now()))
    else:
        cycle.totals.forget_step(GPU_NVLINKS_GONE.name)
    fabric = cycle.read(cycle.device.read_fabric)
    if fabric is None:
        return
    cycle.add(GPU_FABRIC_STATUS, fabric.status, fabric.problem)
    if fabric.status == COMPLETED:
        cycle.totals.grow(GPU_FABRIC_STATUS.name, 1.0)
        cycle.totals.forget_step(GPU_FABRIC_WAIT.name)
    elif fabric.status < COMPLETED:
        now, was_completed = cycle.now(), cycle.totals.sum_of(GPU_FABRIC_STATUS.name) is not None
        # The monotonic clock starts at the boot. So one reading judges as the daemon does, and a restart hides nothing.
        cycle.add(GPU_FABRIC_WAIT, now - (cycle.totals.lowest(GPU_FABRIC_WAIT.name, now) if was_completed else 0.0))


FABRIC = Collector(
    "fabric", (GPU_NVLINKS_ACTIVE, GPU_FABRIC_STATUS, GPU_FABRIC_WAIT, GPU_NVLINKS_GONE), collect_fabric, every_s=10.0
)
