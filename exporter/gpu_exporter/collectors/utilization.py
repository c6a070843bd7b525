"""How busy the GPU is: the driver's utilization, its sample ring, and the video engines as further witnesses."""

from __future__ import annotations

from gpu_exporter.collectors.contract import Collector, Cycle
from gpu_exporter.model import Family

GPU_UTILIZATION = Family(
    "gpu_utilization_ratio",
    "gauge",
    "Share of the driver's last sample period (1/6 to 1 s) with a kernel running",
    source="nvmlDeviceGetUtilizationRates",
)
GPU_ENCODER = Family(
    "gpu_encoder_utilization_ratio",
    "gauge",
    "Share of time the video encoder was busy",
    source="nvmlDeviceGetEncoderUtilization",
)
GPU_DECODER = Family(
    "gpu_decoder_utilization_ratio",
    "gauge",
    "Share of time the video decoder was busy",
    source="nvmlDeviceGetDecoderUtilization",
)


def collect_utilization(cycle: Cycle) -> None:
    device = cycle.device
    cycle.driver_samples = cycle.read(lambda: device.read_utilization_samples(cycle.samples_since_wall)) or ()
    cycle.utilization = cycle.read(device.read_utilization)
    cycle.encoder = cycle.read(device.read_encoder_utilization)
    cycle.decoder = cycle.read(device.read_decoder_utilization)
    cycle.add(GPU_UTILIZATION, cycle.utilization)
    cycle.add(GPU_ENCODER, cycle.encoder)
    cycle.add(GPU_DECODER, cycle.decoder)


UTILIZATION = Collector("utilization", (GPU_UTILIZATION, GPU_ENCODER, GPU_DECODER), collect_utilization)
