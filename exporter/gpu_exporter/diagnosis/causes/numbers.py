"""Thresholds of the rules for causes. They come from measurements and publications, so few of them are settings."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import NamedTuple

from gpu_exporter.common import report_rules
from gpu_exporter.common.config.defaults import Settings


class CauseRules(NamedTuple):
    """Thresholds. Ratios are 0 to 1. The first ones are settings of a site. `off`: causes that are not looked for."""

    off: AbstractSet[str] = frozenset()
    steps: str = Settings().causes.steps
    start_max: float = Settings().causes.start_max
    window: float = 300.0
    """seconds; causes are judged over the looks at the holder's host in this time ..."""
    looks_min: int = 4
    """... of which there must be this many; there is one every 15 s, or fewer on a crowded node"""
    throttled_min: float = 0.1
    """share of the periods in which the CPU quota ran out ..."""
    throttled_high: float = 0.25
    """... and from this share on the confidence is high"""
    runnable_min: int = 2
    """runnable threads for each CPU that are too many ..."""
    runnable_high: int = 4
    """... and from this number on the confidence is high"""
    full_ratio: float = 0.85
    """a CPU is full from this use on: a loader also waits for its disk and its queue"""
    free_cpus: int = 2
    """CPUs that must be free before more workers are advised"""
    pressure_cpu_min: float = 0.4
    """share of the time in which a task waited for a CPU (PSI)"""
    pressure_memory_min: float = 0.1
    """... and for memory"""
    memory_full_high: float = 0.05
    """share of the time in which all tasks waited for memory; datapath-doctor warns from 5 %"""
    memory_near: float = 0.9
    """memory in use, as a share of the limit, where there is no PSI ..."""
    refaults_min: int = 20
    """... and then pages a second that were evicted and read again"""
    shm_ratio: float = 0.9
    """share of /dev/shm in use"""
    link_ratio: float = 0.75
    """share of the bandwidth of the PCIe link while the GPU works: half the lanes, or a generation less"""
    burst_bytes: int = 20000000
    """bytes per second, written or sent in one look, that are a checkpoint"""
    bursts_min: int = 3
    """... of which there must be this many in ten minutes: a single one may be a coincidence"""
    reads_min: int = 500
    """reads a second; datapath-doctor warns from 500 ..."""
    read_small: int = 65536
    """... of at most this many bytes on average ..."""
    read_tiny: int = 16384
    """... and from this size on the confidence is high"""
    wait_min: float = report_rules.WAIT_MIN
    """share of its steps that a training loop waits for data; TraceML and datapath-doctor warn from here ..."""
    wait_high: float = 0.2
    """... and from this share on the confidence is high"""
    phase_min: float = report_rules.PHASE_MIN["checkpoint"]
    """share of its steps in checkpoints, or in metrics and logs"""
    memory_low: float = 0.45
    """share of the GPU's memory in use, below which a larger batch fits"""


def cause_rules(settings: Settings) -> CauseRules:
    """The thresholds with the settings of a site."""
    off = frozenset(settings.diagnosis.without.replace(" ", "").split(","))
    return CauseRules(off, settings.causes.steps, settings.causes.start_max)
