"""ECC errors: memory errors that the hardware corrected or could not correct."""

from __future__ import annotations

from gpu_exporter.agent.collectors.contract import Collector, Cycle
from gpu_exporter.agent.collectors.plausible import COUNT
from gpu_exporter.common.model.metrics import Family

GPU_ECC_ERRORS = Family(
    "gpu_ecc_errors_total",
    "Memory errors since the driver was loaded, by severity (corrected, uncorrected). Absent while ECC is off",
    ("severity",),
    source="nvmlDeviceGetTotalEccErrors",
    plausible=COUNT,
)


def collect_ecc(cycle: Cycle) -> None:
    for severity, count in (cycle.read(cycle.device.read_ecc_errors) or {}).items():
        cycle.add(GPU_ECC_ERRORS, count, severity)


ECC = Collector("ecc", (GPU_ECC_ERRORS,), collect_ecc, every_s=30.0)
