"""Traffic between GPUs over NVLink, all links of the board together."""

from __future__ import annotations

from gpu_exporter.collectors.contract import Collector, Cycle
from gpu_exporter.model import Family

_SOURCE = "nvmlDeviceGetFieldValues 138 and 139, on Blackwell 202 and 204"
GPU_NVLINK_RX = Family("gpu_nvlink_rx_bytes_total", "counter", "Bytes to the GPU over NVLink", source=_SOURCE)
GPU_NVLINK_TX = Family("gpu_nvlink_tx_bytes_total", "counter", "Bytes from the GPU over NVLink", source=_SOURCE)


def collect_nvlink(cycle: Cycle) -> None:
    cycle.nvlink = cycle.read(cycle.device.read_nvlink)
    cycle.nvlink_at = cycle.now()
    if cycle.nvlink is not None:
        cycle.add(GPU_NVLINK_RX, cycle.nvlink.rx)
        cycle.add(GPU_NVLINK_TX, cycle.nvlink.tx)


NVLINK = Collector("nvlink", (GPU_NVLINK_RX, GPU_NVLINK_TX), collect_nvlink, witness=True)
