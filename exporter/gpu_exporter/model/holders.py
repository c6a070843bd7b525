"""Who holds what: grants of a source, and the allocations of units that follow."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

from gpu_exporter.model.units import UnitId

Scheduler: TypeAlias = Literal["kubernetes", "slurm", "container"]
"""Who started a holder; "container" is a container runtime outside both schedulers."""
PROCESS_SOURCE = "process"  # as Holder.source: known by its processes alone, so shown and never judged
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


class TenantKey(NamedTuple):
    """A namespace of Kubernetes, or an account and a user of Slurm; empty strings are unknown or do not apply."""

    scheduler: str
    namespace: str
    account: str
    user: str
