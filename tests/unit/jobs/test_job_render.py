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
def runs(draw: st.DrawFn) -> JobRun:
    gpus = []
    for number in range(draw(st.integers(0, 20))):
        gpu = GpuUse(draw(names), str(number), f"GPU-{number}", model=draw(names), held_s=draw(seconds))
        gpu.observed_s, gpu.busy_s, gpu.idle_s, gpu.stalled_s = (draw(seconds) for _ in range(4))
        gpu.memory_max, gpu.energy_j = draw(st.none() | seconds), draw(st.none() | seconds)
        gpu.causes, gpu.states = {draw(names): 1.0}, {draw(names): 1.0}
        gpu.samples = draw(st.sampled_from((0.0, 1.0)))
        gpu.settle()
        gpus.append(gpu)
    run = JobRun("7", draw(names), 0.0, draw(seconds), is_running=draw(st.booleans()), gpus=gpus)
    run.owner = {"user": draw(names)}
    return run


@given(st.lists(runs(), min_size=1, max_size=20), names)
def test_any_report_can_be_read(several: list[JobRun], note: str) -> None:
    report = JobReport("job 7", several, 0.0, notes=[note])
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
