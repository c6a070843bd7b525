"""Renders the report about a job as text of 80 columns, as one line, or as JSON."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from gpu_exporter.common.durations import format_age
from gpu_exporter.common.plain import layout, one_line, percent, shorten, utc
from gpu_exporter.common.slurm.hostlist import render_names
from gpu_exporter.reports.jobs.model import (
    OWNER,
    SUMS,
    GpuSums,
    GpuUse,
    JobReport,
    JobRun,
    add_up,
    add_up_gpus,
    course,
    percentile,
)
from gpu_exporter.reports.jobs.words import (
    SHORT_S,
    describe_parts,
    describe_time,
    find_advice,
    format_energy,
    format_hours,
    headline,
    is_array,
    list_causes,
    list_states,
)
from gpu_exporter.reports.usage.render.text import shade

WIDTH, MARGIN = 80, 13
COURSE, SHORT_COURSE = 44, 12  # characters
GIB = 2**30
ROWS_MAX = 16  # rows of a table; the worst come first where there are more
CAUSES_MAX = 3
NAME_MAX = 24
LINE_MAX = 400
DROPPED = ("P5", "P95", "STALL", "START (UTC)")  # columns, in this order, of a table that is too wide


def render_text(report: JobReport) -> str:
    """Renders the report. The first lines are the summary."""
    lines = [*textwrap.wrap(one_line(headline(report)), WIDTH), ""]
    for name, text in _facts(report):
        lines += textwrap.wrap(one_line(text), WIDTH, initial_indent=name.ljust(MARGIN), subsequent_indent=" " * MARGIN)
    shown = report.runs
    if len(report.runs) > 1:
        lines += ["", *_runs(report)]
        shown = [] if is_array(report.runs) else [report.runs[-1]]
    for run in shown:
        if len(run.gpus) > 1:
            lines += ["", *_gpus(run)]
    lines += [""] if report.notes else []
    for note in report.notes:
        lines += textwrap.wrap(one_line(note), WIDTH, subsequent_indent="  ")
    return "\n".join(lines) + "\n"


def render_line(report: JobReport) -> str:
    """Renders the summary in one line, for a mail or a log."""
    return f"{one_line(headline(report), LINE_MAX)}\n"


def render_json(report: JobReport) -> str:
    """Renders JSON with all numbers, in seconds, joules and bytes. Unknown numbers are null."""
    answer = {
        "job": report.title,
        "at_timestamp_seconds": round(report.at, 3),
        "headline": headline(report),
        "advice": find_advice(report),
        "incomplete": report.incomplete,
        "notes": report.notes,
        **_use_json(report.runs),
        "causes": [cause._asdict() for cause in list_causes(report.gpus)],
        "runs": [_run_json(run) for run in report.runs],
    }
    return json.dumps(answer, indent=1) + "\n"


def _facts(report: JobReport) -> Iterator[tuple[str, str]]:
    """Yields name and text of each line below the summary."""
    use, gpus, last = report.use, report.gpus, report.runs[-1]
    owner = [f"{name} {text}".removeprefix("user ") for name in OWNER if (text := last.owner.get(name, ""))]
    if owner:
        yield "owner", ", ".join(owner)
    if len(report.runs) == 1:
        yield "time", f"{_dates(last)}: {describe_time(last, report.at)}{_ending(last)}"
    if gpus:
        models = sorted({gpu.model for gpu in gpus} - {""})
        nodes = shorten(render_names(sorted({gpu.node for gpu in gpus})), 200)
        index = f" gpu {gpus[0].gpu}" if len(gpus) == 1 else ""
        yield "GPUs", f"{', '.join(models) or 'of unknown model'}: {nodes}{index}"
    if use.held_s:
        by = " by Slurm's record" if any(run.slurm is not None for run in report.runs) else ""
        yield "held", f"{format_hours(use.held_s)}{by}: {describe_parts(use)}"
    if use.mean is None:
        return
    low, high = (percent(percentile(gpus, share)) for share in (0.05, 0.95))
    yield "utilization", f"mean {percent(use.mean)}, p5 {low}, p95 {high}{_spread(report.runs)}"
    yield "memory", _memory(gpus)
    yield "energy", format_energy(use.energy_j)
    if any(state != "unknown" for gpu in gpus for state in gpu.states):  # it is judged after some minutes
        states = list_states(gpus)
        yield "states", ", ".join(f"{percent(share)} {title}" for title, share in states)
    if len(report.runs) == 1 and last.elapsed_s >= SHORT_S and (parts := course(gpus, COURSE)):
        each = (max(gpu.end for gpu in gpus) - min(gpu.start for gpu in gpus)) / COURSE
        yield "course", f"|{draw(parts)}| {format_age(each)} per character"
    causes = [cause for cause in list_causes(gpus) if cause.share >= 0.005][:CAUSES_MAX]
    for cause in causes:
        do = f". To change: {cause.advice}" if cause.advice else ""
        yield "cause", f"{percent(cause.share)} of the time: {cause.says}{do}"
    if not causes and max(run.elapsed_s for run in report.runs) < SHORT_S:
        yield "cause", "not searched for in the first minutes of a job"


def draw(parts: Sequence[float | None]) -> str:
    """Draws the utilization: one character for each part, a blank for an unknown part."""
    return "".join(shade(value, 1.0) for value in parts)


def _runs(report: JobReport) -> Iterator[str]:
    """Renders the table of tasks or runs. A long table has only the ones with the lowest utilization."""
    runs = report.runs
    if len(runs) > ROWS_MAX:
        known = sorted((run for run in runs if run.use.mean is not None), key=lambda run: run.use.mean or 0.0)
        runs = [*known, *(run for run in runs if run.use.mean is None)][:ROWS_MAX]
        yield f"The {ROWS_MAX} of {len(report.runs)} runs with the lowest utilization:"
    header = ("RUN", "START (UTC)", "STATE", "TIME", "GPUS", "USED", "IDLE", "STALL", "UNKNOWN", "CAUSE")
    rows = []
    for run in runs:
        use, causes = run.use, list_causes(run.gpus)
        rows.append(
            (
                shorten(run.name, NAME_MAX),
                f"{utc(run.start):%m-%d %H:%M}",
                run.slurm.state if run.slurm is not None else "RUNNING" if run.is_running else "ended",
                format_age(run.elapsed_s),
                f"{use.gpus:.0f}",
                *_shares(use),
                causes[0].name if causes else "-",
            )
        )
    yield from _fit(header, rows, frozenset(header[3:9]))


def _gpus(run: JobRun) -> Iterator[str]:
    """Renders the table of GPUs. If there are many GPUs, the table has one row for each node."""
    groups = [[gpu] for gpu in run.gpus]
    nodes = sorted({gpu.node for gpu in run.gpus})
    if len(groups) > ROWS_MAX and len(nodes) > 1:
        groups = [[gpu for gpu in run.gpus if gpu.node == node] for node in nodes]
        worst = sorted(groups, key=lambda gpus: add_up_gpus(gpus).mean or 0.0)
        if len(groups) > ROWS_MAX:
            yield f"The {ROWS_MAX} of {len(groups)} nodes with the lowest utilization:"
            groups = worst[:ROWS_MAX]
    header = ("NODE", "GPU", "HELD", "USED", "IDLE", "STALL", "UNKNOWN", "P5", "P95", "MEM GiB", "COURSE")
    rows = []
    for gpus in groups:
        use = add_up_gpus(gpus)
        peaks = [gpu.memory_max for gpu in gpus if gpu.memory_max is not None]
        rows.append(
            (
                shorten(gpus[0].node, NAME_MAX),
                gpus[0].gpu if len(gpus) == 1 else f"{len(gpus)}x",
                format_age(use.held_s),
                *_shares(use),
                *(percent(percentile(gpus, share)) for share in (0.05, 0.95)),
                f"{max(peaks) / GIB:.1f}" if peaks else "-",
                draw(course(gpus, SHORT_COURSE)),
            )
        )
    yield from _fit(header, rows, frozenset(header[2:10]))


def _fit(header: tuple[str, ...], rows: Sequence[tuple[str, ...]], right: frozenset[str]) -> list[str]:
    """Renders the table. Drops columns, those in DROPPED first, until the table fits into 80 columns."""
    while True:
        lines = layout(header, rows, right)
        if max(map(len, lines)) <= WIDTH or len(header) < 3:
            return [line[:WIDTH] for line in lines]
        drop = next((header.index(name) for name in DROPPED if name in header), len(header) - 1)
        header = header[:drop] + header[drop + 1 :]
        rows = [row[:drop] + row[drop + 1 :] for row in rows]


def _shares(use: GpuSums) -> list[str]:
    """Returns the parts of the held time. If nothing is known, there is only the unknown part."""
    parts_s = (use.busy_s, use.idle_s, use.stalled_s, use.unknown_s)
    shares = [percent(use.share(part)) if use.held_s else "-" for part in parts_s]
    return shares if use.mean is not None else ["-", "-", "-", shares[-1]]


def _dates(run: JobRun) -> str:
    end = "" if run.is_running else f" - {utc(run.end):%m-%d %H:%M:%S}"
    return f"{utc(run.start):%Y-%m-%d %H:%M:%S}{end} UTC"


def _ending(run: JobRun) -> str:
    if run.slurm is None:
        return "" if run.is_running else ", ended"
    code = f", exit code {run.slurm.exit_code}" if not run.is_running and run.slurm.exit_code != "0:0" else ""
    return f", {run.slurm.state}{code}"


def _spread(runs: Sequence[JobRun]) -> str:
    """Returns a text with the lowest and highest mean of the tasks."""
    means = sorted((run.use.mean, run.name) for run in runs if run.use.mean is not None)
    if len(means) < 2 or percent(means[0][0]) == percent(means[-1][0]):
        return ""
    (low, worst), (high, best) = means[0], means[-1]
    return f"; lowest {percent(low)} ({worst}), highest {percent(high)} ({best})"


def _memory(gpus: Sequence[GpuUse]) -> str:
    known = [gpu for gpu in gpus if gpu.memory_max is not None]
    if not known:
        return "-"
    most = max(known, key=lambda gpu: gpu.memory_max or 0.0)
    of = f" of {most.memory_total / GIB:.1f}" if most.memory_total else ""
    least = min(gpu.memory_max or 0.0 for gpu in known)
    each = f" (lowest GPU {least / GIB:.1f})" if least < 0.9 * (most.memory_max or 0.0) else ""
    return f"at least {(most.memory_max or 0.0) / GIB:.1f}{of} GiB at the highest reading{each}"


def _use_json(runs: Sequence[JobRun]) -> dict[str, Any]:
    use = add_up(runs)
    sums = {"held": use.held_s, "measured": use.measured_s, "known": use.observed_s, "used": use.busy_s}
    sums |= {"idle": use.idle_s, "stalled": use.stalled_s, "unknown": use.unknown_s}
    return {
        "gpus": use.gpus,
        **{f"{name}_gpu_seconds": value for name, value in sums.items()},
        "energy_joules": use.energy_j,
        **_ratios([gpu for run in runs for gpu in run.gpus]),
    }


def _ratios(gpus: Sequence[GpuUse]) -> dict[str, float | None]:
    values = {"mean": add_up_gpus(gpus).mean, "p5": percentile(gpus, 0.05), "p95": percentile(gpus, 0.95)}
    return {f"utilization_{name}_ratio": value for name, value in values.items()}


def _run_json(run: JobRun) -> dict[str, Any]:
    return {
        "run": run.name,
        "job_id": run.raw,
        "start_timestamp_seconds": run.start,
        "end_timestamp_seconds": None if run.is_running else run.end,
        "elapsed_seconds": run.elapsed_s,
        **run.owner,
        "slurm": run.slurm._asdict() if run.slurm is not None else None,
        **_use_json([run]),
        "allocations": [_gpu_json(gpu) for gpu in run.gpus],
    }


def _gpu_json(gpu: GpuUse) -> dict[str, Any]:
    """Returns a GPU as JSON, with the same keys as an allocation of the status page."""
    return {
        **{name: getattr(gpu, name) for name in ("node", "gpu", "uuid", "mig_uuid")},
        "name": gpu.model,
        **{f"{name}_seconds": getattr(gpu, f"{name}_s") for name in SUMS},
        "energy_joules": gpu.energy_j,
        "memory_max_bytes": gpu.memory_max,
        "memory_total_bytes": gpu.memory_total,
        **_ratios([gpu]),
        "state_ratios": {state: count / (gpu.samples or 1.0) for state, count in gpu.states.items()},
        "cause_ratios": {cause: count / (gpu.samples or 1.0) for cause, count in gpu.causes.items()},
        "course_ratios": course([gpu], COURSE),
    }
