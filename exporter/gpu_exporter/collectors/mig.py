"""MIG instances, enumerated afresh each cycle, since a handle may be reused for another instance."""

from __future__ import annotations

from gpu_exporter.collectors.contract import Collector, Cycle, InstanceCycle
from gpu_exporter.model import Family, Sample

GPU_MIG_INFO = Family(
    "gpu_mig_info",
    "gauge",
    "Identity of a MIG instance, always 1",
    ("profile", "sm_slices"),
    source="nvmlDeviceGetAttributes_v2",
)
GPU_MIG_MEMORY_USED = Family(
    "gpu_mig_memory_used_bytes", "gauge", "Memory used in the instance", source="nvmlDeviceGetMemoryInfo_v2"
)
GPU_MIG_MEMORY_TOTAL = Family(
    "gpu_mig_memory_total_bytes", "gauge", "Memory of the instance", source="nvmlDeviceGetMemoryInfo_v2"
)
GPU_MIG_GRAPHICS_ACTIVE = Family(
    "gpu_mig_graphics_active_ratio",
    "gauge",
    "Share of time the instance's engines were active; absent where the hardware has no source",
    source="nvmlGpmMetricsGet 1",
)
GPU_MIG_ACTIVITY_SUPPORTED = Family(
    "gpu_mig_activity_supported", "gauge", "1 when the activity of this instance can be told, 0 when not"
)


def collect_mig(cycle: Cycle) -> None:
    errors = len(cycle.errors)
    listed = cycle.read(cycle.device.list_instances) or ()
    cycle.instances_known = len(cycle.errors) == errors
    for instance in listed:
        identity = instance.identity
        activity = cycle.read(instance.read_graphics_active)
        memory = cycle.read(instance.read_memory)
        samples = [
            Sample(GPU_MIG_INFO, (identity.profile, str(identity.sm_slices)), 1.0),
            Sample(GPU_MIG_ACTIVITY_SUPPORTED, (), float(activity is not None)),
        ]
        if memory is not None:
            samples.append(Sample(GPU_MIG_MEMORY_USED, (), float(memory.used)))
            samples.append(Sample(GPU_MIG_MEMORY_TOTAL, (), float(memory.total)))
        if activity is not None:
            samples.append(Sample(GPU_MIG_GRAPHICS_ACTIVE, (), activity))
        cycle.instances.append(
            InstanceCycle(identity.uuid, identity.mig, identity.profile, identity.sm_slices, tuple(samples), activity)
        )


MIG = Collector(
    "mig",
    (),
    collect_mig,
    (
        GPU_MIG_INFO,
        GPU_MIG_ACTIVITY_SUPPORTED,
        GPU_MIG_MEMORY_USED,
        GPU_MIG_MEMORY_TOTAL,
        GPU_MIG_GRAPHICS_ACTIVE,
    ),
)
