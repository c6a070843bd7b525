"""The records that travel between rooms: ids, families, readings, allocations, views.

Standard library only. Units are in the names: seconds `_s`, joules `_j`, ratios are 0 to 1, times called `wall` are
Unix seconds and times called `monotonic` are seconds of CLOCK_MONOTONIC.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, TypeAlias

# Boards that MIG divides by four: at most 4 instances of 6 of 24 GB, or 24 of 96 GB
# (docs.nvidia.com/datacenter/tesla/mig-user-guide, "Supported GPUs"). RTX A3000 is another product, and has no MIG.
FOUR_SLICES = re.compile(r"\b(A30|RTX PRO 6000 Blackwell)\b")
MetricType: TypeAlias = Literal["counter", "gauge"]
Scheduler: TypeAlias = Literal["kubernetes", "slurm", "container"]
"""Who started a holder; "container" is a container runtime outside both schedulers."""
PROCESS_SOURCE = "process"  # as Holder.source: known by its processes alone, so shown and never judged
XID_CLASSES = ("application", "hardware", "information")


class UnitId(NamedTuple):
    """What can be held: a whole GPU (`mig_uuid` empty) or one MIG instance of it."""

    uuid: str
    mig_uuid: str = ""


def normalize_pci(address: str) -> str:
    """One spelling for 00000000:3B:00.0 (NVML) and 0000:3b:00.0 (kernel), whose domain has more than four digits where
    it needs them: 10000:01:00.0 behind Intel's VMD. "" stays "".
    """
    domain, _, rest = address.lower().partition(":")
    return f"{domain.lstrip('0').rjust(4, '0')}:{rest}" if address else ""


NO_PLACE = -1
"""Index of a GPU that has no place in the driver's list: of it only its address is known."""


class Range(NamedTuple):
    """The values that a quantity can have, both ends included, in its base unit."""

    low: float
    high: float

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high


class Family(NamedTuple):
    """One metric family as data: what the renderers and the generated reference page need.

    `labels` are the labels beside the ones that the place implies (`gpu` and `uuid` on device families). `generations`
    says which products have it; empty is every supported one. `plausible`: what a value of the driver may be; outside
    it is a sentinel or a fault, and no data. `unbounded` says why a family of a collector has no such range.
    """

    name: str
    type: MetricType
    help: str
    labels: tuple[str, ...] = ()
    source: str = ""
    generations: str = ""
    plausible: Range | None = None
    unbounded: str = ""


class Sample(NamedTuple):
    """One value of a family; `labels` are the values of `family.labels`, in that order."""

    family: Family
    labels: tuple[str, ...]
    value: float


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


class DeviceIdentity(NamedTuple):
    """Facts that are read once: NVML index, UUID, product name, PCI address, minor number of /dev/nvidiaN."""

    index: int  # type: ignore[assignment]  # nobody asks these facts for tuple.index
    uuid: str
    name: str
    driver_version: str
    pci_bus_id: str
    minor: int
    mig_mode: str = "disabled"

    @property
    def mig_slices(self) -> int:
        """Compute slices of the board: 7, on FOUR_SLICES 4."""
        return 4 if FOUR_SLICES.search(self.name) else 7

    @property
    def mig_memory_slices(self) -> int:
        """Memory slices of the board: 8, on FOUR_SLICES 4."""
        return 4 if FOUR_SLICES.search(self.name) else 8


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


ALLOCATION_KEY = ("uuid", "mig_uuid", "scheduler", "namespace", "pod", "container", "job_id")
"""Labels that together name one allocation on a node, in every series, rule, query and piece of evidence."""


class HolderKey(NamedTuple):
    """Who holds: unique per incarnation, so a pod recreated under its name is somebody else."""

    scheduler: Scheduler
    incarnation: str


