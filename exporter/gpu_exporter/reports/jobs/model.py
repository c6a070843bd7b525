"""The data about a job: its runs, the use of each GPU, and Slurm's record. Times are Unix seconds."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

NEVER_USED = 0.005  # utilization up to which a GPU counts as never used, if it was idle for nearly all of its time
IDLE_MIN = 0.95
STARTUP_S = 60.0  # of work: a process that opens each GPU does no more; in a week, NEVER_USED are 50 minutes
MEASURED = 0.95  # of the time held: with less, the work may be in the rest
OWNER = ("user", "account", "partition", "qos")
SUMS = ("held", "observed", "busy", "idle", "stalled")  # of seconds, in GpuUse and in the series
ABOUT = ("array_job_id", "array_task_id", "het_job_id", "het_job_offset")
SEVERAL = re.compile(r"[\[,]")  # in a list of nodes
# Starts of one run on several nodes differ by less. A requeued job waits for two minutes, or less (cred_expire).
APART_S = 15.0
NODE_APART_S = 2.0  # on one node, all GPUs of a job have the same start, perhaps rounded


class Slot(NamedTuple):
    """A part of a GPU's time. `observed_s`: seconds with known activity. `busy_s`: seconds of work."""

    start: float
    length_s: float
    observed_s: float
    busy_s: float


@dataclass(slots=True)
class GpuUse:
    """The use of one GPU or MIG instance by one run, in seconds, joules and bytes. None is unknown.

    - `end`: when the holder was last seen. `slots`: use over time; empty if only the sums are known.
    - `samples`: number of samples. `states`, `causes`: number of samples by state and by cause.
    - `values`: the numbers of each cause, by quantity.
    """

    node: str
    gpu: str
    uuid: str
    mig_uuid: str = ""
    model: str = ""
    start: float = 0.0
    end: float = 0.0
    held_s: float = 0.0
    observed_s: float = 0.0
    busy_s: float = 0.0
    idle_s: float = 0.0
    stalled_s: float = 0.0
    energy_j: float | None = None
    memory_max: float | None = None
    memory_total: float | None = None
    slots: list[Slot] = field(default_factory=list)
    samples: float = 0.0
    states: dict[str, float] = field(default_factory=dict)
    causes: dict[str, float] = field(default_factory=dict)
    values: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def mean(self) -> float | None:
        return self.busy_s / self.observed_s if self.observed_s > 0.0 else None

    def settle(self, seen: float = 0.0) -> None:
        """Sets `end`, and limits each part to the whole. `seen`: a time at which the holder had the GPU (Unix seconds).
        The held time reaches at least up to `seen`, because an exporter that started late or lost its state counted too
        little.
        """
        self.held_s = max(self.held_s, seen - self.start)
        self.end = self.start + self.held_s
        self.observed_s = min(self.observed_s, self.held_s)
        left = self.observed_s
        for name in ("busy_s", "stalled_s", "idle_s"):
            setattr(self, name, min(getattr(self, name), left))
            left -= getattr(self, name)

    def trim(self, most_s: float) -> None:
        """Limits the held time to Slurm's elapsed time (`most_s`). The node releases a GPU only after the epilog, when
        the job does no more work. So the surplus is taken from the idle time first.
        """
        self.held_s = min(self.held_s, most_s)
        if self.observed_s > most_s:
            idle_s = min(self.idle_s, self.observed_s - most_s)
            left = most_s / (self.observed_s - idle_s) if most_s else 0.0
            self.idle_s -= idle_s
            self.busy_s, self.stalled_s = left * self.busy_s, left * self.stalled_s
        self.settle()

    @property
    def is_unused(self) -> bool:
        """Whether the GPU certainly never worked. False if a part of its time was not measured."""
        known = self.observed_s
        worked_s = min(self.busy_s, known - self.idle_s)  # the rest of busy_s is noise while idle
        is_quiet = self.busy_s <= NEVER_USED * known and self.idle_s >= IDLE_MIN * known
        return known > MEASURED * self.held_s and is_quiet and worked_s <= STARTUP_S


class SlurmRun(NamedTuple):
    """One run in Slurm's record.

    - `raw`: job id of this task or component. `name`: as in squeue, e.g. 42, 16_3 or 104+1.
    - `limit_s`: None without a time limit. `end`: None while it runs.
    """

    raw: str
    name: str
    user: str
    account: str
    partition: str
    qos: str
    state: str
    exit_code: str
    start: float
    end: float | None
    elapsed_s: float
    limit_s: float | None
    gpus: float
    nodes: str


