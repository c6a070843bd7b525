"""One concern a file: what it reads, and the families it publishes, as data.

`ALL` is the explicit list. A collector can be switched off by name and has its own success and duration.
"""

from gpu_exporter.collectors.contract import Collector, Cycle
from gpu_exporter.collectors.memory import MEMORY
from gpu_exporter.collectors.mig import MIG
from gpu_exporter.collectors.power import POWER
from gpu_exporter.collectors.processes import PROCESSES
from gpu_exporter.collectors.thermal import THERMAL
from gpu_exporter.collectors.throttle import THROTTLE
from gpu_exporter.collectors.utilization import UTILIZATION

ALL: tuple[Collector, ...] = (UTILIZATION, MEMORY, POWER, THERMAL, THROTTLE, PROCESSES, MIG)

__all__ = ["ALL", "Collector", "Cycle"]
