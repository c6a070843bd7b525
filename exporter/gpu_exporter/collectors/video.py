"""The fixed-function engines: video encoder and decoder, JPEG, optical flow. All are witnesses of idleness."""

from __future__ import annotations

import functools

from gpu_exporter.collectors.contract import Collector, Cycle
from gpu_exporter.collectors.plausible import RATIO
from gpu_exporter.devices.protocol import ENGINES
from gpu_exporter.model import Family

GPU_ENCODER = Family(
    "gpu_encoder_utilization_ratio",
    "gauge",
    "Share of time the video encoder was busy",
    source="nvmlDeviceGetEncoderUtilization",
    plausible=RATIO,
)
GPU_DECODER = Family(
    "gpu_decoder_utilization_ratio",
    "gauge",
    "Share of time the video decoder was busy",
    source="nvmlDeviceGetDecoderUtilization",
    plausible=RATIO,
)
# JPEG and optical flow have no series: they are read for what they say about idleness.
FAMILIES = {
    "encoder": GPU_ENCODER,
    "decoder": GPU_DECODER,
    "jpeg": GPU_ENCODER._replace(source="nvmlDeviceGetJpgUtilization"),
    "ofa": GPU_ENCODER._replace(source="nvmlDeviceGetOfaUtilization"),
}
PUBLISHED = ("encoder", "decoder")


def collect_video(cycle: Cycle) -> None:
    for engine in ENGINES:
        family = FAMILIES[engine]
        ratio = cycle.admit(family, cycle.read(functools.partial(cycle.device.read_engine, engine)), witness=True)
        if ratio is None:
            continue
        cycle.engines[engine] = ratio
        if engine in PUBLISHED:
            cycle.add(family, ratio)


VIDEO = Collector("video", (GPU_ENCODER, GPU_DECODER), collect_video, witness=True)
