"""Reads PCIe traffic from the driver's counters. nvmlDeviceGetPcieThroughput is not used: it blocks for 20 ms."""

from __future__ import annotations

from gpu_exporter.agent.collectors.contract import Collector, Cycle
from gpu_exporter.agent.collectors.plausible import COUNT, MOVED_BYTES
from gpu_exporter.common.model.metrics import Family

GPU_PCIE_RX = Family(
    "gpu_pcie_rx_bytes_total",
    "Bytes that the GPU received over PCIe. The counter may wrap",
    source="nvmlDeviceGetFieldValues 198",
    plausible=MOVED_BYTES,
)
GPU_PCIE_TX = Family(
    "gpu_pcie_tx_bytes_total",
    "Bytes that the GPU sent over PCIe. The counter may wrap",
    source="nvmlDeviceGetFieldValues 197",
    plausible=MOVED_BYTES,
)
GPU_PCIE_REPLAYS = Family(
    "gpu_pcie_replays_total",
    "PCIe packets that were sent again. A steady rate means a bad link",
    source="nvmlDeviceGetFieldValues 94",
    plausible=COUNT,
)


def collect_pcie(cycle: Cycle) -> None:
    pcie = cycle.read(cycle.device.read_pcie)
    if pcie is None:
        return
    cycle.pcie = cycle.admit_traffic(GPU_PCIE_RX, GPU_PCIE_TX, pcie.traffic)
    cycle.pcie_at = cycle.now()
    cycle.add(GPU_PCIE_REPLAYS, pcie.replays)


PCIE = Collector("pcie", (GPU_PCIE_RX, GPU_PCIE_TX, GPU_PCIE_REPLAYS), collect_pcie, witness=True)
