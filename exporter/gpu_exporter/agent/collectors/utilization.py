"""Utilization of the GPU: the driver's present value, and its ring buffer of samples."""

from __future__ import annotations

from collections.abc import Sequence

from gpu_exporter.agent.collectors.contract import Collector, Cycle
from gpu_exporter.agent.collectors.plausible import RATIO
from gpu_exporter.agent.devices.errors import OUT_OF_RANGE
from gpu_exporter.agent.devices.protocol import UtilizationSample
from gpu_exporter.common.model.metrics import Family
from gpu_exporter.common.model.readings import UTILIZATION as SUBJECT

GPU_UTILIZATION = Family(
    "gpu_utilization_ratio",
    "Share of the driver's last sample period (1/6 to 1 s) in which a kernel was running. Absent while MIG is on",
    source="nvmlDeviceGetUtilizationRates",
    plausible=RATIO,
)
GPU_MEMORY_BUSY = Family(
    "gpu_memory_busy_ratio",
    "Share of the driver's last sample period in which memory was read or written. Absent while MIG is on",
    source="nvmlDeviceGetUtilizationRates",
    plausible=RATIO,
)


def note_nonsense(cycle: Cycle, samples: Sequence[UtilizationSample]) -> Sequence[UtilizationSample]:
    """Counts the entries of the driver's ring that are not ratios from 0 to 1. Returns all entries.

    Invalid entries are kept, because no other entry covers their time. Their time then becomes unknown.
    """
    nonsense = {ratio for ratio in {sample.ratio for sample in samples} if not RATIO.holds(ratio)}
    if nonsense:
        cycle.remarks += [("nvmlDeviceGetSamples", OUT_OF_RANGE)] * sum(sample.ratio in nonsense for sample in samples)
    return samples


def collect_utilization(cycle: Cycle) -> None:
    device = cycle.device
    since = cycle.samples_since.get(SUBJECT, 0.0)
    cycle.driver_samples = note_nonsense(cycle, cycle.read(lambda: device.read_utilization_samples(since)) or ())
    rates = cycle.read(device.read_utilization)
    cycle.utilization_at = cycle.now()
    if rates is not None:
        # 255 percent was seen with zombie processes. It is not a measurement, but it contradicts a ring of zeros.
        cycle.utilization = cycle.add(GPU_UTILIZATION, rates.gpu, witness=True)
        if cycle.utilization is not None:
            cycle.add(GPU_MEMORY_BUSY, rates.memory)


UTILIZATION = Collector("utilization", (GPU_UTILIZATION, GPU_MEMORY_BUSY), collect_utilization, witness=True)
