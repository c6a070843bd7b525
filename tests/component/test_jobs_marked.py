"""Marks on jobs of a real Slurm: Extra on 24.11, Comment on 22.05."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import pytest

from gpu_exporter.defaults import Policy
from gpu_exporter.reconciler.cycle import Cycle
from gpu_exporter.reconciler.evidence import Evidence, HolderEvidence, HolderName, UnitEvidence
from gpu_exporter.reconciler.jobs import JobMarker
from tests.testbed.processes import Processes, run_exporter, wait_for
from tests.testbed.slurm import Slurm, build_chroot, start_slurm

pytestmark = pytest.mark.slurm
POLICY = Policy()._replace(candidate_after=1.0, underused_after=2.0, startup_grace=1.0)


class Cluster(NamedTuple):
    slurm: Slurm
    field: str

    def row(self, job: str) -> dict[str, Any]:
        """The job as the controller has it."""
        rows = json.loads(self.slurm.run("squeue", "--json"))["jobs"]
        (row,) = [row for row in rows if row["job_id"] == int(job)]
        return dict(row)

    def read(self, job: str) -> str:
        """The field that carries marks."""
        return str(self.row(job)[self.field.lower()])

    def start_of(self, job: str) -> float:
        start = self.row(job)["start_time"]
        return float(start["number"] if isinstance(start, dict) else start)


@pytest.fixture(scope="module", params=["22.05", "24.11"])
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    chroot = build_chroot() if request.param == "24.11" else None
    with Processes(tmp_path_factory.mktemp("slurm")) as processes, start_slurm(processes, chroot) as slurm:
        assert request.param in slurm.run("scontrol", "--version")
        yield Cluster(slurm, "Comment" if chroot is None else "Extra")


@pytest.fixture
def marker(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> JobMarker:
    for name in ("PATH", "SLURM_CONF"):
        monkeypatch.setenv(name, cluster.slurm.environment[name])
    return JobMarker()


class Bench:
    """One cycle over one job, whose idle run and start the test sets."""

    def __init__(self, marker: JobMarker) -> None:
        self.marker = marker
        self.runs: dict[str, tuple[float, float]] = {}
        self.writes: list[str] = []
        self.skips: list[str] = []
        self.cycle = Cycle(self, [marker], POLICY, self, time.monotonic, time.time)

    def count_write(self, result: str) -> None:
        self.writes.append(result)

    def count_skip(self, reason: str) -> None:
        self.skips.append(reason)

    def read_evidence(self, marked: Collection[HolderName] = ()) -> Evidence:
        wall = time.time()
        holders = [
            HolderEvidence(
                HolderName("slurm", "", job),
                "",
                (UnitEvidence("n0", "0", "GPU-1", "", start, run, 1.0, 1.0, 2),),
                1,
            )
            for job, (start, run) in self.runs.items()
        ]
        return Evidence(wall, tuple(holders))

    def run(self) -> tuple[list[str], list[str]]:
        self.writes.clear()
        self.skips.clear()
        self.cycle.run()
        return list(self.writes), list(self.skips)


@pytest.fixture
def bench(cluster: Cluster, marker: JobMarker) -> Iterator[Bench]:
    yield Bench(marker)
    cluster.slurm.cancel_all()


def run_job(cluster: Cluster, *flags: str) -> tuple[str, float]:
    """A running job and its start, some seconds ago."""
    job = cluster.slurm.submit("--gres=gpu:1", *flags)
    start = cluster.start_of(job)
    wait_for(lambda: time.time() - start > 3, "the job to be a few seconds old")
    return job, start


def test_a_mark_comes_grows_and_goes_with_the_first_activity(cluster: Cluster, bench: Bench) -> None:
    job, start = run_job(cluster)
    bench.runs[job] = (start, 1.5)
    assert bench.run() == (["written"], [])
    assert cluster.read(job).startswith("gpu-exporter.io/utilization=candidate;since=20")
    assert cluster.read(job).endswith(";gpus=1")
    assert bench.run() == ([], [])
    bench.runs[job] = (start, 2.5)
    assert bench.run() == (["written"], [])
    assert cluster.read(job).startswith("gpu-exporter.io/utilization=underused;since=20")
    bench.runs[job] = (start, 0.0)
    assert bench.run() == (["withdrawn"], [])
    assert cluster.read(job) == ""
    assert bench.run() == ([], [])


def test_a_text_of_the_owner_is_never_overwritten(cluster: Cluster, bench: Bench) -> None:
    job, start = run_job(cluster)
    text = "mine; gpu-exporter.io/utilization=underused"
    cluster.slurm.run("scontrol", "update", f"JobId={job}", f"{cluster.field}={text}")
    bench.runs[job] = (start, 2.5)
    assert bench.run() == ([], ["foreign"])
    bench.runs.clear()
    assert bench.run() == ([], [])
    assert cluster.read(job) == text


def test_a_job_that_was_started_anew_is_not_marked_and_loses_the_old_mark(cluster: Cluster, bench: Bench) -> None:
    job, start = run_job(cluster, "--requeue")
    bench.runs[job] = (start, 2.5)
    assert bench.run() == (["written"], [])
    cluster.slurm.run("scontrol", "requeue", job)
    wait_for(lambda: bench.run()[0] == ["withdrawn"], "the withdrawal", 20, 0.2)
    assert cluster.read(job) == ""
    wait_for(lambda: "PENDING" in cluster.slurm.run("squeue", "-h", "-j", job, "-o", "%T"), "the job to wait")
    assert bench.run() == ([], ["not_running"])
    cluster.slurm.run_again(job)
    assert bench.run() == ([], ["replaced"])
    assert cluster.read(job) == ""
    cluster.slurm.run("scancel", job)
    ended = (["not_running"], ["replaced"])  # 24.11 lists it no more
    wait_for(lambda: bench.run()[1] in ended, "the end of the job", 20, 0.2)


def test_of_an_array_only_the_task_is_marked(cluster: Cluster, bench: Bench) -> None:
    array = cluster.slurm.submit("--gres=gpu:1", "--array=0-1")
    tasks = cluster.slurm.run("squeue", "-h", "-r", "-j", array, "-O", "JobID:20").split()
    assert len(tasks) == 2 and array in tasks  # the array's id is one task's job id too
    (other,) = set(tasks) - {array}
    wait_for(lambda: time.time() - cluster.start_of(array) > 3, "the tasks to be a few seconds old")
    bench.runs[array] = (cluster.start_of(array), 2.5)
    assert bench.run() == (["written"], [])
    assert cluster.read(array).startswith("gpu-exporter.io/utilization=underused")
    assert cluster.read(other) == ""
    bench.runs[array] = (cluster.start_of(array), 0.0)
    assert bench.run() == (["withdrawn"], [])
    assert cluster.read(array) == ""


def test_of_a_heterogeneous_job_only_the_component_is_named(cluster: Cluster, marker: JobMarker) -> None:
    """It waits here, since the components want a node each; names are the same."""
    leader = cluster.slurm.submit("--gres=gpu:1", ":", "-n1", "--gres=gpu:1", runs=False)
    rows = cluster.slurm.run("squeue", "-h", "-j", leader, "-O", "JobID:20").split()
    assert leader in rows and len(rows) == 2
    (other,) = set(rows) - {leader}
    cluster.slurm.run("scontrol", "update", f"JobId={leader}+1", f"{cluster.field}=my own text")
    for text in ("gpu-exporter.io/utilization=underused;gpus=1", ""):
        marker.update(marker.read(leader).target, text)
        assert (cluster.read(leader), cluster.read(other)) == (text, "my own text")
    cluster.slurm.cancel_all()


def test_remove_all_lists_and_with_apply_withdraws(cluster: Cluster, bench: Bench) -> None:
    job, start = run_job(cluster)
    bench.runs[job] = (start, 2.5)
    bench.run()
    command = ("reconcile", "--remove-all", "--no-kubernetes", "--slurm", "--log.level=warn")
    done = run_exporter(*command, environment=cluster.slurm.environment)
    assert (done.returncode, done.stdout) == (0, f"job {job}: underused: would be withdrawn with --apply\n")
    assert cluster.read(job) != ""
    done = run_exporter(*command, "--apply", environment=cluster.slurm.environment)
    assert (done.returncode, done.stdout) == (0, f"job {job}: underused: withdrawn\n")
    assert cluster.read(job) == ""


def test_extra_is_left_alone_where_slurm_reads_it_as_a_filter(cluster: Cluster, marker: JobMarker) -> None:
    assert marker.field == cluster.field
    if cluster.field == "Comment":
        return  # of no meaning to Slurm
    configuration = cluster.slurm.root / "etc" / "slurm.conf"
    before = configuration.read_text("utf-8")
    configuration.write_text(before.replace("sched_interval=2", "extra_constraints"), encoding="utf-8")
    cluster.slurm.run("scontrol", "reconfigure")
    wait_for(lambda: "extra_constraints" in cluster.slurm.run("scontrol", "show", "config"), "the setting")
    command = ("reconcile", "--remove-all", "--no-kubernetes", "--slurm")
    try:
        done = run_exporter(*command, environment=cluster.slurm.environment)
        assert done.returncode == 2
        assert "SchedulerParameters=extra_constraints gives Extra a meaning; jobs are not marked" in done.stderr
    finally:
        configuration.write_text(before, encoding="utf-8")
        cluster.slurm.run("scontrol", "reconfigure")