@dataclass(slots=True)
class JobRun:
    """One run of a job, array task or component, or one pod. `raw`: as in SlurmRun; for a pod, its name."""

    raw: str
    name: str
    start: float
    end: float
    is_running: bool = False
    owner: dict[str, str] = field(default_factory=dict)
    gpus: list[GpuUse] = field(default_factory=list)
    slurm: SlurmRun | None = None

    @property
    def elapsed_s(self) -> float:
        return self.slurm.elapsed_s if self.slurm is not None else max(0.0, self.end - self.start)

    @property
    def use(self) -> GpuSums:
        return add_up([self])

    @property
    def is_unused(self) -> bool:
        """Whether certainly none of its GPUs ever worked, including GPUs that only Slurm counts."""
        use = self.use
        return all(gpu.is_unused for gpu in self.gpus) and use.observed_s > MEASURED * use.held_s


class GpuSums(NamedTuple):
    """Sums over GPUs, in GPU-seconds. `held_s`: from Slurm's record, otherwise as measured. `measured_s`: held time
    that exporters counted. `unknown_s`: the part of `held_s` without known utilization.
    """

    gpus: float
    held_s: float
    measured_s: float
    observed_s: float
    busy_s: float
    idle_s: float
    stalled_s: float
    unknown_s: float
    energy_j: float | None

    @property
    def mean(self) -> float | None:
        return self.busy_s / self.observed_s if self.observed_s > 0.0 else None

    def share(self, seconds: float) -> float:
        """Returns these seconds as a share of the held time."""
        return seconds / self.held_s if self.held_s > 0.0 else 0.0


@dataclass(slots=True)
class JobReport:
    """The content of a report. `notes`: texts about missing data. `incomplete`: a source failed. `has_record`: Slurm
    keeps a record of jobs that this host can read.
    """

    title: str
    runs: list[JobRun]
    at: float
    notes: list[str] = field(default_factory=list)
    incomplete: bool = False
    has_record: bool = True

    @property
    def use(self) -> GpuSums:
        return add_up(self.runs)

    @property
    def gpus(self) -> list[GpuUse]:
        return [gpu for run in self.runs for gpu in run.gpus]


def add_up(runs: Iterable[JobRun]) -> GpuSums:
    """Returns the sums of these runs. The held time is from Slurm's record if there is one."""
    runs = list(runs)
    use = add_up_gpus([gpu for run in runs for gpu in run.gpus])
    held = gpus = unknown = 0.0
    for run in runs:
        own, slurm = add_up_gpus(run.gpus), run.slurm
        counted = max(own.gpus, slurm.gpus) if slurm is not None else own.gpus  # MIG instances may count as one GPU
        held_s = counted * slurm.elapsed_s if slurm is not None and slurm.gpus else own.held_s
        held, gpus = held + held_s, max(gpus, counted)
        unknown += max(0.0, held_s - own.observed_s)
    return use._replace(gpus=gpus, held_s=held, unknown_s=unknown)


def add_up_gpus(gpus: Sequence[GpuUse]) -> GpuSums:
    held, observed, busy, idle, stalled = (sum(getattr(gpu, f"{name}_s") for gpu in gpus) for name in SUMS)
    energies = [gpu.energy_j for gpu in gpus if gpu.energy_j is not None]
    energy = sum(energies) if gpus and len(energies) == len(gpus) else None
    return GpuSums(float(len(gpus)), held, held, observed, busy, idle, stalled, max(0.0, held - observed), energy)


def percentile(gpus: Iterable[GpuUse], share: float) -> float | None:
    """Returns a percentile of the GPUs' utilization over their known time. `share`: 0 to 1, e.g. 0.95 for p95. None if
    no time is known.
    """
    slots = [slot for gpu in gpus for slot in gpu.slots if slot.observed_s]
    known = sorted((slot.busy_s / slot.observed_s, slot.observed_s) for slot in slots)
    limit, upto = share * sum(weight for _, weight in known), 0.0
    for value, weight in known:
        upto += weight
        if upto >= limit:
            return min(1.0, value)
    return None


def course(gpus: Sequence[GpuUse], parts: int) -> list[float | None]:
    """Returns the mean utilization in `parts` equal parts of the time from first start to last end. None: unknown."""
    slots = [slot for gpu in gpus for slot in gpu.slots]
    if not slots:
        return []
    begin = min(gpu.start for gpu in gpus)
    width = max(1.0, max(gpu.end for gpu in gpus) - begin) / parts
    observed, busy = [0.0] * parts, [0.0] * parts
    for slot in slots:
        if not slot.observed_s:
            continue
        first, last = (int((at - begin) / width) for at in (slot.start, slot.start + slot.length_s - 1e-6))
        touched = range(max(0, min(first, parts - 1)), max(0, min(last, parts - 1)) + 1)
        for part in touched:
            observed[part] += slot.observed_s / len(touched)
            busy[part] += slot.busy_s / len(touched)
    return [work / known if known else None for work, known in zip(busy, observed, strict=True)]


