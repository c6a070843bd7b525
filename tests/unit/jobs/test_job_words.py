"""The first sentence: what it advises, and when it says nothing rather than accuse."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gpu_exporter.common.plain import percent
from gpu_exporter.common.promql.client import Client
from gpu_exporter.reports.jobs import run as job_run
from gpu_exporter.reports.jobs.model import GpuUse, JobReport, JobRun, SlurmRun
from gpu_exporter.reports.jobs.names import AskedJob
from gpu_exporter.reports.jobs.run import JobSources, gather
from gpu_exporter.reports.jobs.words import find_advice, headline

HOUR = 3600.0


def use(node: str, busy: float, idle: float = 0.0, seconds: float = HOUR, known: float = 1.0) -> GpuUse:
    """A GPU with these shares of its known time."""
    gpu = GpuUse(node, "0", f"GPU-{node}", end=seconds, held_s=seconds, observed_s=known * seconds)
    gpu.busy_s, gpu.idle_s = busy * gpu.observed_s, idle * gpu.observed_s
    return gpu


def report(*gpus: GpuUse, is_running: bool = False) -> JobReport:
    run = JobRun("7", "7", 0.0, max(gpu.end for gpu in gpus), is_running, gpus=list(gpus))
    return JobReport("job 7", [run], run.end)


def counted(given: JobReport, gpus: int) -> JobReport:
    """With Slurm's record of so many GPUs."""
    for run in given.runs:
        run.slurm = SlurmRun(
            "7", "7", "ann", "chem", "gpu", "", "COMPLETED", "0:0", run.start, run.end, run.elapsed_s, None, gpus, "a"
        )
    return given


def full(given: JobReport) -> JobReport:
    for gpu in given.gpus:
        gpu.memory_max, gpu.memory_total = 70.0, 80.0
    return given


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        (report(use("a", 0.9), use("b", 0.9)), "nothing to change"),
        (report(use("a", 0.9), use("b", 0.0, 1.0)), "1 of its 2 GPUs never worked"),
        (report(use("a", 0.0, 1.0), use("b", 0.0, 1.0)), "no GPU ever worked"),
        (report(use("a", 0.3, 0.5)), "shorten the pauses"),
        (report(use("a", 0.3)), "fewer or smaller GPUs"),
        (report(*(use(node, 0.9) for node in "abc"), use("d", 0.2)), "node d was used 20%, but half of the nodes 90%"),
        (report(use("a", 0.9), use("b", 0.2)), "fewer or smaller GPUs"),  # of two nodes, neither is the odd one
        # It may still load its data, or has only begun.
        (report(use("a", 0.0, 1.0, 1200.0), is_running=True), ""),
        (report(use("a", 0.0, 1.0, 60.0)), ""),
        # What was measured is too little to say anything.
        (report(use("a", 0.3, 0.5, known=0.1)), ""),
        (report(use("a", 0.0, 0.0, known=0.0)), ""),
    ],
)
def test_the_advice_follows_from_what_was_measured(given: JobReport, advice: str) -> None:
    found = find_advice(given)
    assert found.startswith(advice) and bool(found) == bool(advice)


def test_tasks_that_nobody_measured_and_short_runs_accuse_nobody() -> None:
    worked, idle = (
        JobRun("1", f"7_{n}", 0.0, HOUR, gpus=[use("a", *load)]) for n, load in enumerate(((0.9,), (0.0, 1.0)))
    )
    unseen = [JobRun(str(n), f"7_{n}", 0.0, 1000.0) for n in range(2, 9)]
    assert find_advice(JobReport("job 7", [worked, idle, *unseen], HOUR)).startswith("1 of 9 tasks never used")
    assert find_advice(JobReport("job 7", [worked, *unseen], HOUR)) == "nothing to change"
    failed, again = (JobRun("7", "7", start, start + length) for start, length in ((0.0, 20.0), (200.0, HOUR)))
    failed.gpus, again.gpus = [use("a", 0.0, 1.0, 20.0), use("b", 0.0, 1.0, 20.0)], [use("a", 0.9), use("b", 0.9)]
    assert find_advice(JobReport("job 7", [failed, again], 4000.0)) == "nothing to change"


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        # The work may be in the time that was not measured.
        (report(use("a", 0.9), use("b", 0.0, 1.0, known=0.9)), "shorten the pauses"),
        (report(use("a", 0.0, 1.0, known=0.9)), ""),
        (report(*(use(node, 0.9) for node in "abc"), use("d", 0.0, 1.0, known=0.1)), "nothing to change"),
        # The node was measured while it loaded its data.
        (report(*(use(node, 0.8) for node in "abc"), use("d", 0.0, known=0.1)), "nothing to change"),
        # Slurm counts a GPU that nobody measured.
        (counted(report(*(use(node, 0.0, 1.0) for node in "abc")), 4), ""),
        # 40 minutes of work in a week.
        (report(use("a", 0.9, seconds=168 * HOUR), use("b", 0.004, 0.995, 168 * HOUR)), "shorten the pauses"),
        # Less than this GPU cannot have its memory, and video and copies have no utilization.
        (full(report(use("a", 0.2))), ""),
        (report(use("a", 0.0)), ""),
    ],
)
def test_advice_needs_what_was_measured(given: JobReport, advice: str) -> None:
    found = find_advice(given)
    assert found.startswith(advice) and bool(found) == bool(advice)


