"""Traffic between GPUs over NVLink: the sum of all links of the board."""

from __future__ import annotations

from gpu_exporter.agent.collectors.contract import Collector, Cycle
from gpu_exporter.agent.collectors.plausible import MOVED_BYTES
from gpu_exporter.common.model.metrics import Family

_SOURCE = "nvmlDeviceGetFieldValues 138 and 139, on Blackwell 202 and 204"
GPU_NVLINK_RX = Family(
    "gpu_nvlink_rx_bytes_total", "Bytes that the GPU received over all NVLinks", source=_SOURCE, plausible=MOVED_BYTES
)
GPU_NVLINK_TX = Family(
    "gpu_nvlink_tx_bytes_total", "Bytes that the GPU sent over all NVLinks", source=_SOURCE, plausible=MOVED_BYTES
)


def collect_nvlink(cycle: Cycle) -> None:
    cycle.nvlink = cycle.admit_traffic(GPU_NVLINK_RX, GPU_NVLINK_TX, cycle.read(cycle.device.read_nvlink))
    cycle.nvlink_at = cycle.now()


NVLINK = Collector("nvlink", (GPU_NVLINK_RX, GPU_NVLINK_TX), collect_nvlink, witness=True)
