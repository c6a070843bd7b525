"""Every collector, in the order in which they run. MIG is last, because it divides values that others have read.

Each collector can be switched off by name, and has its own success and duration.
"""

from __future__ import annotations

from gpu_exporter.agent.collectors.clocks import CLOCKS
from gpu_exporter.agent.collectors.contract import Collector
from gpu_exporter.agent.collectors.ecc import ECC
from gpu_exporter.agent.collectors.gpm import GPM
from gpu_exporter.agent.collectors.memory import MEMORY
from gpu_exporter.agent.collectors.mig import MIG
from gpu_exporter.agent.collectors.nvlink import NVLINK
from gpu_exporter.agent.collectors.pcie import PCIE
from gpu_exporter.agent.collectors.pcie_link import PCIE_LINK
from gpu_exporter.agent.collectors.power import POWER
from gpu_exporter.agent.collectors.processes import PROCESSES
from gpu_exporter.agent.collectors.recovery import RECOVERY
from gpu_exporter.agent.collectors.remap import REMAP
from gpu_exporter.agent.collectors.thermal import THERMAL
from gpu_exporter.agent.collectors.throttle import THROTTLE, THROTTLE_ACTIVE
from gpu_exporter.agent.collectors.utilization import UTILIZATION
from gpu_exporter.agent.collectors.video import VIDEO
from gpu_exporter.agent.collectors.xid import XID

ALL: tuple[Collector, ...] = (
    UTILIZATION,
    VIDEO,
    GPM,
    MEMORY,
    POWER,
    THERMAL,
    CLOCKS,
    THROTTLE,
    THROTTLE_ACTIVE,
    PCIE,
    PCIE_LINK,
    NVLINK,
    ECC,
    REMAP,
    RECOVERY,
    XID,
    PROCESSES,
    MIG,
)
DEFAULT: tuple[Collector, ...] = tuple(collector for collector in ALL if collector.default)
