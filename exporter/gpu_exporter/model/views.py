"""What is published: one node at one moment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

from gpu_exporter.model.holders import Allocation, SourceStatus, TenantKey
from gpu_exporter.model.readings import CollectorOutcome, DeviceSnapshot, XidCounts
from gpu_exporter.model.totals import HolderTotals, TenantTotals, UnitTotals
from gpu_exporter.model.units import UnitId


class Verdict(NamedTuple):
    """State of an allocation (docs/concepts.md lists them) with its evidence in words."""

    state: str
    evidence: str


class Throttling(NamedTuple):
    """The harmful throttle reason with the largest share of the last window, and that share, 0 to 1."""

    reason: str
    ratio: float


class GpuView(NamedTuple):
    """One GPU as published. `withheld`: its last reading is too old, so device families are left out.

    `xids` is None while nobody listens for them. They are published for a lost GPU too: it is then that they matter.
    `allocatable`: whether its scheduler may give it, or an instance of it, to somebody; None while that is not known.
    `throttling`: None while it is not known.
    """

    snapshot: DeviceSnapshot
    age_s: float
    withheld: bool
    hung: bool
    totals: UnitTotals | None
    instance_totals: Mapping[str, UnitTotals] = {}  # by mig_uuid
    xids: XidCounts | None = None
    not_free: Mapping[str, str] = {}  # by mig_uuid ("" the GPU): why a unit without a holder is not free
    allocatable: bool | None = None
    throttling: Throttling | None = None


class HostWork(NamedTuple):
    """What a holder does on one host beside its GPUs, as the mean of the last ten minutes.

    `cpu_ratio`: of the CPUs that are its own (host/work.py), 0 to 1. `io_bytes_per_s`: to and from block devices, None
    where the kernel does not count it.
    """

    cpu_ratio: float
    io_bytes_per_s: float | None = None


class AllocationView(NamedTuple):
    """One allocation as published, joined with its unit. `unconfirmed_s`: since a source last confirmed it.

    `processes`: those of the holder, None while not each process on the unit is known to be its own or another's.
    `host`: of the whole holder, on this node; None while that is not known. `obstacle`: why there is no idle run, in
    one word, "" when there is one.
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


class Buckets(NamedTuple):
    """Mean utilization of a unit per bucket of `bucket_s` seconds, oldest first; None is unknown."""

    values: tuple[float | None, ...]
    bucket_s: float


History: TypeAlias = Callable[[UnitId], Buckets]  # the last minutes of a unit, looked up when a page is drawn


class StateStatus(NamedTuple):
    """How the state file fares. `error` is why the last write failed, "" when it did not.

    `last_write_wall` is None before the first write of this process.
    """

    last_write_wall: float | None
    write_errors: int
    error: str = ""


class AgentStatus(NamedTuple):
    """The exporter's own condition.

    `sample_interval_s` is the larger of sampling and publishing: values are no fresher than that. `last_sample_wall` is
    when a GPU last answered, None before the first time.
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
    attribution_known: bool = False  # every source has answered lately, so a GPU without a holder is free
    errors: tuple[tuple[str, str, int], ...] = ()  # (call, error, count) since start
    note: str = ""  # shown on the page: "simulated GPUs, clock x180"
    unmanaged: tuple[tuple[str, int], ...] = ()  # (kernel driver, number) of GPUs that are not ours to read
    outcomes: tuple[CollectorOutcome, ...] = ()  # of collectors that work outside the device cycles
    warnings: tuple[str, ...] = ()  # for people, about this host
    state: StateStatus | None = None  # None where no state is kept
    driver_missed: bool = False  # not asked yet, or failing as only a driver that is there can

    @property
    def expects_gpus(self) -> bool:
        """Whether the lack of GPU data is a fault.

        Not on a node without a GPU, nor where every GPU was given to another kernel driver, nor while the driver is
        released on request. GPUs on the bus without any kernel driver are a driver that failed to load.
        """
        unbound = any(driver == "none" for driver, _ in self.unmanaged)
        return self.devices_expected > 0 or unbound or self.driver_missed


class View(NamedTuple):
    """One consistent picture, from which every renderer makes its text."""

    wall: float
    status: AgentStatus
    gpus: tuple[GpuView, ...]
    allocations: tuple[AllocationView, ...]
    tenants: tuple[tuple[TenantKey, TenantTotals], ...] = ()
