"""The text fits into 80 columns and is safe for a terminal, whatever the names are."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from gpu_exporter.reports.jobs.model import GpuUse, JobReport, JobRun
from gpu_exporter.reports.jobs.render import render_json, render_line, render_text

names = st.text(max_size=120)
seconds = st.floats(0.0, 3e7)


@st.composite
def gpus_of_a_kind(draw: st.DrawFn) -> list[GpuUse]:
    """Up to ten that are alike, since each value takes its time to draw."""
    node, model, cause, state = (draw(names) for _ in range(4))
    held, observed, busy, idle, stalled = (draw(seconds) for _ in range(5))
    memory, energy = draw(st.none() | seconds), draw(st.none() | seconds)
    samples, gpus = draw(st.sampled_from((0.0, 1.0))), []
    for number in range(draw(st.integers(1, 10))):
        gpu = GpuUse(node, str(number), f"GPU-{number}", model=model, held_s=held)
        gpu.observed_s, gpu.busy_s, gpu.idle_s, gpu.stalled_s = observed, busy, idle, stalled
        gpu.memory_max, gpu.energy_j, gpu.samples = memory, energy, samples
        gpu.causes, gpu.states = {cause: 1.0}, {state: 1.0}
        gpu.settle()
        gpus.append(gpu)
    return gpus


@st.composite
def runs(draw: st.DrawFn) -> JobRun:
    gpus = [gpu for alike in draw(st.lists(gpus_of_a_kind(), max_size=3)) for gpu in alike]
    run = JobRun("7", draw(names), 0.0, draw(seconds), is_running=draw(st.booleans()), gpus=gpus)
    run.owner = {"user": draw(names)}
    return run


@given(st.lists(runs(), min_size=1, max_size=3), st.integers(1, 8), names)
def test_any_report_can_be_read(several: list[JobRun], times: int, note: str) -> None:
    report = JobReport("job 7", several * times, 0.0, notes=[note])
    text = render_text(report)
    assert max(map(len, text.split("\n"))) <= 80
    assert all(line.isprintable() for line in text.split("\n"))
    line = render_line(report)
    assert line.endswith("\n") and line[:-1].isprintable() and len(line) <= 401
    json.loads(render_json(report), parse_constant=lambda name: 1 / 0)


def test_a_wide_table_keeps_what_was_not_measured() -> None:
    """The percentiles go first, and the unknown time stays."""
    gpus = [GpuUse(f"gpu-node-of-a-long-name-{n}", "0", f"GPU-{n}", held_s=7200.0, observed_s=3600.0) for n in range(2)]
    text = render_text(JobReport("job 7", [JobRun("7", "7", 0.0, 7200.0, gpus=gpus)], 0.0))
    header = next(line for line in text.splitlines() if line.startswith("NODE"))
    assert "UNKNOWN" in header and "MEM GiB" in header and "P95" not in header
