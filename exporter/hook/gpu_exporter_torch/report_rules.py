"""Rules for training reports (docs/torch.md). The writer and the reader of a report share this file.

The hook writes reports in the job, and the exporter reads them on the node. Each is installed without the other, so the
exporter has this file as a symbolic link. It needs only the standard library, from Python 3.9 on.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

FORMAT = "gpu-exporter-training/1"
KEYS = (  # that the exporter reads
    *("format", "run", "process", "state", "interval_seconds", "rank", "world_size", "gpus", "steps", "measured_steps"),
    *("step_seconds", "wait_seconds", "gpu_wait_seconds", "gpu_work_seconds", "phases", "facts"),
)
BETWEEN, ENDED = "between", "ended"  # states; any other one is a loop that runs
PHASES = ("host_to_device", "forward", "backward", "optimizer", "collective", "checkpoint", "logging", "evaluation")
DTYPES = ("float32", "float16", "bfloat16")
WORDS: Mapping[str, frozenset[str]] = {
    "parameters": frozenset(DTYPES),
    "precision": frozenset((*DTYPES, "mixed")),
    "matmul": frozenset(("highest", "high", "medium")),
}
NUMBERS: Mapping[str, int] = {
    "num_workers": 10_000,
    "workers_to_try": 10_000,
    "prefetch_factor": 10_000,
    "batch_size": 10**9,
    "cpus": 100_000,
}
SWITCHES = frozenset(("pin_memory", "persistent_workers", "iterable", "data_parallel", "compiled"))

SIZE_MAX = 65_536  # bytes of one report
FILES_MAX = 64  # reports of one job on one node: more than its GPUs can have processes
RANKS_MAX = 1_000_000
GPUS_MAX = 16
INTERVAL_S, INTERVAL_MAX_S = 10.0, 600.0  # how often a report is written; to slow storage less often
WINDOW_S = 600.0  # the time that rates and shares of a running loop cover

STEPS_MIN = 20  # measured steps that a share needs; TraceML (traceml-ai 0.5.0) is confident from 20 on ...
WHOLE_MIN, LONG_S = 3, 400.0  # ... or so many that fill this time: the largest jobs make the longest steps
WAIT_MIN = 0.1  # share of its steps that a loop waits for data, from which this is worth a change
PHASE_MIN: Mapping[str, float] = {"checkpoint": 0.1, "logging": 0.1, "evaluation": 0.2, "host_to_device": 0.1}
PHASE_LEFT: Mapping[str, float] = {"checkpoint": 0.05, "logging": 0.02, "evaluation": 0.1}  # share after the advice
WORKERS_MOST = 64  # to be tried at once: each one costs memory
MORE = 1.25  # times as many workers as would do on average: batches are taken in order, so a slow one holds up others
TAKE_S = 0.0015  # to take a batch from a worker, before there are any: torch 2.15 on two CPUs needs 0.9 to 1.8 ms
CPUS_FULL = 0.85  # share of the CPUs beside the loop from which they are the limit; as causes.full_ratio
LATE_MIN = 0.1  # share of a step; gpuprof and TraceML name a late rank from 10 % on

STEP_METRIC = "gpu_training_step_seconds"
STEP_HELP = (
    "Mean duration of a measured step in ten minutes, as the training loop reports it. Absent before 20 measured "
    "steps, or 3 that together last 400 s"
)
ADVICE: Mapping[str, str] = {
    "checkpoint": (
        "write checkpoints less often (a crash then costs more work), or with torch.distributed.checkpoint.async_save"
    ),
    "logging": "log less often, and keep metrics on the GPU until then",
    "evaluation": "evaluate less often, or on fewer samples",
    "host_to_device": "copy with non_blocking=True, and copy less data: convert types on the GPU",
}

OWN_PART = "; each worker must read its own part of the IterableDataset (get_worker_info)"


def are_enough(steps: int, seconds: float) -> bool:
    """Whether the measured steps are enough to judge how a loop spends its time. `seconds`: their total duration."""
    return steps >= STEPS_MIN or (steps >= WHOLE_MIN and seconds >= LONG_S)


def _sum(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one + other


class SpentTime(NamedTuple):
    """The time of one process's measured steps, in seconds; None if unknown.

    `starved_s`: time in which the GPU had no work because the loop waited for data. `worked_s`: the rest of the GPU's
    time.
    `phase_s`: time by phase, measured on the GPU if possible.
    """

    steps: int
    step_s: float
    wait_s: float | None = None
    starved_s: float | None = None
    worked_s: float | None = None
    phase_s: Mapping[str, float] = {}

    @property
    def is_enough(self) -> bool:
        """Whether there are enough steps for a share."""
        return self.step_s > 0.0 and are_enough(self.steps, self.step_s)

    def add(self, other: SpentTime) -> SpentTime:
        """Adds another loop of the same process that runs before or after this loop, e.g. an evaluation."""
        names = {**self.phase_s, **other.phase_s}
        return SpentTime(
            self.steps + other.steps,
            self.step_s + other.step_s,
            _sum(self.wait_s, other.wait_s),
            _sum(self.starved_s, other.starved_s),
            _sum(self.worked_s, other.worked_s),
            {name: self.phase_s.get(name, 0.0) + other.phase_s.get(name, 0.0) for name in names},
        )

    @property
    def each_s(self) -> float:
        """Mean duration of a step."""
        return self.step_s / self.steps

    @property
    def line_s(self) -> float:
        """Length of the measured GPU time; 0 if unknown."""
        is_known = self.starved_s is not None and self.worked_s is not None
        return (self.starved_s or 0.0) + (self.worked_s or 0.0) if is_known else 0.0

    @property
    def is_gpu(self) -> bool:
        """Whether the shares come from times that were measured on the GPU."""
        return self.line_s > 0.0

    @property
    def wait(self) -> float | None:
        """The share of the steps' time that is lost to waiting for data, 0 to 1; None if unknown.

        With times measured on the GPU, only time without work on the GPU counts. Otherwise every wait of the loop
        counts, although the GPU may have worked meanwhile.
        """
        seconds = self.starved_s if self.is_gpu else self.wait_s
        return None if seconds is None else self._share(seconds)

    @property
    def phases(self) -> dict[str, float]:
        """Share of the steps' time that each measured phase takes, 0 to 1."""
        return {name: self._share(seconds) for name, seconds in self.phase_s.items()}

    def _share(self, seconds: float) -> float:
        whole_s = self.line_s or self.step_s
        return min(1.0, max(0.0, seconds / whole_s)) if whole_s > 0.0 else 0.0


