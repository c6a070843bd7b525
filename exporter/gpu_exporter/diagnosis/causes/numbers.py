"""Thresholds of the rules for causes. They come from measurements and publications, so few of them are settings."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import NamedTuple

from gpu_exporter.common import report_rules
from gpu_exporter.common.config.defaults import Settings


class CauseRules(NamedTuple):
    """Thresholds of the rules. Ratios are 0 to 1. The first ones are settings of a site. `off`: the disabled causes."""

    off: AbstractSet[str] = frozenset()
    steps: str = Settings().causes.steps
    start_max: float = Settings().causes.start_max
    window: float = 300.0
    """Seconds. Causes are judged over the looks (readings of the holder's host) of this period."""
    looks_min: int = 4
    """The smallest number of looks. The exporter takes one look every 15 s, or fewer on a crowded node."""
    throttled_min: float = 0.1
    """The holder lacks CPUs if its CPU quota runs out in this share of the periods."""
    throttled_high: float = 0.25
    """The confidence is high if the CPU quota runs out in this share of the periods."""
    runnable_min: int = 2
    """The holder has too many threads if at least this many threads are runnable for each CPU."""
    runnable_high: int = 4
    """The confidence is high if at least this many threads are runnable for each CPU."""
    full_ratio: float = 0.85
    """A CPU is full if at least this share is in use. A full loader does not reach 1, because it also waits for its
    disk and its queue.
    """
    free_cpus: int = 2
    """This many CPUs must be free before the advice proposes more workers."""
    pressure_cpu_min: float = 0.4
    """Tasks lack CPUs if some task waits for a CPU in this share of the time (PSI)."""
    pressure_memory_min: float = 0.1
    """Tasks lack memory if some task waits for memory in this share of the time (PSI)."""
    memory_full_high: float = 0.05
    """The confidence is high if all tasks wait for memory in this share of the time. datapath-doctor warns from 5 %."""
    memory_near: float = 0.9
    """The holder is near its memory limit if it uses this share of the limit."""
    refaults_min: int = 20
    """Without PSI, the holder lacks memory if this many pages per second are evicted and read again near the limit."""
    shm_ratio: float = 0.9
    """The shared memory is full if this share of /dev/shm is in use."""
    link_ratio: float = 0.75
    """The PCIe link of a working GPU is degraded below this share of its bandwidth: half the lanes, a generation less.
    """
    burst_bytes: int = 20000000
    """A look with at least this many bytes per second, written and sent together, is part of a checkpoint."""
    bursts_min: int = 3
    """Number of checkpoints that must be seen in ten minutes, because a single burst may be a coincidence."""
    reads_min: int = 500
    """The holder makes many reads if it makes at least this many per second. datapath-doctor warns from 500."""
    read_small: int = 65536
    """Reads are small if they have at most this many bytes on average."""
    read_tiny: int = 16384
    """The confidence is high if reads have at most this many bytes on average."""
    wait_min: float = report_rules.WAIT_MIN
    """A wait for data is a cause if it takes at least this share of the loop's time. TraceML and datapath-doctor warn
    from this share.
    """
    wait_high: float = 0.2
    """The confidence is high if the wait takes at least this share of the loop's time."""
    phase_min: float = report_rules.PHASE_MIN["checkpoint"]
    """Checkpoints, or metrics and logs, are a cause if they take at least this share of the loop's time."""
    memory_low: float = 0.45
    """A larger batch fits if at most this share of the GPU's memory is in use."""


def cause_rules(settings: Settings) -> CauseRules:
    off = frozenset(settings.diagnosis.without.replace(" ", "").split(","))
    return CauseRules(off, settings.causes.steps, settings.causes.start_max)
