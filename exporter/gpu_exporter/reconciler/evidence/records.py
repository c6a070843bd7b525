"""The evidence on one holder, in the same form for every source."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple, Protocol, TypeAlias

from gpu_exporter.common.errors import AnswerError

EVIDENCE_S = 30.0  # a cycle goes on without evidence that took longer, since marks must be withdrawn in any case
# Prometheus renames labels of the exporter to these when it keeps its own labels of that name (honor_labels: false).
RENAMED_LABELS = ("exported_namespace", "exported_pod", "exported_container")
RENAMED = frozenset(RENAMED_LABELS)
# Job ids as users write them: 3013, 3010_1 (task of an array), 3011+1 (component of a heterogeneous job).


START_SLACK_S = 2.0  # the exporter publishes the start of a job to the second
# After a restart the exporter has no values of work on its host for two minutes. Earlier values count for this time.
HOST_KEEP_S = 900.0
SEEN_S = 3600.0  # an exporter without samples for this long is no longer missed: its holders are unknown in any case
OBSTACLE = re.compile(r"[a-z_]{1,40}")  # the reason is printed
CONFIDENCES = ("medium", "high")
CAUSES_MAX = 8  # of one allocation; an exporter publishes two
# Causes that show work of a holder while its GPUs are idle. They delay a mark, as work on its host does.
WORK_ELSEWHERE = frozenset(("starting", "checkpointing", "remote_io", "steps_elsewhere"))
FACTS = ("user", "account", "partition", "qos", "resource")
NO_FACTS: Mapping[str, frozenset[str]] = MappingProxyType({})
# If two rows describe one allocation, the more careful value counts: less idleness, a shorter stall, less observed, a
# later start.
MORE_CAREFUL: Mapping[str, Callable[[float, float], float]] = {
    "gpu_allocation_idle_run_seconds": min,
    "gpu_allocation_idle_run_witnesses": min,
    "gpu_allocation_stalled_run_seconds": min,
    "gpu_allocation_observed_seconds_total": min,
    "gpu_allocation_held_seconds_total": max,
    "gpu_allocation_start_timestamp_seconds": max,
    "gpu_allocation_holder_units": max,
    "gpu_allocation_idle_gap_longest_seconds": max,
    "gpu_allocation_last_active_timestamp_seconds": max,
    "gpu_allocation_host_activity_ratio": max,
    "gpu_allocation_host_cpus": max,
    "gpu_allocation_host_io_bytes_per_second": max,
}


class HolderName(NamedTuple):
    """A pod with all of its containers, or a Slurm job. A job's `name` is Slurm's own id, unique for each task."""

    scheduler: str
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"job {self.name}" if self.scheduler == "slurm" else f"{self.namespace}/{self.name}"


class PublishedCause(NamedTuple):
    """A cause of low utilization. `confidence`: low, medium or high. Only an exporter's own page contains causes with
    low confidence.
    """

    name: str
    confidence: str
    evidence: str = ""
    against: str = ""
    advice: str = ""
    gain: str = ""


class UnitUse(NamedTuple):
    """The use of one GPU or MIG instance by a holder, for people. Each number is None if unknown.

    `state`: the state from the diagnosis; "" if unknown.
    `now`: present utilization, 0 to 1. `mean`: its mean over the time in `over`.
    `peak`: the most memory that the holder used in this time (bytes). `memory`: the memory of the GPU (bytes).
    """

    state: str = ""
    now: float | None = None
    mean: float | None = None
    over: str = ""
    peak: float | None = None
    memory: float | None = None
    causes: tuple[PublishedCause, ...] = ()


UseOfUnits: TypeAlias = Mapping[tuple[str, str], UnitUse]  # by UUID of the GPU, and index of the MIG instance


class UnitEvidence(NamedTuple):
    """One GPU or MIG instance of a holder. None means that the source does not have the value.

    `idle_run_s`: length of the idle run (seconds); None while the activity of the unit is not known, e.g. because its
    GPU does not answer.
    `obstacle`: why the idle run is missing, in one word; "" if the exporter gives no reason.
    `witnesses`: the smallest number of witnesses in any part of the idle run.
    `coverage`: observed share of the held time, 0 to 1, over the policy's window (coverage.py).
    `sample_interval_s`: the interval of its exporter (seconds).
    `node`: the node, for people. `host`: the name of the Kubernetes node, "" if the series do not contain it.
    `model`: the name of the GPU, "" if it was not queried or is not published.
    `longest_gap_s`: the holder's longest idle run that ended with work (seconds), 0 for none.
    `host_cpu_ratio`, `host_io_bytes_per_s`: activity of the holder on that host; None if it is unknown, or below the
    limits of the query.
    `host_cores`: CPU cores that the holder uses on that host; None if unknown, or below CORE. `host_cpus`: the number
    of its CPUs there, None if unknown.
    `is_shared`: the holder has one or several replicas of the unit (time slicing, MPS).
    `stalled_run_s`: length of the holder's stall on this unit (seconds), 0 without a stall.
    `causes`: the published causes of its low utilization.
    `seen_s`: how long the exporter of this unit has seen the holder on it (seconds).
    `quiet_s`: seconds since the holder last worked on the unit, or began to hold it. Restarts do not end this time.
    `host_work_age_s`: seconds since the holder was last seen to work outside its GPUs: on its host, or by one of
    WORK_ELSEWHERE; None if not within HostLimits.kept_s. `cores_age_s`: seconds since it last used CORE or more CPU
    cores; None if not within HostLimits.kept_s.
    """

    node: str
    gpu: str
    uuid: str
    mig: str
    start_wall: float | None
    idle_run_s: float | None
    sample_age_s: float | None
    coverage: float | None
    witnesses: int | None
    sample_interval_s: float = 1.0
    host: str = ""
    model: str = ""
    longest_gap_s: float = 0.0
    host_cpu_ratio: float | None = None
    host_io_bytes_per_s: float | None = None
    host_cores: float | None = None
    host_cpus: float | None = None
    obstacle: str = ""
    is_shared: bool = False
    stalled_run_s: float | None = None
    causes: tuple[PublishedCause, ...] = ()
    seen_s: float | None = None
    quiet_s: float | None = None
    host_work_age_s: float | None = None
    cores_age_s: float | None = None


class HostLimits(NamedTuple):
    """The limits of work on a host: a share of the holder's CPUs, and bytes per second of block devices.

    A holder above either limit counts as working. `kept_s`: how far back the source searches for such work (seconds).
    """

    cpu_ratio: float
    io_bytes_per_s: float
    kept_s: float = 0.0


class HolderEvidence(NamedTuple):
    """The evidence on one holder.

    `held`: how many units it holds in total, as its scheduler counts them; None if this is not known.
    `incarnations`: the pod UIDs in its series. More than one makes the holder `unknown`. Empty for jobs, which are
    identified by their start.
    `users_id`: for array tasks and components of heterogeneous jobs, the id that users write, e.g. 3010_1; "" for all
    others.
    `clusters`: the Slurm clusters in its series; "" for a series without a cluster; empty for pods. More than one makes
    the holder `unknown`: every cluster counts its jobs from 1, so one id may mean two jobs.
    `counts_from`: only idle time after this time (Unix seconds) counts, because marking was paused until then; None if
    all idle time counts.
    `facts`: for each of FACTS, the values in its series, normally one; "" for a series without the label.
    `mark`: the stage of its mark (in a dry run, of the mark that it would have); "" for no mark.
    """

    name: HolderName
    owner: str
    units: tuple[UnitEvidence, ...]
    held: int | None
    incarnations: frozenset[str] = frozenset()
    users_id: str = ""
    clusters: frozenset[str] = frozenset()
    counts_from: float | None = None
    facts: Mapping[str, frozenset[str]] = NO_FACTS
    mark: str = ""


class Unseen(NamedTuple):
    """A holder that a silent exporter showed within the last SEEN_S, and that no other exporter shows on that GPU.

    `exporter`: its address, for people. `incarnation`: the pod's UID, or the job's start in whole Unix seconds; "" if
    unknown.
    """

    exporter: str
    name: HolderName
    incarnation: str


def nothing_usual(_wall: float) -> float | None:
    """Returns None, for a source without past values."""
    return None


class Evidence(NamedTuple):
    """One reading of the source at `wall` (Unix seconds).

    `exporters`, `allocations`: how many were seen.
    `problems`: missing parts, in words.
    `hidden`: number of GPUs and MIG instances of jobs that Slurm hides from the exporter (PrivateData). These jobs are
    not holders here, because they have no names that distinguish them.
    `paused`: why the site pauses marking; "" if it does not.
    `usual_at`: takes a time (Unix seconds). Returns how many GPUs became idle at about the same time on other days, at
    the same hour; None if this is not known.
    `sharing`: pods that used little of their GPUs even in their busiest hour, each with its utilization in words.
    `unseen`: holders of exporters that do not report now.
    """

    wall: float
    holders: tuple[HolderEvidence, ...]
    exporters: int = 1
    allocations: int = 0
    problems: tuple[str, ...] = ()
    hidden: int = 0
    paused: str = ""
    usual_at: Callable[[float], float | None] = nothing_usual
    sharing: Mapping[HolderName, str] = MappingProxyType({})
    unseen: Collection[Unseen] = ()


class Demand(NamedTuple):
    """GPUs that jobs wait for, by partition. `pending`: all of them. `counted`: the part that can justify an action."""

    pending: Mapping[str, float]
    counted: Mapping[str, float]


# Seconds in the last policy.candidate_after with utilization 0 that were not idle, by (uuid, mig) and witness.
OtherActivity: TypeAlias = Mapping[tuple[str, str], Mapping[str, float]]


class EvidenceSource(Protocol):
    """A PromQL API, or the exporters themselves."""

    def read_evidence(self, marked: Collection[HolderName] = ()) -> Evidence:
        """Returns the present evidence. Raises AnswerError.

        `marked`: holders that are always included. A job may be named by the id that users write, e.g. 3010_1.
        """

    def read_holders(self, names: Collection[HolderName]) -> Evidence:
        """Returns the present evidence on these holders only. Makes no other queries. Raises AnswerError."""


class ExplainingSource(EvidenceSource, Protocol):
    """A source that can explain a single holder."""

    def find_holders(self, unit_of: Callable[[Mapping[str, str], str], str]) -> Collection[tuple[HolderName, str]]:
        """Returns the wanted holders, each with the UUID of its GPU or MIG instance. Raises AnswerError.

        `unit_of`: takes the labels of an allocation and the host of its exporter. Returns the UUID, or "" if the
        allocation is not wanted.
        """

    def read_other_activity(self, uuids: Collection[str]) -> OtherActivity:
        """Reads the witnesses that kept these GPUs from being idle. Empty if the source has no past values.

        Raises AnswerError.
        """

    def read_waiting(self, name: HolderName) -> Mapping[str, float]:
        """Returns the GPUs that pods and jobs wait for, by pool of this holder's GPUs. Empty if this is not known.

        Raises AnswerError.
        """

    def read_use(self, name: HolderName, units: Collection[UnitEvidence]) -> UseOfUnits:
        """Returns the use of these units by a holder, with the causes of their states. Omits units without an answer.

        Raises AnswerError.
        """

    def read_gaps(self) -> Sequence[str]:
        """Lists the data that are missing although exporters report, each with the remedy; empty if unknown."""

    def read_last_seen(self, name: HolderName) -> float | None:
        """Returns when the holder last held a GPU (Unix seconds); None if not in the last day, or if unknown.

        Raises AnswerError.
        """


def holder_name(labels: Mapping[str, str]) -> HolderName:
    """Returns the holder in the labels of an allocation series."""
    if labels.get("scheduler") == "slurm":
        return HolderName("slurm", "", labels.get("job_id", ""))
    return HolderName("kubernetes", labels.get("namespace", ""), labels.get("pod", ""))


def obstacle_of(labels: Mapping[str, str]) -> str:
    """Returns the reason in a series of gpu_allocation_activity_unknown; "" if it is invalid."""
    reason = labels.get("reason", "")
    return reason if OBSTACLE.fullmatch(reason) else ""


def cause_of(labels: Mapping[str, str]) -> tuple[PublishedCause, ...]:
    """Returns the cause in a series of gpu_allocation_cause; empty if it is invalid."""
    cause = PublishedCause(labels.get("cause", ""), labels.get("confidence", ""))
    return (cause,) if OBSTACLE.fullmatch(cause.name) and cause.confidence in CONFIDENCES else ()


def is_hidden(labels: Mapping[str, str]) -> bool:
    """Returns whether a series belongs to a job that Slurm hides: it has no job id, or identity="hidden"."""
    return labels.get("identity") == "hidden" or (labels.get("scheduler") == "slurm" and not labels.get("job_id"))


def owner_of(labels: Mapping[str, str]) -> str:
    """Returns `user/account` from the labels of an info series. Omits a missing part."""
    return "/".join(part for part in (labels.get("user", ""), labels.get("account", "")) if part)


def users_id_of(labels: Mapping[str, str]) -> str:
    """Returns `3010_1` or `3011+1` from an info series; "" for other jobs and for pods."""
    if labels.get("array_job_id") and labels.get("array_task_id"):
        return f"{labels['array_job_id']}_{labels['array_task_id']}"
    if labels.get("het_job_id") and labels.get("het_job_offset"):
        return f"{labels['het_job_id']}+{labels['het_job_offset']}"
    return ""


@dataclass(slots=True)
class Gathered:
    """Collects the series of one holder. If two rows differ, the value that makes a mark less likely counts."""

    owner: str = ""
    users_id: str = ""
    held: int | None = None
    units: list[UnitEvidence] = field(default_factory=list)
    incarnations: set[str] = field(default_factory=set)
    clusters: set[str] = field(default_factory=set)
    facts: set[tuple[str, ...]] = field(default_factory=set)

    def add(self, info: Mapping[str, str], unit: UnitEvidence) -> None:
        """Adds one unit. `info`: the labels of its gpu_allocation_info."""
        self.owner, self.users_id = owner_of(info), users_id_of(info)
        self.incarnations.update(filter(None, [info.get("pod_uid")]))
        self.clusters.add(info.get("slurm_cluster", ""))
        self.facts.add(tuple(info.get(fact, "") for fact in FACTS))
        self.units.append(unit._replace(is_shared=info.get("share") in ("time_slice", "mps")))

    def count(self, held: float) -> None:
        """Adds a value of gpu_allocation_holder_units."""
        units = math.floor(held)
        self.held = units if self.held is None else max(self.held, units)

    def evidence(self, name: HolderName) -> HolderEvidence:
        clusters = frozenset(self.clusters) if name.scheduler == "slurm" else frozenset[str]()
        units, incarnations = tuple(self.units), frozenset(self.incarnations)
        if name.scheduler == "slurm":
            units = _of_the_last_run(units)
        facts = _facts(frozenset(self.facts))
        return HolderEvidence(name, self.owner, units, self.held, incarnations, self.users_id, clusters, facts=facts)


def title(name: HolderName, users_id: str = "") -> str:
    """Names a holder for people: `ml/train-0`, `job 42`, or `job 3010_1 [3013]`, with Slurm's own id in brackets."""
    return str(name) if users_id in ("", name.name) else f"job {users_id} [{name.name}]"