class Loading(NamedTuple):
    """The times of a training loop that waits for its data: seconds per batch, None if unknown.

    `workers`: number of processes that make batches, 0 if the loop makes them. `batch_s`: the time from one batch to
    the next.
    `wait_s`: the loop's wait. `work_s`: `batch_s` without any wait. `cpu_s`: CPU time to make a batch. `delay_s`: how
    long a worker waits for a CPU while it makes a batch. `take_s`: the loop's CPU time to get a batch from a worker.
    `loop_cpu_s`: CPU time of the loop's process for all other work. `cpus`: number of CPUs for this process and its
    workers.
    """

    workers: int
    batch_s: float
    wait_s: float
    work_s: float
    cpu_s: float | None = None
    delay_s: float | None = None
    take_s: float | None = None
    loop_cpu_s: float | None = None
    cpus: float | None = None

    @property
    def make_s(self) -> float:
        """Seconds that one process needs to make a batch.

        While the loop waits for data, all workers are busy, except when they wait for a CPU.
        """
        if not self.workers:
            return self.wait_s
        return max(self.cpu_s or 0.0, self.batch_s * self.workers - (self.delay_s or 0.0))

    @property
    def by_cpu_s(self) -> float | None:
        """The shortest time per batch, in seconds, that the CPUs allow. None if it is unknown."""
        if self.cpu_s is None or not self.cpus:
            return None
        own = self.work_s
        if self.loop_cpu_s is not None:  # more than the time of the work is threads that wait for each other and spin
            own = min(self.work_s, self.loop_cpu_s)
        return (self.cpu_s + own + (0.0 if self.workers else TAKE_S)) / (CPUS_FULL * self.cpus)


CPUS, TAKING = "cpus", "taking"  # what limits a loop that more workers do not help: CPUs, or its own work for a batch


class Workers(NamedTuple):
    """The number of loader workers to try, and the expected seconds per batch with them.

    `number`: None if more workers do not help; `limit` then has the reason.
    """

    number: int | None
    batch_s: float
    limit: str = ""