class Holder(NamedTuple):
    """A pod container, a Slurm job or a container of neither, as its scheduler describes it. Empty strings are unknown.

    `cluster` is Slurm's. A task of a job array has `array_job_id` and `array_task_id`, a component of a heterogeneous
    job `het_job_id` (the leader's job id) and `het_job_offset`. `uid` is the user's number; it is published only where
    `identity.user` is `uid`.
    """

    key: HolderKey
    namespace: str = ""
    pod: str = ""
    container: str = ""
    pod_uid: str = ""
    job_id: str = ""
    cluster: str = ""
    user: str = ""
    account: str = ""
    partition: str = ""
    qos: str = ""
    array_job_id: str = ""
    array_task_id: str = ""
    het_job_id: str = ""
    het_job_offset: str = ""
    uid: str = ""
    source: str = ""
    resource: str = ""
    # "name" when no incarnation id could be proven: never restored from state. "hidden" when its scheduler does not say
    # who it is, only that it is there.
    identity: str = ""
    start_wall: float | None = None  # provable start, from the scheduler
    units: int | None = None  # GPUs and MIG instances it holds in all, on every node, as its scheduler counts them

    @property
    def label(self) -> str:
        """How people write it: `namespace/pod/container`, `job 42`, `job 3010_1` (array), `job 3011+1` (het job) or
        `container 0123456789ab`.
        """
        if self.identity == "hidden":
            return "a hidden job"
        if self.key.scheduler == "slurm":
            return f"job {self._job_name()}"
        if self.key.scheduler == "container":
            return f"container {self.container}"
        return "/".join((*filter(None, [self.namespace]), self.pod, self.container))

    @property
    def names(self) -> frozenset[str]:
        """Every way to write it: two sources that share one of them mean the same holder."""
        return frozenset((self.label, f"job {self.job_id}")) if self.job_id else frozenset((self.label,))

    def _job_name(self) -> str:
        """As squeue prints it and scontrol takes it: a task and a component have an address beside their number."""
        if self.array_job_id and self.array_task_id:
            return f"{self.array_job_id}_{self.array_task_id}"
        if self.het_job_id and self.het_job_offset:
            return f"{self.het_job_id}+{self.het_job_offset}"
        return self.job_id


class Grant(NamedTuple):
    """One device that a scheduler has granted to a holder, in the words of the source.

    `kind` says how to read `device`: "uuid" (GPU-... or MIG-..., with or without a replica suffix), "minor" (the N of
    /dev/nvidiaN), "instance" (N/G or N/G/C, the MIG instance of GPU N with GPU instance id G, and compute instance id
    C), "placement" (N/PROFILE/ID/START, the one with this profile, by name and id, that begins at this slice), "index"
    (a position in NVML's order, among the GPUs with the minor numbers `among`, or all of them) or "unproven" (a name
    that shows no device, for `reason`).
    An index counts only where NVML lists `total` GPUs, 0 any number. `number` is what the scheduler calls the device
    where that is not a UUID: a running holder keeps the device that it once led to.

    `running`: false while the holder is not charged, since its job is stopped. `working_wall`: Unix seconds before
    which its program could not work, infinite while it is not known to run, None where its scheduler says no more
    than its start. `why`: what keeps it from working, `obstacle` in one word. `confirmed`: when its source last made
    it, monotonic seconds; the poller fills in when it asked, where the source does not say. `renewed_s`: so often its
    source makes it again, 0 at each poll. `share`: one of SHARED where the source says that only a part of the device
    is granted. `witnesses`: who says that the holder is there, for people. `claim`: the resource claim by which it is
    granted, where nothing shows that the claim takes the device and does not only watch it. `ended`: the holder has
    ended, and holds nothing. `start_here`: the holder's start by this host's clock, Unix seconds, None where its source
    does not say; its own `start_wall` is by the clock of its scheduler.
    """

    kind: Literal["uuid", "minor", "instance", "placement", "index", "unproven"]
    device: str
    holder: Holder
    running: bool = True
    number: str = ""
    among: tuple[str, ...] = ()
    total: int = 0
    why: str = ""
    obstacle: str = ""
    reason: str = ""
    working_wall: float | None = None
    confirmed: float = 0.0
    renewed_s: float = 0.0
    share: str = ""
    witnesses: str = ""
    claim: str = ""
    ended: bool = False
    start_here: float | None = None


