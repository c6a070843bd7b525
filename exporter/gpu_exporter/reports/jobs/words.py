"""Describes a job in words: how much its GPUs were used, the reasons for low use, and what to change."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gpu_exporter.common.durations import describe_duration
from gpu_exporter.common.model.meanings import CAUSES, STATES, advise, describe_cause, sentence
from gpu_exporter.common.plain import percent
from gpu_exporter.reports.jobs.model import MEASURED, NEVER_USED, GpuSums, GpuUse, JobReport, JobRun, add_up_gpus

KNOWN_MIN = 0.02  # with less of its time known, nothing can be said about a job
LITTLE_MIN = 0.5
ANSWER = 0.01  # smaller parts are not in the answer
BEHIND = 0.5  # of the median of the nodes
CAUSE_MIN = 0.1  # a cause or a part of the time with less is not the answer
GOOD = 0.7  # mean utilization from which there is nothing to change; ledger.high_ratio
KINDS = {"+": "components", "_": "tasks", "/": "pods"}  # by the mark in the names of runs
NEW_S = 1800.0  # causes.start_max
SHORT_S = 300.0  # a shorter job may only have started


class JobCause(NamedTuple):
    """A cause of low use. `share`: share of all GPUs' samples. `says`, `advice`: texts with the numbers of the GPU that
    had this cause for the longest time.
    """

    name: str
    share: float
    says: str
    advice: str

    @property
    def title(self) -> str:
        return CAUSES[self.name].title if self.name in CAUSES else self.name


def list_causes(gpus: Sequence[GpuUse]) -> list[JobCause]:
    """Returns the causes, most frequent first."""
    samples = sum(gpu.samples for gpu in gpus) or 1.0
    names = {name for gpu in gpus for name in gpu.causes}
    found = []
    for name in names:
        worst = max(gpus, key=lambda gpu: gpu.causes.get(name, 0.0))
        values: Mapping[str, float] = worst.values.get(name, {})
        share = sum(gpu.causes.get(name, 0.0) for gpu in gpus) / samples
        found.append(JobCause(name, share, describe_cause(name, values), advise(name, values)))
    return sorted(found, key=lambda cause: (-cause.share, cause.name))


def list_states(gpus: Sequence[GpuUse]) -> list[tuple[str, float]]:
    """Returns title and share of the time of each state, most frequent first."""
    samples = sum(count for gpu in gpus for count in gpu.states.values())
    counts: dict[str, float] = {}
    for gpu in gpus:
        for state, count in gpu.states.items():
            title = STATES[state].title if state in STATES else state
            counts[title] = counts.get(title, 0.0) + count / samples
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def headline(report: JobReport) -> str:
    """Returns the summary in one or two sentences: the used share of the held time, and what to change."""
    use, title = report.use, report.title
    if not use.held_s:
        return f"{title}: it is not known to have held a GPU."
    held = f"{describe_gpus(use.gpus)} for {describe_duration(report.runs[-1].elapsed_s)}"
    if len(report.runs) > 1:
        each = " each" if is_array(report.runs) else ""
        held = f"{describe_count(report.runs)} with {describe_gpus(use.gpus)}{each}, {format_hours(use.held_s)}"
    elif use.gpus > 1:
        held = f"{held}, {format_hours(use.held_s)}"
    if use.mean is None or use.observed_s < KNOWN_MIN * use.held_s:
        return f"{title}: its use was not measured ({held})."
    return f"{title}: {describe_parts(use, ANSWER)} ({held}). {sentence(find_advice(report))}".rstrip()


def find_advice(report: JobReport) -> str:
    """Returns the change that would help most. "" if no change is known, or if too little was measured."""
    use, gpus = report.use, report.gpus
    settled = [run for run in report.runs if is_settled(run)]
    if use.mean is None or all(run.elapsed_s < SHORT_S for run in report.runs):
        return ""
    many = is_array(report.runs)
    last = max(settled, key=lambda run: run.start, default=None)  # the owner may have changed the job since another run
    unused = [gpu for gpu in last.gpus if gpu.is_unused] if last is not None else []
    is_known = last is not None and use.unknown_s <= LITTLE_MIN * use.held_s
    if many and is_known and 0 < (idle := count_idle(report.runs)) < len({run.name for run in report.runs}):
        return f"{idle} of {describe_count(report.runs)} never used their GPUs: look at them first"
    if last is not None and not many and is_known and 0 < len(unused) < len(last.gpus):
        return f"{len(unused)} of its {len(last.gpus)} GPUs never worked: {CAUSES['unused_gpu'].owner}"
    if use.stalled_s > CAUSE_MIN * use.held_s:
        return STATES["stalled"].owner
    if causes := [cause for cause in list_causes(gpus) if cause.share >= CAUSE_MIN and cause.advice]:
        return f"{causes[0].title}: {causes[0].advice}"
    if not is_known:
        return ""
    if all(run.is_unused and (is_settled(run) or not run.is_running) for run in report.runs):
        return f"no GPU ever worked: {CAUSES['no_process'].owner}"
    if len(report.runs) == 1 and (behind := find_behind(gpus)):
        return behind
    if use.mean >= GOOD:
        return "nothing to change"
    if use.mean <= NEVER_USED:  # video and copies have no utilization, and the rest was not measured
        return ""
    if use.idle_s > CAUSE_MIN * use.held_s:
        return STATES["bursty"].owner
    return "" if is_full(gpus) else STATES["low"].owner


def is_full(gpus: Sequence[GpuUse]) -> bool:
    """Whether a GPU had so much memory in use that a GPU of half its memory would not be enough."""
    return any((gpu.memory_max or 0.0) > 0.5 * (gpu.memory_total or math.inf) for gpu in gpus)


def count_idle(runs: Sequence[JobRun]) -> int:
    """Counts the tasks that certainly never used a GPU in any run. A task that was not measured, or has just started,
    does not count.
    """
    working = {run.name for run in runs if not (run.is_unused and is_settled(run))}
    return len({run.name for run in runs} - working)


def find_behind(gpus: Sequence[GpuUse]) -> str:
    """Names the node whose utilization is far below that of the others, "" if there is none. Omits nodes that were
    measured for only a part of their time, because their means are not comparable.
    """
    sums = {node: add_up_gpus([gpu for gpu in gpus if gpu.node == node]) for node in {gpu.node for gpu in gpus}}
    measured = {node: use.mean for node, use in sums.items() if use.observed_s > MEASURED * use.held_s}
    known = sorted((mean, node) for node, mean in measured.items() if mean is not None)
    if len(known) < 3:  # of two, neither is the odd one
        return ""
    (low, node), (middle, _) = known[0], known[len(known) // 2]
    if low >= BEHIND * middle:
        return ""
    return (
        f"node {node} was used {percent(low)}, but half of the nodes {percent(middle)} or more: look at the ranks on "
        "this node"
    )


def is_settled(run: JobRun) -> bool:
    """Whether the run has had enough time to load its data. Before that, a GPU without work shows no problem."""
    return run.elapsed_s >= (NEW_S if run.is_running else SHORT_S)


def is_array(runs: Sequence[JobRun]) -> bool:
    """Whether these are runs of several tasks, components or pods, and not several runs of one job."""
    return len({run.name for run in runs}) > 1


def describe_count(runs: Sequence[JobRun]) -> str:
    """Returns the number of runs, in words."""
    names = {run.name for run in runs}
    if len(names) == 1:
        return f"{len(runs)} runs"
    kind = next((kind for mark, kind in KINDS.items() if any(mark in name for name in names)), "jobs")
    again = f" ({len(runs)} runs)" if len(runs) > len(names) else ""
    return f"{len(names)} {kind}{again}"


def describe_gpus(count: float) -> str:
    return f"{count:.0f} GPU" + ("" if count == 1 else "s")


def format_hours(seconds: float) -> str:
    """Formats GPU time in a unit in which the number has at least two digits."""
    if seconds >= 3600.0:
        return f"{seconds / 3600.0:,.1f} GPU-hours"
    return f"{seconds / 60.0:.1f} GPU-minutes" if seconds >= 600.0 else f"{seconds:.0f} GPU-seconds"


def format_energy(joules: float | None) -> str:
    if joules is None:
        return "-"
    return f"{joules / 3.6e6:.2f} kWh" if joules >= 3.6e5 else f"{joules / 1e3:.1f} kJ"


def describe_parts(use: GpuSums, least: float = 0.0) -> str:
    """Describes the parts of the held time whose share is at least `least`, and always the used part."""
    rest = use.held_s - use.busy_s - use.idle_s - use.stalled_s - use.unknown_s
    parts = [("idle", use.idle_s), ("stalled", use.stalled_s), ("not measured", use.unknown_s)]
    parts += [("short pauses", rest)] if not least else []
    shown = [(name, use.share(seconds)) for name, seconds in parts]
    named = [f"{percent(share)} {name}" for name, share in shown if share >= max(least, 0.0005)]
    return ", ".join([f"{percent(use.share(use.busy_s))} used", *named])


def describe_time(run: JobRun, at: float) -> str:
    """Describes the duration of the run. For a running one, also describes the rest of its time limit."""
    took = describe_duration(run.elapsed_s)
    if not run.is_running:
        return took
    if run.slurm is None or run.slurm.limit_s is None:
        return f"{took} so far"
    left = run.slurm.limit_s - max(run.slurm.elapsed_s, at - run.start)
    return f"{took} of {describe_duration(run.slurm.limit_s)}, {describe_duration(max(0.0, left))} left"