def _of_the_last_run(units: tuple[UnitEvidence, ...]) -> tuple[UnitEvidence, ...]:
    """Returns the units of a job's last run. All series of one run have the same start.

    A job that was requeued after a node failure keeps its id. The series of its former node keep their last values for
    some time, although the job no longer holds those GPUs.
    """
    last = max((unit.start_wall for unit in units if unit.start_wall is not None), default=None)
    if last is None:
        return units
    return tuple(unit for unit in units if unit.start_wall is None or unit.start_wall >= last - START_SLACK_S)


@lru_cache(maxsize=10_000)  # many holders of few users
def _facts(rows: frozenset[tuple[str, ...]]) -> Mapping[str, frozenset[str]]:
    """Returns the values of each of FACTS in these rows. The columns of a row are in the order of FACTS."""
    return MappingProxyType({fact: frozenset(row[i] for row in rows) for i, fact in enumerate(FACTS)})


def refuse_several(clusters: Collection[str], what: str, setting: str = "--source.matcher") -> None:
    """Raises AnswerError if an answer covers several clusters, because two clusters may have a pod of the same name.

    `clusters`: values of the label, "" for none. `what`: the start of the error, e.g. "the source returned series".
    """
    if len(clusters) > 1:
        names = ", ".join(repr(each) if each else "no label cluster" for each in sorted(clusters))
        raise AnswerError(f"{what} of several clusters ({names}): select one with {setting}")


def refuse_renamed(labels: Iterable[str], where: str) -> None:
    """Raises AnswerError if Prometheus has replaced the exporter's pod labels by its own.

    Then `pod` is the exporter's pod on every series, and all evidence would seem to belong to this pod.
    """
    if not RENAMED.isdisjoint(labels):
        found = sorted(RENAMED.intersection(labels))
        raise AnswerError(
            f"{where}: the series have {' and '.join(found)}, so their labels pod and namespace name the "
            "exporter's pod, not the holder. The reconciler makes no decisions. Set honorLabels: true in the "
            "PodMonitor (honor_labels in scrape_configs), and set neither overrideHonorLabels nor "
            f"enforcedNamespaceLabel in Prometheus{ON_GOOGLE}"
        )


ON_GOOGLE = "; on Google's managed Prometheus, use the chart's preset google-managed-prometheus"
ENFORCED = (
    "the series gpu_up have the label `namespace`, so this label may be wrong on the series of holders too. The "
    "reconciler makes no decisions. Drop the label of the targets (see alerts/prometheus.example.yaml), and "
    "do not set enforcedNamespaceLabel" + ON_GOOGLE
)