SHARED = ("time_slice", "mps", "shard")
"""How several holders divide a GPU or MIG instance: replicas of a device plugin, NVIDIA's MPS, Slurm's shards."""


class Allocation(NamedTuple):
    """A resolved grant: `holder` holds `unit`. `share`: none, mig, or one of SHARED.

    `running`, `why`, `obstacle` and `working_wall` as in Grant. `basis`: what shows that the grant is of this unit, for
    people.
    `contradiction`: why the processes on the GPU say otherwise, for people; then the holder's time there is unknown.
    """

    unit: UnitId
    holder: Holder
    share: str = "none"
    share_ratio: float = 1.0
    running: bool = True
    why: str = ""
    obstacle: str = ""
    working_wall: float | None = None
    contradiction: str = ""
    basis: str = ""

    @property
    def is_shared(self) -> bool:
        """Whether others may use the unit too, so that its activity is not the holder's alone."""
        return self.share in SHARED


class SourceStatus(NamedTuple):
    """One attribution source. `up`: it answered when it was asked last; `complete`: every holder that it names has its
    device, and it may have left out none. `last_success_wall`: when what it says was true, None before the first time.

    `error`: what was missing, so that some holders may be; `notice`: what people should know, with nothing missing.
    `devices`: how many GPUs, or instances in their place, its scheduler counts here, None where it does not say.
    `missed`: holders that ended before it was known what they held.
    """

    name: str
    up: bool
    complete: bool
    last_success_wall: float | None
    conflicts: int = 0
    error: str = ""
    notice: str = ""
    devices: int | None = None
    missed: int = 0


class UnitTotals(NamedTuple):
    """Integrals of one unit, all in seconds, None where the hardware never answered.

    `active_by`: who showed the last activity, UTILIZATION or other witnesses. `other_s`: time at utilization 0 that is
    not idle, by the witness that was active (of several the first: UTILIZATION, then in the order of
    sampling/witnesses.py), since this process started. `unattributed_s`, `unattributed_j`: seconds of full load and
    joules that belong to no known holder; joules are None without a counter.
    Invariant: busy_s + idle_s <= observed_s.
    """

    busy_s: float
    observed_s: float
    idle_s: float
    witnesses: int
    last_active_wall: float | None
    active_by: tuple[str, ...] = ()
    other_s: Mapping[str, float] = {}
    unattributed_s: float = 0.0
    unattributed_j: float | None = None


class HolderTotals(NamedTuple):
    """Integrals of one holder on one unit. `known` is false where activity has no source: then only `held_s` counts.

    `idle_run_s` is None while nothing is known of the present: 0 would say that the holder works. `idle_run_witnesses`:
    the fewest witnesses that any part of the run rests on. `longest_gap_s`: the longest idle run that ended with work.
    Invariants: observed_s <= held_s, busy_s + idle_s <= observed_s.
    """

    held_s: float
    known: bool
    busy_s: float
    observed_s: float
    idle_s: float
    low_s: float
    high_s: float
    energy_j: float | None
    idle_run_s: float | None
    start_wall: float
    last_active_wall: float | None
    idle_run_witnesses: int = 0
    longest_gap_s: float = 0.0


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


class TenantKey(NamedTuple):
    """A namespace of Kubernetes, or an account and a user of Slurm; empty strings are unknown or do not apply."""

    scheduler: str
    namespace: str
    account: str
    user: str


class TenantTotals(NamedTuple):
    """GPU-seconds and joules of a tenant on this node, by its share of each GPU. `energy_j`: None while no GPU of it
    has reported any.
    """

    held_s: float
    known_s: float
    busy_s: float
    idle_s: float
    energy_j: float | None


class View(NamedTuple):
    """One consistent picture, from which every renderer makes its text."""

    wall: float
    status: AgentStatus
    gpus: tuple[GpuView, ...]
    allocations: tuple[AllocationView, ...]
    tenants: tuple[tuple[TenantKey, TenantTotals], ...] = ()
