"""Holders of GPUs: the grants that a source reports, and the allocations of units that result from the grants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

from gpu_exporter.common.model.units import UnitId

Scheduler: TypeAlias = Literal["kubernetes", "slurm", "container"]
"""The system that started a holder; "container" is a container runtime outside both schedulers."""
RESERVATION_NAMESPACES = ("kai-resource-reservation", "runai-reservation")
"""Namespaces whose pods only reserve GPUs, for pods with fractions of them. Source: KAI-Scheduler, since v0.6.0
(DefaultResourceReservationName); Run:ai and older KAI. Any tenant can copy the labels of these pods, so only the
namespace counts."""
PROCESS_SOURCE = "process"  # Holder.source of a holder known only by its processes: it is shown but never judged
ALLOCATION_KEY = ("uuid", "mig_uuid", "scheduler", "namespace", "pod", "container", "job_id")
"""Labels that together identify one allocation on a node, in every series, rule, query and piece of evidence."""


Who: TypeAlias = tuple[str, str]
"""A pod ("pod", UID) or a Slurm job ("job", id). All its containers or steps count as one."""


class HolderKey(NamedTuple):
    """Identifies a holder. A new pod of the same name is another holder, with another `incarnation`."""

    scheduler: Scheduler
    incarnation: str


AllocationId: TypeAlias = tuple[UnitId, HolderKey]


class Holder(NamedTuple):
    """A pod container, a Slurm job or another container, as its scheduler describes it. Empty strings are unknown.

    `cluster` is the Slurm cluster. A task of a job array has `array_job_id` and `array_task_id`. A component of a
    heterogeneous job has `het_job_id` (the leader's job id) and `het_job_offset`. `uid` is the numeric user ID. No
    output shows it: it tells who may read the record of an ended job.
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
    # "name" if no incarnation id could be proven: such a holder is never restored from state. "hidden" if the scheduler
    # reports only that the holder exists, but not its name.
    identity: str = ""
    start_wall: float | None = None  # provable start, from the scheduler
    units: int | None = None  # GPUs and MIG instances that it holds on all nodes together, as its scheduler counts them

    @property
    def label(self) -> str:
        """The holder as text for people: `namespace/pod/container`, `job 42`, `job 3010_1` (array), `job 3011+1` (het
        job) or `container 0123456789ab`.
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
        """All texts that identify the holder. Two sources that report the same text report the same holder."""
        return frozenset((self.label, f"job {self.job_id}")) if self.job_id else frozenset((self.label,))

    def _job_name(self) -> str:
        """The job in the notation of squeue and scontrol: 42, 3010_1 for an array task, 3011+1 for a component."""
        if self.array_job_id and self.array_task_id:
            return f"{self.array_job_id}_{self.array_task_id}"
        if self.het_job_id and self.het_job_offset:
            return f"{self.het_job_id}+{self.het_job_offset}"
        return self.job_id


class Grant(NamedTuple):
    """One device that a scheduler has granted to a holder, as the source describes the device.

    `kind` is the format of `device`:
    - "uuid": GPU-... or MIG-..., with or without a replica suffix.
    - "minor": the N of /dev/nvidiaN.
    - "instance": N/G or N/G/C: GPU N, GPU instance id G, compute instance id C.
    - "placement": N/PROFILE/ID/START: GPU N, name and id of the MIG profile, first slice.
    - "index": a position in NVML's order, among the GPUs with the minor numbers `among`, or among all GPUs.
    - "unproven": a name that identifies no device, because of `reason`.

    Other fields; monotonic and wall times in seconds:
    - `total`: an index is valid only if NVML lists this many GPUs; 0 allows any number.
    - `number`: the scheduler's name for the device, if the name is not a UUID. The name never changes while the holder
      runs.
    - `running`: false while the job is stopped, so that its held time does not count.
    - `working_wall`: Unix time at which the program could begin to work; infinite until it is known to run; None if the
      scheduler reports only the start.
    - `why`: the reason why the program cannot work. `obstacle`: the same in one word.
    - `confirmed`: monotonic time of the source's last report, or of the poller's request if the source gives no time.
    - `renewed_s`: interval at which the source repeats its report; 0 is at every poll.
    - `share`: one of SHARED if only a part of the device is granted.
    - `witnesses`: the sources that report the holder, as text for people.
    - `claim`: the resource claim that grants the device, and perhaps only monitors it. Empty once use of the device is
      proven.
    - `reserves`: the holder only reserves the device, of which other pods have fractions, and holds nothing itself.
    - `ended`: the holder has ended, and holds nothing. `why`: the reason why its device may still not be free.
    - `possible`: until when a holder that has ended may have had the device. `why`: why `confirmed` is earlier, so that
      the holder may lack time.
    - `start_here`: the holder's start by this host's clock (Unix seconds), None if not reported. The holder's
      `start_wall` is by the scheduler's clock.
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
    reserves: bool = False
    ended: bool = False
    start_here: float | None = None
    possible: float = 0.0


SHARED = ("time_slice", "mps", "shard")
"""The ways in which holders share a unit: replicas of a device plugin, NVIDIA's MPS, Slurm's shards."""


class Allocation(NamedTuple):
    """A resolved grant: `holder` holds `unit`. `share`: none, mig, or one of SHARED.

    `running`, `why`, `obstacle` and `working_wall` are as in Grant. `basis`: the proof that the grant is for this unit,
    as text. `contradiction`: why the processes on the GPU contradict the allocation, as text; the holder's time on the
    unit is then unknown.
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
        """Whether other holders may use the unit too, so that its activity is not only this holder's."""
        return self.share in SHARED


class PastEnds(NamedTuple):
    """The content of a state file of this boot about holders that have ended.

    - `reported`: the ends that the saved counters include, as texts of the source.
    - `polled`: time of the last complete poll that the saved counters include (monotonic seconds).
    """

    reported: Sequence[str]
    polled: float


class SourceStatus(NamedTuple):
    """One attribution source: a program that reports holders.

    `up`: the source answered the last request. `complete`: every reported holder has its device, and no holder can be
    missing. `last_success_wall`: the time that the last good answer describes (Unix seconds), None before the first.
    `error`: the part of the answer that is missing, so that holders may be missing. `notice`: a message for people,
    with nothing missing. `devices`: how many GPUs, or MIG instances in their place, the scheduler counts on this node;
    None if unknown. `missed`: how many holders ended before the source knew their devices. `closed`: the scheduler's
    state of this node if it has closed the node, e.g. "drained"; "" otherwise, and while it is unknown.
    `closed_reason`: an administrator's text about the state.
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
    closed: str = ""
    closed_reason: str = ""

    def say_closed(self) -> str:
        """Returns how the scheduler has closed this node, "" if the node is open or its state is unknown."""
        reason = f" ({self.closed_reason})" if self.closed_reason else ""
        return f"{self.name} has closed this node: {self.closed}{reason}" if self.closed else ""


class TenantKey(NamedTuple):
    """A Kubernetes namespace, or a Slurm account and user; an empty string is unknown or does not apply."""

    scheduler: str
    namespace: str
    account: str
    user: str


def identify(holder: Holder) -> Who | None:
    """Returns the pod or job of a holder; None if only the holder's name is known."""
    if holder.key.scheduler == "slurm":
        return ("job", holder.job_id) if holder.job_id else None
    return ("pod", holder.pod_uid) if holder.pod_uid else None


class Use(NamedTuple):
    """The use of a unit by some processes. `memory_bytes`: None if the driver does not report it per process."""

    processes: int = 0
    memory_bytes: int | None = 0

    def plus(self, other: Use) -> Use:
        known = self.memory_bytes is not None and other.memory_bytes is not None
        memory = (self.memory_bytes or 0) + (other.memory_bytes or 0) if known else None
        return Use(self.processes + other.processes, memory)