def propose_workers(loading: Loading) -> Workers | None:
    """Returns how many workers would make batches as fast as the loop can take them, or as fast as the CPUs allow.

    The number of CPUs alone is no limit, because a worker that waits for a disk or the network uses no CPU. Returns
    None if the CPU time of a batch is unknown, and there are already as many workers as CPUs for them.
    """
    by_cpu_s = loading.by_cpu_s
    if loading.workers and by_cpu_s is not None and by_cpu_s >= loading.batch_s:
        return Workers(None, loading.batch_s, CPUS)
    take_s = (loading.take_s or 0.0) if loading.workers else TAKE_S
    least_s = max(loading.work_s + take_s, by_cpu_s or 0.0, loading.make_s / WORKERS_MOST)
    number = max(loading.workers + 1, math.ceil(MORE * loading.make_s / least_s))
    if by_cpu_s is None and loading.cpus is not None:
        number = min(number, max(1, math.floor(max(loading.cpus - 1.0, loading.cpus / 2.0))))
        if number <= loading.workers:
            return None
    expected_s = max(least_s, loading.make_s / number)
    if loading.workers and expected_s * (1.0 + WAIT_MIN) > loading.batch_s:
        is_cpu = by_cpu_s is not None and by_cpu_s >= loading.work_s + take_s
        return Workers(None, loading.batch_s, CPUS if is_cpu else TAKING)
    return Workers(number, expected_s)


def advise_phase(name: str, share: float) -> tuple[str, str]:
    """Returns the advice for a phase of ADVICE, and the loop's speed-up if the user follows it.

    `share`: the share of the steps' time that the phase takes, 0 to 1.
    """
    share, left = min(share, 0.99), PHASE_LEFT.get(name, 0.0)
    if share <= left or not left:
        return ADVICE[name], bound_gain(share)
    times = math.ceil(share * (1.0 - left) / ((1.0 - share) * left))
    text = ADVICE[name].replace("less often", f"{times} times less often")
    return text, f"about {1.0 / (1.0 - share + share / times):.1f} times"


class RankTime(NamedTuple):
    """One process of a training. `rank`, `world_size`: None if unknown."""

    rank: int | None
    world_size: int | None
    spent: SpentTime


class LateRank(NamedTuple):
    """The rank for which the others wait, and their wait as a share of a step. `rank` is None if no rank is late."""

    rank: int | None = None
    share: float = 0.0
    text: str = ""


def find_late(ranks: Sequence[RankTime]) -> LateRank | None:
    """Finds the late rank among the ranks on a node. None if they cannot be compared.

    Compares durations, never clocks. In a collective operation, all ranks wait for the last one, so the late rank waits
    least. If not all ranks mark this phase, the rank that waits longest for its data is late. Times of the GPU are not
    compared with times of the CPU: the GPU waits in a collective, and the CPU only launches it.
    """
    named = [each for each in ranks if each.rank is not None and (each.world_size or 0) > 1 and each.spent.is_enough]
    sizes = Counter(each.world_size for each in named)
    named = [each for each in named if each.world_size == sizes.most_common(1)[0][0]]  # of one training
    if all("collective" in each.spent.phase_s for each in named):
        shares = [(-each.spent.phases["collective"], each) for each in named]
        how = "it waits least in the collective operations"
    else:
        shares = [(each.spent.wait, each) for each in named if each.spent.wait is not None]
        how = "it waits longest for its data"
    if len(shares) < 2 or len({each.spent.is_gpu for _, each in shares}) > 1:
        return None
    (most, culprit), *others = sorted(shares, key=lambda pair: (-pair[0], pair[1].rank or 0))
    share = most - (others[(len(others) - 1) // 2][0] + others[len(others) // 2][0]) / 2  # their median
    if share < LATE_MIN:
        return LateRank()
    late_ms = share * culprit.spent.each_s * 1e3
    text = f"rank {culprit.rank} is late by {late_ms:.4g} ms of each step ({share:.0%}): {how}"
    return LateRank(culprit.rank, share, text)


def bound_gain(share: float) -> str:
    """Returns the greatest possible speed-up, as text, without this share of the loop's time."""
    return f"at most {1.0 / (1.0 - min(share, 0.99)):.1f} times"
