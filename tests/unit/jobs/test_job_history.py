"""Counters become sums of runs: a new beginning adds, and a small fall takes nothing back and counts nothing twice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_exporter.reports.jobs.entries import merge_exact, read_records
from gpu_exporter.reports.jobs.history import JobHistory
from gpu_exporter.reports.jobs.model import SUMS, GpuUse, JobRun
from gpu_exporter.reports.jobs.names import AskedJob

KEY = ("", "n0", "GPU-0", "", "", "", "", "7")
WINDOW = 30.0


def split(held: list[float], known: list[float], starts: list[float] | None = None) -> list[GpuUse]:
    """The runs of a series with these values, one in each window since the time 0."""
    times = [WINDOW * number for number in range(len(held))]
    began = dict(zip(times, starts or [0.0] * len(held), strict=True))
    tables = {name: {KEY: dict(zip(times, known, strict=True))} for name in (*SUMS, "energy")}
    tables |= {
        "held": {KEY: dict(zip(times, held, strict=True))},
        "memory": {},
        "samples": {},
        "stalled": {},
        "idle": {},
    }
    return JobHistory._split(KEY, began, tables, WINDOW)


def test_counters_of_an_exporter_that_lost_its_state_begin_again() -> None:
    (run,) = split([30.0, 60.0, 90.0, 120.0], [30.0, 60.0, 10.0, 40.0])
    assert (run.held_s, run.observed_s) == (120.0, 100.0)


def test_time_before_an_exporter_saw_the_holder_is_held_and_unknown() -> None:
    """It was installed while the job ran, or lost its state while no scrape saw the counters fall."""
    (late,) = split([30.0, 60.0, 90.0], [30.0, 60.0, 90.0], [-1000.0] * 3)
    assert (late.held_s, late.observed_s) == (1060.0, 90.0)
    assert not late.is_unused


def test_time_is_unknown_without_the_series_of_utilization() -> None:
    times = [WINDOW * number for number in range(3)]
    tables = {name: {KEY: {at: at + WINDOW for at in times}} for name in ("held", "observed", "idle")}
    tables |= {name: {} for name in ("busy", "stalled", "energy", "memory", "samples")}
    (run,) = JobHistory._split(KEY, dict.fromkeys(times, 0.0), tables, WINDOW)
    assert (run.held_s, run.observed_s, run.idle_s) == (90.0, 0.0, 0.0)


def test_one_damaged_byte_and_one_odd_number_in_a_record_cost_only_themselves(tmp_path: Path) -> None:
    one = {"job_id": "7", "uuid": "GPU-0", "start_timestamp_seconds": 0.0, "held_seconds": 60.0}
    one |= {"scheduler": "slurm", "observed_seconds": 60.0, "busy_seconds": 50.0, "idle_seconds": 10.0}
    odd = {**one, "uuid": "GPU-1", "busy_seconds": "x"}
    line = json.dumps({"end_timestamp_seconds": 60.0, "allocations": [one, odd]})
    (tmp_path / "1000.jsonl").write_bytes(b'{"torn \xff\n' + line.encode() + b"\n")
    (run,), problems = read_records(AskedJob("7"), tmp_path)
    assert [(gpu.observed_s, gpu.busy_s, gpu.idle_s) for gpu in run.gpus] == [(60.0, 50.0, 10.0), (0.0, 0.0, 0.0)]
    assert problems == []


def test_the_target_that_was_scraped_later_leaves() -> None:
    """Two targets have one holder: the larger value is that of the later scrape."""
    (run,) = split([30.0, 60.0, 85.0, 115.0], [30.0, 60.0, 55.0, 85.0])
    assert (run.held_s, run.observed_s) == (115.0, 85.0)


def test_a_requeued_job_is_two_runs_of_one_series() -> None:
    first, second = split([30.0, 55.0, 10.0, 40.0], [30.0, 50.0, 5.0, 35.0], [0.0, 0.0, 65.0, 65.0])
    assert (first.held_s, first.observed_s, second.held_s, second.observed_s) == (55.0, 50.0, 40.0, 35.0)
    assert (first.start, first.end, second.start, second.end) == (0.0, 55.0, 65.0, 105.0)


@pytest.mark.parametrize("start", [-5.0, 5.0, -3600.0])
def test_a_start_that_is_corrected_while_the_job_runs_begins_no_run(start: float) -> None:
    """The exporter's host set its clock, or the exporter lost its state and read the start from another source."""
    known = [30.0, 60.0, 90.0, 120.0]
    (run,) = split(known, known, [0.0, 0.0, start, start])
    assert (run.start, run.held_s, run.observed_s) == (start, max(120.0, 90.0 - start), 120.0)
    (run,) = split([30.0, 60.0, 25.0, 55.0], [30.0, 60.0, 25.0, 55.0], [0.0, 0.0, start, start])
    assert (run.start, run.held_s, run.observed_s) == (start, max(115.0, 90.0 - start), 115.0)