def group_runs(uses: Iterable[tuple[str, GpuUse]]) -> list[tuple[str, list[GpuUse]]]:
    """Groups the GPUs of each raw id into runs: GPUs with nearly the same start. A run contains each GPU only once.

    The containers of a pod may start at different times, the GPUs of a Slurm job on one node may not.
    """
    runs: list[tuple[str, list[GpuUse]]] = []
    ordered = sorted(uses, key=lambda item: (item[0], item[1].start))
    for raw, of_job in itertools.groupby(ordered, key=lambda item: item[0]):
        current: list[GpuUse] = []
        for _, gpu in of_job:
            is_there = any((gpu.node, gpu.uuid, gpu.mig_uuid) == (o.node, o.uuid, o.mig_uuid) for o in current)
            there = [o.start for o in current if o.node == gpu.node and raw.isdigit()]
            is_later = gpu.start - min(there, default=gpu.start) > NODE_APART_S
            if not current or gpu.start - current[0].start > APART_S or is_there or is_later:
                current = []
                runs.append((raw, current))
            current.append(gpu)
    return runs


def build_run(raw: str, about: Mapping[str, str], gpus: list[GpuUse], *, is_running: bool) -> JobRun:
    """Makes a run, named as in squeue: 16_3 for an array task, 104+1 for a component. `about`: labels of the holder."""
    name = raw
    for mark, of, part in (("_", "array_job_id", "array_task_id"), ("+", "het_job_id", "het_job_offset")):
        if about.get(of) and about.get(part):
            name = f"{about[of]}{mark}{about[part]}"
    ordered = sorted(gpus, key=lambda gpu: (gpu.node, gpu.gpu, gpu.mig_uuid))
    owner = {label: text for label in OWNER if (text := about.get(label, ""))}
    end = max(gpu.end for gpu in gpus)
    return JobRun(raw, name, gpus[0].start, end, is_running, owner, ordered)


def add_slurm(runs: list[JobRun], record: Sequence[SlurmRun]) -> list[JobRun]:
    """Adds to each measured run its entry in Slurm's record. An unmeasured entry becomes a run without GPUs.

    Each GPU belongs to the entry with the nearest start. GPUs of two entries look like one run if a job was requeued at
    once onto another node.
    """
    starts: defaultdict[str, list[float]] = defaultdict(list)
    for entry in record:
        starts[entry.raw].append(entry.start)

    def is_of(gpu: GpuUse, entry: SlurmRun) -> bool:
        nearest = min(starts[entry.raw], key=lambda start: abs(start - gpu.start))
        return nearest == entry.start and abs(nearest - gpu.start) <= APART_S

    left = list(runs)
    joined: list[JobRun] = []
    for entry in record:
        run = JobRun(entry.raw, entry.name, entry.start, entry.start + entry.elapsed_s)
        near = [each for each in left if each.raw == entry.raw]
        for part in sorted(near, key=lambda each: abs(each.start - entry.start)):
            units = {(gpu.uuid, gpu.mig_uuid) for gpu in run.gpus}
            own = [gpu for gpu in part.gpus if is_of(gpu, entry) and (gpu.uuid, gpu.mig_uuid) not in units]
            if own:
                run.gpus, run.owner, run.end = [*run.gpus, *own], part.owner | run.owner, max(run.end, part.end)
                part.gpus = [gpu for gpu in part.gpus if gpu not in own]
        left = [each for each in left if each.gpus]
        run.slurm, run.name, run.start = entry, entry.name, entry.start
        run.end = entry.end if entry.end is not None else max(run.end, entry.start + entry.elapsed_s)
        run.is_running = entry.end is None
        for gpu in run.gpus:
            if entry.end is not None:
                gpu.trim(entry.elapsed_s)
            if entry.nodes and not SEVERAL.search(entry.nodes):
                gpu.node = entry.nodes  # the exporter may know another name of the host
        run.owner |= {label: value for label in OWNER if (value := getattr(entry, label))}
        joined.append(run)
    return sort_runs([*joined, *left])


def leave_out_others(runs: Sequence[JobRun]) -> list[JobRun]:
    """Returns only the runs of the newest run's user, because Slurm may give an id to another user's job later
    (MaxJobId, or lost state). A run without a user name, or with a placeholder such as uid:1001, is kept.
    """

    def user(run: JobRun) -> str:
        name = run.owner.get("user", "")
        return "" if name.startswith("uid:") else name

    last = max((run for run in runs if user(run)), key=lambda run: run.start, default=None)
    return [run for run in runs if last is None or user(run) in ("", user(last))]


def sort_runs(runs: Iterable[JobRun]) -> list[JobRun]:
    """Sorts runs by name, with numbers in numerical order, and runs of one job by start."""

    def order(run: JobRun) -> tuple[list[int], str, float]:
        return [int(part) for part in re.findall(r"\d+", run.name)], run.name, run.start

    return sorted(runs, key=order)
