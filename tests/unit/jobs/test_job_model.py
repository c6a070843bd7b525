"""Sums, percentiles and the course of a job. Time that no source measured is never idle."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_exporter.reports.jobs.model import (
    GpuUse,
    JobRun,
    Slot,
    SlurmRun,
    add_slurm,
    add_up,
    course,
    group_runs,
    leave_out_others,
    percentile,
)

seconds = st.floats(0.0, 1e6)


def use(start: float = 0.0, node: str = "n0", uuid: str = "GPU-0", held: float = 100.0, known: float = 100.0) -> GpuUse:
    return GpuUse(node, "0", uuid, start=start, end=start + held, held_s=held, observed_s=known, idle_s=known)


def slurm(raw: str, start: float, elapsed: float, gpus: float = 1.0, end: float | None = 0.0) -> SlurmRun:
    end = start + elapsed if end == 0.0 else end
    return SlurmRun(raw, raw, "erin", "chem", "gpu", "", "COMPLETED", "0:0", start, end, elapsed, None, gpus, "n0")


@given(seconds, seconds, seconds, seconds, seconds)
def test_the_parts_are_never_more_than_the_whole(
    held: float, known: float, busy: float, idle: float, stalled: float
) -> None:
    gpu = GpuUse("n0", "0", "GPU-0", held_s=held, observed_s=known, busy_s=busy, idle_s=idle, stalled_s=stalled)
    gpu.settle()
    total = add_up([JobRun("1", "1", 0.0, held, gpus=[gpu])])
    assert total.busy_s + total.idle_s + total.stalled_s <= total.observed_s + 1e-6
    assert total.observed_s + total.unknown_s == pytest.approx(total.held_s)


def test_time_that_slurm_counts_and_nobody_measured_is_unknown() -> None:
    run = JobRun("1", "1", 0.0, 100.0, gpus=[use(known=90.0)], slurm=slurm("1", 0.0, 103.0, gpus=2.0))
    total = run.use
    assert (total.held_s, total.observed_s, total.unknown_s, total.gpus) == (206.0, 90.0, 116.0, 2.0)


def test_no_job_uses_more_than_it_held_where_slurm_counts_two_instances_as_one_gpu() -> None:
    run = JobRun("1", "1", 0.0, 100.0, gpus=[use(uuid="GPU-0"), use(uuid="GPU-1")], slurm=slurm("1", 0.0, 100.0))
    assert (run.use.held_s, run.use.observed_s, run.use.gpus) == (200.0, 200.0, 2.0)


def test_a_run_of_another_user_with_this_id_is_another_job() -> None:
    owners = ("ann", "bob", "", "uid:1001", "bob")
    runs = [JobRun("1", "1", float(n), n + 1.0, owner={"user": name}) for n, name in enumerate(owners)]
    assert [run.owner["user"] for run in leave_out_others(runs)] == ["bob", "", "uid:1001", "bob"]
    assert leave_out_others(runs[2:4]) == runs[2:4]


def test_a_run_of_several_nodes_is_one_and_a_requeue_begins_another() -> None:
    uses = [("7", use(0.0, "n0")), ("7", use(1.0, "n1")), ("7", use(130.0, "n0")), ("8", use(0.5, "n2"))]
    assert [(raw, [gpu.node for gpu in gpus]) for raw, gpus in group_runs(uses)] == [
        ("7", ["n0", "n1"]), ("7", ["n0"]), ("8", ["n2"]),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("raw", "node", "uuid", "runs"),
    [("7", "n0", "GPU-0", 2), ("7", "n0", "GPU-1", 2), ("7", "n1", "GPU-1", 1), ("ml/pod", "n0", "GPU-1", 1)],
)
def test_a_job_that_begins_again_at_once_has_two_runs(raw: str, node: str, uuid: str, runs: int) -> None:
    """Also on another GPU of the node. The nodes of one run, and the containers of a pod, begin at different times."""
    assert len(group_runs([(raw, use(0.0)), (raw, use(6.0, node, uuid))])) == runs


def test_each_run_of_slurms_record_gets_its_own_measurement() -> None:
    measured = [
        JobRun("7", "7", 1001.0, 1090.0, gpus=[use(1001.0)]),
        JobRun("7", "7", 1300.0, 1390.0, gpus=[use(1300.0)]),
    ]
    runs = add_slurm(measured, [slurm("7", 1300.0, 90.0, end=None), slurm("7", 1200.0, 5.0), slurm("7", 1000.0, 91.0)])
    assert [(run.start, len(run.gpus), run.is_running) for run in runs] == [
        (1000.0, 1, False), (1200.0, 0, False), (1300.0, 1, True),
    ]  # fmt: skip


def test_the_measurement_of_a_run_is_not_taken_by_the_run_before_it() -> None:
    """The first run had no scrape, and the job was requeued at once."""
    runs = add_slurm(
        [JobRun("7", "7", 1011.0, 1111.0, gpus=[use(1011.0)])], [slurm("7", 1000, 1), slurm("7", 1010, 100)]
    )
    assert [(run.start, [gpu.held_s for gpu in run.gpus]) for run in runs] == [(1000.0, []), (1010.0, [100.0])]


def test_a_job_that_is_requeued_at_once_onto_another_node_has_two_runs_by_slurms_record() -> None:
    """Not two nodes of one run, which may begin at different times too."""
    gpus = [use(1001.0, "n0", held=9.0, known=9.0), use(1013.0, "n1", "GPU-1"), use(1011.0, "n2", "GPU-2")]
    run = JobRun("7", "7", 1001.0, 1113.0, gpus=gpus)
    runs = add_slurm([run], [slurm("7", 1000.0, 8.0), slurm("7", 1011.0, 100.0, gpus=2.0)])
    assert [(each.start, each.end, [gpu.held_s for gpu in each.gpus]) for each in runs] == [
        (1000.0, 1008.0, [8.0]), (1011.0, 1111.0, [100.0, 100.0]),
    ]  # fmt: skip
    (run,) = add_slurm([JobRun("7", "7", 1001.0, 1113.0, gpus=gpus)], [slurm("7", 1000.0, 100.0, gpus=3.0)])
    assert len(run.gpus) == 3


def test_percentiles_are_those_of_the_known_time() -> None:
    gpu = use()
    gpu.slots = [Slot(0.0, 10.0, 10.0, 1.0), Slot(10.0, 10.0, 0.0, 0.0), Slot(20.0, 80.0, 80.0, 72.0)]
    assert percentile([gpu], 0.05) == pytest.approx(0.1)
    assert percentile([gpu], 0.95) == pytest.approx(0.9)
    assert percentile([use()], 0.5) is None


def test_a_gap_in_the_course_is_unknown() -> None:
    gpu = use()
    gpu.slots = [Slot(0.0, 50.0, 50.0, 25.0), Slot(50.0, 25.0, 0.0, 0.0), Slot(75.0, 25.0, 25.0, 0.0)]
    assert course([gpu], 4) == [pytest.approx(0.5), pytest.approx(0.5), None, 0.0]
    assert course([use()], 4) == []


def test_time_until_the_epilog_has_ended_is_no_idle_time_of_the_job() -> None:
    gpu = GpuUse("n0", "0", "GPU-0", held_s=48.0, observed_s=48.0, busy_s=20.0, idle_s=8.0)
    gpu.trim(43.0)
    assert (gpu.held_s, gpu.observed_s, gpu.busy_s, gpu.idle_s) == (43.0, 43.0, 20.0, 3.0)
    gpu = GpuUse("n0", "0", "GPU-0", held_s=50.0, observed_s=50.0, busy_s=20.0)
    gpu.trim(40.0)
    assert (gpu.observed_s, gpu.busy_s, gpu.mean) == (40.0, 16.0, 0.4)
    gpu = use(held=5.0, known=5.0)
    gpu.trim(0.0)  # a job that was cancelled in the second of its start
    assert (gpu.held_s, gpu.observed_s, gpu.busy_s, gpu.idle_s) == (0.0, 0.0, 0.0, 0.0)


def test_a_run_that_has_not_ended_is_not_cut_to_slurms_older_answer() -> None:
    (run,) = add_slurm([JobRun("7", "7", 0.0, 100.0, gpus=[use()])], [slurm("7", 0.0, 90.0, end=None)])
    assert run.gpus[0].held_s == 100.0