def test_a_task_that_has_just_begun_and_a_run_before_the_last_accuse_nobody() -> None:
    worked, new = JobRun("1", "7_1", 0.0, HOUR, gpus=[use("a", 0.9)]), JobRun("2", "7_2", HOUR, HOUR + 600.0, True)
    new.gpus = [use("b", 0.0, 1.0, 600.0)]
    assert find_advice(JobReport("job 7", [worked, new], HOUR + 600.0)) == "nothing to change"
    idle = JobRun("3", "7_3", 0.0, HOUR, gpus=[use("a", 0.0, 1.0)])
    assert "ever worked" not in find_advice(JobReport("job 7", [idle, new], HOUR + 600.0))
    short = JobRun("4", "7_4", 0.0, 200.0, gpus=[use("a", 0.5, seconds=200.0)])
    assert "ever worked" not in find_advice(JobReport("job 7", [replace(idle, name="7_4"), short], HOUR))
    first, again = (JobRun("7", "7", start, start + length) for start, length in ((0.0, 5 * HOUR), (6 * HOUR, HOUR)))
    first.gpus, again.gpus = [use("a", 0.9), use("b", 0.0, 1.0)], [use("a", 0.9), use("b", 0.9)]
    assert "never" not in find_advice(JobReport("job 7", [first, again], 7 * HOUR))
    assert find_advice(JobReport("job 7", [again, replace(first, start=8 * HOUR, end=13 * HOUR)], 9 * HOUR)).startswith(
        "1 of its 2"
    )


def test_a_task_with_a_gpu_that_nobody_measured_is_not_idle() -> None:
    tasks = [counted(report(use("a", *load)), gpus).runs[0] for load, gpus in (((0.9,), 1), ((0.0, 1.0), 2))]
    for number, task in enumerate(tasks):
        task.name = f"7_{number}"
    assert "never" not in find_advice(JobReport("job 7", tasks, HOUR))


def test_a_job_that_nobody_measured_is_not_idle() -> None:
    text = headline(report(use("a", 0.0, 0.0, known=0.0)))
    assert text == "job 7: its use was not measured (1 GPU for 1h)."


@pytest.mark.parametrize(
    ("share", "text"), [(0.0, "0%"), (0.001, "<1%"), (0.5, "50%"), (0.995, "99%"), (0.99999, "99%"), (1.0, "100%")]
)
def test_only_all_is_100_percent_and_only_nothing_is_0(share: float, text: str) -> None:
    assert percent(share) == text


def test_a_record_of_a_job_of_years_ago_with_this_id_is_another_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_run, "read_record", lambda asked, since_s: [])
    entry = {"scheduler": "slurm", "job_id": "7", "uuid": "GPU-0", "mig_uuid": "", "held_seconds": 9.0}
    lines = [
        json.dumps({"end_timestamp_seconds": end, "allocations": [entry | {"start_timestamp_seconds": end - 9.0}]})
        for end in (1000.0, 9_000_000.0)
    ]
    (tmp_path / "0.jsonl").write_text("\n".join(lines))
    sources = JobSources(None, "", Client(), [], tmp_path, is_local=True)
    found, problems = gather(AskedJob("7"), 86400.0, sources, 9_000_100.0)
    assert problems == [] and [run.end for run in found.runs] == [9_000_000.0]
