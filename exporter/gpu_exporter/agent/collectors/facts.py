"""Takes the values that other packages need (ledger, diagnosis, terminal) from the samples of one reading.

Only this module reads samples for that purpose.
"""

from __future__ import annotations

from collections.abc import Iterable

from gpu_exporter.agent.collectors.fabric import (
    GPU_FABRIC_STATUS,
    GPU_FABRIC_WAIT,
    GPU_NVLINKS_ACTIVE,
    GPU_NVLINKS_GONE,
)
from gpu_exporter.agent.collectors.memory import GPU_MEMORY_TOTAL, GPU_MEMORY_USED
from gpu_exporter.agent.collectors.mig import GPU_MIG_MEMORY_TOTAL, GPU_MIG_MEMORY_USED, GPU_MIG_POWER, RATIOS
from gpu_exporter.agent.collectors.pcie_link import GPU_PCIE_LINK, GPU_PCIE_LINK_MAX
from gpu_exporter.agent.collectors.power import GPU_ENERGY, GPU_POWER, GPU_POWER_LIMIT
from gpu_exporter.agent.collectors.processes import GPU_COMPUTE_PROCESSES, GPU_GRAPHICS_PROCESSES
from gpu_exporter.agent.collectors.recovery import GPU_RECOVERY_ACTION
from gpu_exporter.agent.collectors.remap import GPU_REMAPPED_ROWS_FAILED, GPU_REMAPPED_ROWS_PENDING
from gpu_exporter.agent.collectors.thermal import GPU_TEMPERATURE
from gpu_exporter.agent.collectors.throttle import GPU_THROTTLE_SECONDS
from gpu_exporter.agent.collectors.utilization import GPU_UTILIZATION
from gpu_exporter.common.model.metrics import Sample
from gpu_exporter.common.model.readings import Facts

_FIELDS = {
    GPU_UTILIZATION.name: "utilization",
    RATIOS["graphics"].name: "utilization",  # for an instance, which has no other utilization
    GPU_MEMORY_USED.name: "memory_used_bytes",
    GPU_MIG_MEMORY_USED.name: "memory_used_bytes",
    GPU_MEMORY_TOTAL.name: "memory_total_bytes",
    GPU_MIG_MEMORY_TOTAL.name: "memory_total_bytes",
    GPU_POWER.name: "power_w",
    GPU_MIG_POWER.name: "power_w",
    GPU_POWER_LIMIT.name: "power_limit_w",
    GPU_ENERGY.name: "energy_j",
    GPU_TEMPERATURE.name: "temperature_celsius",
    GPU_COMPUTE_PROCESSES.name: "compute_processes",
    GPU_GRAPHICS_PROCESSES.name: "graphics_processes",
    GPU_RECOVERY_ACTION.name: "recovery_action",
    GPU_REMAPPED_ROWS_PENDING.name: "remap_pending",
    GPU_REMAPPED_ROWS_FAILED.name: "remap_failed",
    GPU_NVLINKS_ACTIVE.name: "nvlinks",
    GPU_NVLINKS_GONE.name: "nvlinks_gone_s",
    GPU_FABRIC_STATUS.name: "fabric",
    GPU_FABRIC_WAIT.name: "fabric_wait_s",
    GPU_PCIE_LINK.name: "link",
    GPU_PCIE_LINK_MAX.name: "link_max",
}


def take_facts(samples: Iterable[Sample]) -> Facts:
    """Returns the values that other packages need, from the samples of one GPU or of one MIG instance."""
    found: dict[str, float] = {}
    throttle_s: dict[str, float] = {}
    problem = ""
    for family, labels, value in samples:
        field = _FIELDS.get(family.name)
        if field is not None:
            found[field] = value
            if family.name == GPU_FABRIC_STATUS.name:
                problem = labels[0]
        elif family.name == GPU_THROTTLE_SECONDS.name:
            throttle_s[labels[0]] = value
    return Facts(**found, throttle_s=throttle_s, fabric_problem=problem)
