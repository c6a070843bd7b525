"""Activity of the video encoder, video decoder, JPEG and optical-flow engines. All of them are witnesses.

A reading covers only the driver's last sample period. With a ring of samples in the driver, no activity between two
cycles is missed.
"""

from __future__ import annotations

import functools

from gpu_exporter.agent.collectors.contract import Collector, Cycle
from gpu_exporter.agent.collectors.plausible import RATIO
from gpu_exporter.agent.collectors.utilization import note_nonsense
from gpu_exporter.agent.devices.protocol import ENGINES
from gpu_exporter.common.model.metrics import Family

GPU_ENCODER = Family(
    "gpu_encoder_utilization_ratio",
    "Share of time in which the video encoder was busy",
    source="nvmlDeviceGetEncoderUtilization",
    plausible=RATIO,
)
GPU_DECODER = Family(
    "gpu_decoder_utilization_ratio",
    "Share of time in which the video decoder was busy",
    source="nvmlDeviceGetDecoderUtilization",
    plausible=RATIO,
)
# JPEG and optical flow have no series: they are read only as witnesses.
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
        since = cycle.samples_since.get(engine, 0.0)
        samples = cycle.read(functools.partial(cycle.device.read_engine_samples, engine, since))
        if samples is not None:
            cycle.engine_samples[engine] = note_nonsense(cycle, samples)
        if engine in PUBLISHED:
            cycle.put(family, ratio)


VIDEO = Collector("video", (GPU_ENCODER, GPU_DECODER), collect_video, witness=True)
