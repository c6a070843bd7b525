"""Faulty memory that the driver no longer uses: rows on Ampere and newer, pages on older GPUs."""

from __future__ import annotations

from gpu_exporter.agent.collectors.contract import Collector, Cycle
from gpu_exporter.agent.collectors.plausible import COUNT, SWITCH
from gpu_exporter.common.model.metrics import Family

AMPERE = "Ampere and newer, while no MIG instance exists"
_SOURCE = "nvmlDeviceGetRemappedRows"
GPU_REMAPPED_ROWS = Family(
    "gpu_remapped_rows",
    "Remapped memory rows, by cause (corrected or uncorrected errors)",
    ("cause",),
    source=_SOURCE,
    generations=AMPERE,
    plausible=COUNT,
)
GPU_REMAPPED_ROWS_PENDING = Family(
    "gpu_remapped_rows_pending",
    "1 if a row remap waits for a reset of the GPU, 0 otherwise",
    source=_SOURCE,
    generations=AMPERE,
    plausible=SWITCH,
)
GPU_REMAPPED_ROWS_FAILED = Family(
    "gpu_remapped_rows_failed",
    "1 if a row remap failed and the board must be replaced, 0 otherwise",
    source=_SOURCE,
    generations=AMPERE,
    plausible=SWITCH,
)
GPU_RETIRED_PAGES = Family(
    "gpu_retired_pages",
    "Memory pages taken out of service, by cause (single_bit, double_bit)",
    ("cause",),
    source="nvmlDeviceGetFieldValues 29, 30",
    generations="before Ampere",
    plausible=COUNT,
)


def collect_remap(cycle: Cycle) -> None:
    rows = cycle.read(cycle.device.read_row_remaps)
    if rows is not None:
        cycle.add(GPU_REMAPPED_ROWS, rows.corrected, "corrected")
        cycle.add(GPU_REMAPPED_ROWS, rows.uncorrected, "uncorrected")
        cycle.add(GPU_REMAPPED_ROWS_PENDING, rows.pending)
        cycle.add(GPU_REMAPPED_ROWS_FAILED, rows.failed)
    for cause, count in (cycle.read(cycle.device.read_retired_pages) or {}).items():
        cycle.add(GPU_RETIRED_PAGES, count, cause)


REMAP = Collector(
    "remap",
    (GPU_REMAPPED_ROWS, GPU_REMAPPED_ROWS_PENDING, GPU_REMAPPED_ROWS_FAILED, GPU_RETIRED_PAGES),
    collect_remap,
    every_s=10.0,  # as the recovery action, whose severity depends on a pending remap
)
