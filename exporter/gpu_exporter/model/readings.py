"""One cycle's reading of a GPU, and what it says of activity."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from gpu_exporter.model.holders import HolderKey
from gpu_exporter.model.metrics import Sample
from gpu_exporter.model.units import DeviceIdentity, UnitId

XID_CLASSES = ("application", "hardware", "information")
UTILIZATION = "utilization"  # as the name of a witness: the driver's rate, where its sample ring says nothing


class Span(NamedTuple):
    """Known activity over (start, end] of the monotonic clock.

    `ratio`: mean utilization, 0 to 1. `other`: the witnesses that saw activity, so that a ratio of 0 is not idleness.
    `witnesses`: how many the reading that it came with rests on; the ledger fills it in.
    """

    start: float
    end: float
    ratio: float
    other: tuple[str, ...] = ()
    witnesses: int = 0


class Split(NamedTuple):
    """What the processes on one shared unit did over (start, end] of the monotonic clock, by holder: shares, 0 to 1.

    A holder that is missing in `ratios` has no process that did anything. `unclear`: holders with a process that the
    driver lists and of which it says nothing at all. `others`: what processes did that belong to
    no holder of the unit, or to nobody known; None without such processes. `slack`: how far the sum may stay below the
    unit's utilization, since every number is rounded. `problem`: why all of this is not known, "" when it is.
    """

    start: float
    end: float
    ratios: Mapping[HolderKey, float]
    others: float | None = None
    slack: float = 0.0
    problem: str = ""
    unclear: frozenset[HolderKey] = frozenset()


class Activity(NamedTuple):
    """What one reading adds to the knowledge of one unit. Time not covered by a span is unknown.

    `witnesses` is 0 when utilization was not reported this time, but another sign of life was.
    """

    unit: UnitId
    spans: tuple[Span, ...]
    witnesses: int


class Facts(NamedTuple):
    """What one reading says beside its samples, for those who compute with it; None is no data.

    Ratios 0 to 1, bytes, watts, joules since the driver was loaded. `throttle_s`: seconds by reason, counters of the
    driver. `compute_processes`: contexts that were listed, which is none where they cannot be seen. `recovery_action`:
    what the driver asks for, as gpu_recovery_action counts it.
    """

    utilization: float | None = None
    memory_used_bytes: float | None = None
    memory_total_bytes: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    energy_j: float | None = None
    temperature_celsius: float | None = None
    compute_processes: float | None = None
    recovery_action: float | None = None
    throttle_s: Mapping[str, float] = {}


class InstanceReading(NamedTuple):
    """One MIG instance at one moment. `mig` is "gpu instance id/compute instance id".

    `sm_slices`: compute slices of the board that are its own; a fraction where compute instances that report none share
    a GPU instance. `energy_j` is the running estimate of its part of the board's energy. `placement`: profile id and
    first slice of its GPU instance, None where the driver does not say.
    """

    uuid: str
    mig: str
    profile: str
    sm_slices: float
    samples: tuple[Sample, ...]
    activity: Activity | None
    energy_j: float | None = None
    facts: Facts = Facts()
    placement: tuple[int, int] | None = None


class GpuProcess(NamedTuple):
    """A process with a context on a GPU. `mig` is "gpu instance id/compute instance id", "" on a whole GPU.

    `memory_bytes`: what it uses there, None where the driver does not say.

    The pid serves to find the process's cgroup on this host, and nothing else: it is never published, logged or
    recorded.
    """

    pid: int
    mig: str = ""
    memory_bytes: int | None = None

    def __repr__(self) -> str:
        return "GpuProcess(...)"  # what prints a snapshot must not print a pid


class ProcessList(NamedTuple):
    """The processes on one GPU. `monotonic`: when the driver had answered, so every one of them had started by then."""

    monotonic: float
    processes: tuple[GpuProcess, ...]


class ProcessShare(NamedTuple):
    """One process and the share of a period that its kernels ran, 0 to 1. `monotonic`: when it was last seen at work.

    `ratio` is None where the driver lists the process with nothing but zeros: it names those that work alone.

    The pid serves as that of GpuProcess.
    """

    pid: int
    ratio: float | None
    monotonic: float

    def __repr__(self) -> str:
        return "ProcessShare(...)"


class ProcessPeriod(NamedTuple):
    """What each process did on one whole GPU over (start, end] of the monotonic clock, as the driver reports it.

    `problem`: why the driver reports nothing, "" when it does.
    """

    start: float
    end: float
    shares: tuple[ProcessShare, ...] = ()
    problem: str = ""


class CollectorOutcome(NamedTuple):
    """How one collector fared in one cycle. `error` is "" on success and on no data."""

    name: str
    success: bool
    duration_s: float
    error: str = ""


class DeviceSnapshot(NamedTuple):
    """Everything one cycle learned about one GPU. Immutable; replaced as a whole."""

    identity: DeviceIdentity
    monotonic: float
    wall: float
    up: bool
    samples: tuple[Sample, ...] = ()
    activity: Activity | None = None
    instances: tuple[InstanceReading, ...] = ()
    outcomes: tuple[CollectorOutcome, ...] = ()
    error: str = ""
    instances_known: bool = True  # false when they could not be listed: then the empty list says nothing
    processes: ProcessList | None = None  # None while they cannot be listed
    away: bool = False  # taken away on purpose (driver released, given to a virtual machine): not lost, just unknown
    facts: Facts = Facts()
    period: ProcessPeriod | None = None  # None where nobody needs it
    contradiction: str = ""  # why the utilization is no evidence of anything, "" when it is


class XidCounts(NamedTuple):
    """The XIDs of one GPU since the exporter started: code, class, number, and time of the last."""

    codes: tuple[tuple[int, str, int, float], ...] = ()
