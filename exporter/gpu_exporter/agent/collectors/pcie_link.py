"""Bandwidth of the PCIe link. A link below its maximum slows every copy, and the user of the GPU cannot change that.

An idle GPU lowers the generation of its link to save power. A lower bandwidth is a fault only while the GPU works.
"""

from __future__ import annotations

from gpu_exporter.agent.collectors.contract import SLOW_INTERVAL_S, Collector, Cycle
from gpu_exporter.agent.collectors.plausible import BYTES_PER_SECOND
from gpu_exporter.common.model.metrics import Family

# Bytes per second of one lane in one direction, by generation: transfers per second after the encoding (PCI-SIG).
LANE = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9, 7: 15.125e9}
GPU_PCIE_LINK = Family(
    "gpu_pcie_link_bytes_per_second",
    "Bandwidth of the PCIe link in one direction, from its present generation and lanes. A GPU at rest lowers the "
    "generation",
    source="nvmlDeviceGetCurrPcieLinkGeneration, nvmlDeviceGetCurrPcieLinkWidth",
    plausible=BYTES_PER_SECOND,
)
GPU_PCIE_LINK_MAX = Family(
    "gpu_pcie_link_max_bytes_per_second",
    "Highest bandwidth of the PCIe link in one direction with this GPU in this slot",
    source="nvmlDeviceGetMaxPcieLinkGeneration, nvmlDeviceGetMaxPcieLinkWidth",
    plausible=BYTES_PER_SECOND,
)


def collect_pcie_link(cycle: Cycle) -> None:
    link = cycle.read(cycle.device.read_pcie_link)
    if link is None:
        return
    cycle.add(GPU_PCIE_LINK, _bandwidth(link.generation, link.width))
    cycle.add(GPU_PCIE_LINK_MAX, _bandwidth(link.generation_max, link.width_max))


def _bandwidth(generation: int | None, width: int | None) -> float | None:
    """Returns the bandwidth in bytes per second. None if unknown: 0 lanes, or a generation that LANE lacks."""
    lane = LANE.get(generation) if generation is not None else None
    return lane * width if lane is not None and width else None


PCIE_LINK = Collector("pcie-link", (GPU_PCIE_LINK, GPU_PCIE_LINK_MAX), collect_pcie_link, every_s=SLOW_INTERVAL_S)
