"""The published data: one node at one moment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

from gpu_exporter.common.model.causes import Causes
from gpu_exporter.common.model.holders import Allocation, SourceStatus, TenantKey
from gpu_exporter.common.model.readings import CollectorOutcome, DeviceSnapshot, SxidCount, XidCounts
from gpu_exporter.common.model.totals import HolderTotals, TenantTotals, UnitTotals
from gpu_exporter.common.model.training import TrainingView
from gpu_exporter.common.model.units import UnitId


class Verdict(NamedTuple):
    """State of an allocation (docs/concepts.md lists the states), with its evidence as text."""

    state: str
    evidence: str


class Throttling(NamedTuple):
    """The harmful throttle reason with the largest share of the last window, and its share, 0 to 1."""

    reason: str
    ratio: float


class Spin(NamedTuple):
    """The present run in which a holder is fully busy and no witness shows progress.

    - `run_s`: known seconds of the run, 0 without a run.
    - `confidence`: how certain a stall is: "none" before `stalls.after`, then low, medium or high.
    - `evidence`, `against`: texts for people.
    - `unknown`: why the exporter cannot detect a stall here, "" if it can. `all_known`: every witness of progress is
      read.
    - `is_below`: the last reading shows less than full utilization, so there is certainly no stall.
    - `proof`: why a member of the holder's gang cannot continue, "" without proof.
    - `is_blind`: `unknown` is set, and no witness has shown progress for `stalls.after`.
    """

    run_s: float
    confidence: str
    evidence: str = ""
    against: str = ""
    unknown: str = ""
    all_known: bool = False
    is_below: bool = False
    proof: str = ""
    is_blind: bool = False

    @property
    def is_stall(self) -> bool:
        """Whether this run is published as a stall."""
        return self.confidence in ("medium", "high")


class HourOfWork(NamedTuple):
    """Means of a holder over the last hour, 0 to 1: utilization, SM activity, memory bandwidth."""

    utilization: float
    sm: float
    dram: float


class GpuView(NamedTuple):
    """One GPU as published. `withheld`: its last reading is too old, so the page omits its device families.

    `xids`: None while no thread receives XIDs. XIDs are published for a lost GPU too, because they may explain the
    loss. `allocatable`: whether the scheduler may allocate the GPU, or an instance of it; None while unknown.
    `throttling`: None while unknown. `links`: the most NVLinks that were up at the same time, 0 on a board that never
    had one.
    """

    snapshot: DeviceSnapshot
    age_s: float
    withheld: bool
    hung: bool
    totals: UnitTotals | None
    instance_totals: Mapping[str, UnitTotals] = {}  # by mig_uuid
    xids: XidCounts | None = None
    not_free: Mapping[str, str] = {}  # by mig_uuid ("" is the GPU): why a unit without a holder is not free
    allocatable: bool | None = None
    throttling: Throttling | None = None
    links: int = 0


class HostWork(NamedTuple):
    """The work of a holder on one host outside its GPUs, as the mean of the last ten minutes.

    `cpu_ratio`: used share of the holder's CPUs (host/work.py), 0 to 1. `io_bytes_per_s`: traffic to and from block
    devices, None if the kernel does not count it. `cpus`: the number of these CPUs.
    """

    cpu_ratio: float
    io_bytes_per_s: float | None = None
    cpus: float | None = None


class AllocationView(NamedTuple):
    """One allocation as published, joined with its unit.

    - `unconfirmed_s`: seconds since a source last confirmed it.
    - `gpu`: NVML index, NO_PLACE without one. `label`: the GPU's name in tables and series.
    - `processes`: number of the holder's processes, None while the holder of any process on the unit is unknown.
    - `host`: the work of the whole holder on this node, None while unknown.
    - `obstacle`: why there is no idle run, in one word, "" if there is one.
    - `spin`: the run without progress, None while it cannot be known.
    - `causes`: why the GPU is not used, empty if the state needs no cause.
    - `training`: the report of the holder's training loop, None without a report.
    """

    allocation: Allocation
    gpu: int
    mig: str
    totals: HolderTotals
    verdict: Verdict
    obstacle: str = ""
    unconfirmed_s: float = 0.0
    utilization: float | None = None
    memory_used_bytes: float | None = None
    power_w: float | None = None
    temperature_celsius: float | None = None
    processes: int | None = None
    host: HostWork | None = None
    spin: Spin | None = None
    causes: Causes = Causes()
    training: TrainingView | None = None
    label: str = ""

    @property
    def stalled_run_s(self) -> float | None:
        """Seconds of the present stall; 0 without a stall, None while unknown."""
        spin = self.spin
        if spin is not None and spin.is_below:
            return 0.0
        if spin is None or spin.unknown or spin.confidence == "low":
            return None
        return spin.run_s if spin.is_stall else 0.0


class Buckets(NamedTuple):
    """Mean utilization of a unit per bucket of `bucket_s` seconds, oldest first; None is unknown."""

    values: tuple[float | None, ...]
    bucket_s: float


History: TypeAlias = Callable[[UnitId], Buckets]  # the last minutes of a unit, read when a page is rendered


class StateStatus(NamedTuple):
    """Condition of the state file. `error`: why the last write failed, "" if it succeeded.

    `last_write_wall`: None before the first write of this process.
    """

    last_write_wall: float | None
    write_errors: int
    error: str = ""


class AgentStatus(NamedTuple):
    """The exporter's own condition.

    `sample_interval_s` is the larger of the sampling and the publishing interval; no value is fresher.
    `last_sample_wall` is when a GPU last answered, None before the first answer.
    """

    version: str
    backend: str
    driver_up: bool
    driver_error: str
    devices_visible: int
    devices_expected: int
    sample_interval_s: float
    last_sample_wall: float | None
    sources: tuple[SourceStatus, ...] = ()
    attribution_known: bool = False  # every source has answered recently, so a GPU without a holder is free
    errors: tuple[tuple[str, str, int], ...] = ()  # (call, error, count) since start
    note: str = ""  # shown on the page: "simulated GPUs, clock x180"
    unmanaged: tuple[tuple[str, int], ...] = ()  # (kernel driver, number) of GPUs that another kernel driver has
    outcomes: tuple[CollectorOutcome, ...] = ()  # of collectors that work outside the device cycles
    warnings: tuple[str, ...] = ()  # about this host, as text for people
    state: StateStatus | None = None  # None if no state is kept
    task_failures: tuple[tuple[str, int], ...] = ()  # (task, failed turns) since start
    sxids: tuple[SxidCount, ...] = ()  # of NVSwitches, if the kernel's log is read
    driver_released: bool = False  # on request
    counted: tuple[tuple[str, int], ...] = ()  # (source, number) of GPUs that schedulers count or offer here
    driver_missed: bool = False  # not asked yet, or failed with an error that only an installed driver can cause

    @property
    def expects_gpus(self) -> bool:
        """Whether missing GPU data is a fault.

        Missing data is no fault on a node without a GPU, if every GPU has another kernel driver, or while the driver is
        released on request. If GPUs on the bus have no kernel driver, the driver failed to load. A scheduler that
        counts GPUs here expects them, also on the first boot of a node that keeps no files.
        """
        unbound = any(driver == "none" for driver, _ in self.unmanaged)
        return self.devices_expected > 0 or unbound or bool(self.counted_only) or self.driver_missed

    @property
    def counted_only(self) -> int:
        """The number of GPUs that a scheduler counts here while nothing else shows a GPU, otherwise 0."""
        is_explained = self.devices_expected or self.unmanaged or self.driver_released
        return 0 if is_explained else max((number for _, number in self.counted), default=0)


class View(NamedTuple):
    """One consistent snapshot of the node; every renderer makes its text from it."""

    wall: float
    status: AgentStatus
    gpus: tuple[GpuView, ...]
    allocations: tuple[AllocationView, ...]
    tenants: tuple[tuple[TenantKey, TenantTotals], ...] = ()
