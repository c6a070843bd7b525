"""One cycle's reading of a GPU, and the activity that it shows.

A witness is a signal of activity besides utilization, e.g. power or PCIe traffic.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from gpu_exporter.common.model.holders import HolderKey
from gpu_exporter.common.model.metrics import Sample
from gpu_exporter.common.model.units import DeviceIdentity, UnitId

XID_CLASSES = ("application", "hardware", "information")
# Utilization alone misses copies, encoders and a driver whose counter is stuck, so it does not prove idleness.
WITNESSES_MIN = 2
CORE = 0.9  # CPU cores that one thread uses which computes without a pause, as a mean of minutes
UTILIZATION = "utilization"  # name of the witness for the driver's rate, where its sample ring shows no activity


class Span(NamedTuple):
    """Known activity over (start, end] of the monotonic clock.

    `ratio`: mean utilization, 0 to 1. `other`: the witnesses that showed activity; with any of them, a span is not
    idle, even at ratio 0. `witnesses`: the number of witnesses that were read for this span; the ledger fills it in.
    """

    start: float
    end: float
    ratio: float
    other: tuple[str, ...] = ()
    witnesses: int = 0


class Split(NamedTuple):
    """Each holder's share (0 to 1) of the work on a shared unit over (start, end] of the monotonic clock.

    - `ratios`: the share of each holder. A holder that is missing here has no process that worked.
    - `unclear`: holders with a process that the driver lists without any information.
    - `others`: the share of processes without a known holder of this unit; None without such processes.
    - `slack`: by how much rounding may lower the sum below the unit's utilization.
    - `problem`: why the shares are unknown, "" if they are known.
    """

    start: float
    end: float
    ratios: Mapping[HolderKey, float]
    others: float | None = None
    slack: float = 0.0
    problem: str = ""
    unclear: frozenset[HolderKey] = frozenset()


class Activity(NamedTuple):
    """Activity of one unit in one reading. Time outside the spans is unknown.

    `witnesses` is 0 if this reading has no utilization, but shows another sign of activity.
    """

    unit: UnitId
    spans: tuple[Span, ...]
    witnesses: int


class Effort(NamedTuple):
    """The work of a whole GPU over (start, end] of the monotonic clock, in addition to its utilization; None is
    unknown.

    `power_w`: mean power, from the energy counter. `reading_w`: the driver's last power reading. `limit_w`: the power
    limit in force. `default_limit_w`: the manufacturer's limit. `memory_bytes`: memory in use at the end. `pcie`,
    `nvlink`: bytes per second, both directions together. `sm`: share of the SMs with work. `pipes`: share of the
    busiest of the tensor, FP64, FP32 and FP16 pipes, None unless all four are known. `dram`: share of the memory
    bandwidth.
    """

    start: float
    end: float
    power_w: float | None = None
    reading_w: float | None = None
    limit_w: float | None = None
    default_limit_w: float | None = None
    memory_bytes: float | None = None
    pcie: float | None = None
    nvlink: float | None = None
    sm: float | None = None
    pipes: float | None = None
    dram: float | None = None


class HostProgress(NamedTuple):
    """The work of a holder outside its GPUs over (start, end] of the monotonic clock; None is unknown.

    - `loaders_cores`: CPUs used by processes without a context on the holder's GPUs. `cores`: CPUs used by all
      processes.
    - `new_process`: whether a process started.
    - `disk`: bytes per second to and from block devices. `network`: bytes per second of the holder's own network
      namespace, unknown if that is the host's.
    - `steps`: the number of steps that the holder's training loop reports.
    - `spinning`: how many of the holder's GPUs are fully busy.
    - `ended`: how many processes on the GPUs have ended since `start`. `stopped`: how many were stopped (SIGSTOP) both
      at `start` and at `end`, without those on fully busy GPUs.
    """

    start: float
    end: float
    loaders_cores: float | None = None
    new_process: bool | None = None
    disk: float | None = None
    network: float | None = None
    steps: int | None = None
    cores: float | None = None
    spinning: int = 0
    ended: int | None = None
    stopped: int | None = None


class Facts(NamedTuple):
    """Values of one reading that code needs beside the samples; None means no data.

    Ratios are 0 to 1, other units are bytes, watts, and joules since the driver was loaded. `throttle_s`: seconds by
    reason, from counters of the driver. `compute_processes`, `graphics_processes`: the number of listed contexts, also
    0 if the exporter cannot see contexts. `recovery_action`: the action that the driver requests, encoded as in
    gpu_recovery_action. `remap_pending`, `remap_failed`: 1 if a row remap waits for a reset or has failed. `nvlinks`:
    the number of NVLinks that are up. `nvlinks_gone_s`: as gpu_nvlinks_down_seconds. `fabric`, `fabric_problem`,
    `fabric_wait_s`: as gpu_fabric_status and gpu_fabric_not_ready_seconds. `link`, `link_max`: bandwidth of the PCIe
    link in one direction, now and at most, bytes per second.
    """

    utilization: float | None = None
    memory_used_bytes: float | None = None
    memory_total_bytes: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    energy_j: float | None = None
    temperature_celsius: float | None = None
    compute_processes: float | None = None
    graphics_processes: float | None = None
    recovery_action: float | None = None
    remap_pending: float | None = None
    remap_failed: float | None = None
    nvlinks: float | None = None
    nvlinks_gone_s: float | None = None
    fabric: float | None = None
    fabric_wait_s: float | None = None
    fabric_problem: str = ""
    link: float | None = None
    link_max: float | None = None
    throttle_s: Mapping[str, float] = {}

    @property
    def contexts(self) -> float | None:
        """The number of compute and graphics contexts, None unless both are known. A process may have one of each."""
        if self.compute_processes is None or self.graphics_processes is None:
            return None
        return self.compute_processes + self.graphics_processes


class InstanceReading(NamedTuple):
    """One MIG instance at one moment. `mig` is "gpu instance id/compute instance id".

    `sm_slices`: the instance's compute slices of the board; a fraction where compute instances without reported slices
    share a GPU instance. `energy_j`: the estimated part of the board's energy that the instance has used so far.
    `placement`: profile id and first slice of its GPU instance, None if the driver does not report them.
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

    `memory_bytes`: the memory that the process uses on the GPU, None if the driver does not report it.

    The pid is used only to find the process's cgroup on this host: it is never published, logged or recorded.
    """

    pid: int
    mig: str = ""
    memory_bytes: int | None = None

    def __repr__(self) -> str:
        return "GpuProcess(...)"  # printing a snapshot must not print a pid


class ProcessList(NamedTuple):
    """The processes on one GPU. `monotonic`: when the driver answered, which is after the start of each process."""

    monotonic: float
    processes: tuple[GpuProcess, ...]


class ProcessShare(NamedTuple):
    """One process, and the share of a period in which its kernels ran, 0 to 1. `monotonic`: when it last worked.

    `ratio`: None if the driver lists the process with zeros only. Normally the driver lists only processes that work.

    The pid is used only to find the process's cgroup on this host: it is never published, logged or recorded.
    """

    pid: int
    ratio: float | None
    monotonic: float

    def __repr__(self) -> str:
        return "ProcessShare(...)"


class ProcessPeriod(NamedTuple):
    """The work of each process on one whole GPU over (start, end] of the monotonic clock, as the driver reports it.

    `problem`: why the driver reports nothing, "" if it reports.
    """

    start: float
    end: float
    shares: tuple[ProcessShare, ...] = ()
    problem: str = ""


class CollectorOutcome(NamedTuple):
    """The result of one collector in one cycle. `error` is "" on success and if there is no data."""

    name: str
    success: bool
    duration_s: float
    error: str = ""


class DeviceSnapshot(NamedTuple):
    """All results of one cycle for one GPU. Immutable; always replaced as a whole."""

    identity: DeviceIdentity
    monotonic: float
    wall: float
    up: bool
    samples: tuple[Sample, ...] = ()
    activity: Activity | None = None
    instances: tuple[InstanceReading, ...] = ()
    outcomes: tuple[CollectorOutcome, ...] = ()
    error: str = ""
    instances_known: bool = True  # false if they could not be listed: an empty list of instances then proves nothing
    processes: ProcessList | None = None  # None while they cannot be listed
    away: bool = False  # taken away on purpose (driver released, given to a virtual machine): unknown, but not lost
    facts: Facts = Facts()
    period: ProcessPeriod | None = None  # None if no part of the exporter needs it
    effort: Effort | None = None  # None at the first reading
    contradiction: str = ""  # why the utilization is no evidence, "" if it is evidence
    note: str = ""  # why another value of the driver is not used, "" if all are
    not_ready: str = ""  # a call that the driver answers with NVML_ERROR_NOT_READY, "" without such a call

    def rename(self, identity: DeviceIdentity) -> DeviceSnapshot:
        """Returns the same reading of a GPU whose UUID is not unique, under another UUID."""
        renamed = (each._replace(activity=_rename(each.activity, identity.uuid)) for each in self.instances)
        activity = _rename(self.activity, identity.uuid)
        return self._replace(identity=identity, activity=activity, instances=tuple(renamed))


def _rename(activity: Activity | None, uuid: str) -> Activity | None:
    return None if activity is None else activity._replace(unit=activity.unit._replace(uuid=uuid))


class SxidCount(NamedTuple):
    """How often one NVSwitch reported an error since the exporter started.

    `severity`: "fatal", "nonfatal" or "unknown". `last_wall`: Unix time of the last report.
    """

    pci_bus_id: str
    sxid: int
    severity: str
    number: int
    last_wall: float


class XidCounts(NamedTuple):
    """The XIDs of one GPU since the exporter started: code, class, count, and time of the last event."""

    codes: tuple[tuple[int, str, int, float], ...] = ()