@given(st.lists(st.tuples(st.floats(0.0, 60.0), st.floats(0.0, 60.0), st.booleans()), min_size=1, max_size=20))
def test_no_series_gives_a_gpu_more_known_time_than_held_time(steps: list[tuple[float, float, bool]]) -> None:
    held, known = [0.0], [0.0]
    for grown, seen, is_lost in steps:
        held.append(held[-1] + grown)
        known.append(seen if is_lost else known[-1] + seen)
    for run in split(held, known):
        assert 0.0 <= run.busy_s <= run.observed_s <= run.held_s
        assert run.idle_s + run.stalled_s + run.busy_s <= run.observed_s


@pytest.mark.parametrize(("held", "known"), [(39.0, 40.0), (40.0004, 40.0), (44.6, 40.0), (60.0, 20.0)])
def test_a_record_replaces_the_sums_of_the_last_scrape_unless_they_are_newer(held: float, known: float) -> None:
    """A record has times in milliseconds. The series of a run end some seconds after the run. An older record may be of
    another exporter on a host of this name.
    """
    series = GpuUse("n0", "0", "GPU-0", start=100.0, end=140.0, held_s=held, observed_s=20.0, memory_max=0.0)
    exact = GpuUse("vm", "0", "GPU-0", start=100.0, end=140.0, held_s=40.0, observed_s=40.0, memory_max=7.0)
    (run,) = merge_exact(
        [JobRun("7", "7", 100.0, 139.0, gpus=[series])], [JobRun("7", "7", 100.0, 140.0, gpus=[exact])]
    )
    assert run.gpus[0].observed_s == known
    assert run.gpus[0].held_s == (held if known < 40.0 else 40.0)
    later = JobRun("7", "7", 300.0, 340.0, gpus=[exact])
    assert len(merge_exact([run], [later])) == 2


def test_a_record_belongs_to_a_run_that_began_earlier_on_another_node() -> None:
    """Each node may know another start, and the run has the earliest one."""
    other, series = (GpuUse(f"n{n}", "0", f"GPU-{n}", start=100.0 + 3 * n, end=140.0, held_s=30.0) for n in range(2))
    exact = GpuUse("n1", "0", "GPU-1", start=103.0, end=145.0, held_s=42.0)
    (run,) = merge_exact(
        [JobRun("7", "7", 100.0, 140.0, gpus=[other, series])], [JobRun("7", "7", 103.0, 145.0, gpus=[exact])]
    )
    assert [gpu.held_s for gpu in run.gpus] == [30.0, 42.0]


def test_a_record_belongs_to_the_run_with_its_gpus() -> None:
    """Requeued at once onto another GPU of its node and a second node, which seems to be a node of the first run."""
    uses = [
        GpuUse(f"n{node}", "0", f"GPU-{n}", start=start, end=140.0, held_s=10.0)
        for n, (node, start) in enumerate([(0, 100.0), (1, 108.0), (0, 108.0)])
    ]
    exact = [GpuUse(use.node, "0", use.uuid, start=108.0, end=140.0, held_s=32.0) for use in uses]
    for last in (exact[2:], exact[1:]):
        runs = [JobRun("7", "7", 100.0, 140.0, gpus=uses[:2]), JobRun("7", "7", 108.0, 140.0, gpus=uses[2:])]
        merged = merge_exact(runs, [JobRun("7", "7", 108.0, 140.0, gpus=last)])
        assert [[gpu.uuid for gpu in run.gpus] for run in merged] == [["GPU-0", "GPU-1"], ["GPU-2"]]
        assert {gpu.uuid for run in merged for gpu in run.gpus if gpu.held_s == 32.0} == {gpu.uuid for gpu in last}
