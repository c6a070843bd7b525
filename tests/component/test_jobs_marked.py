"""Marks on jobs of a real Slurm: in AdminComment, or in another field if AdminComment may not be used."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from gpu_exporter.common.clock import SYSTEM_CLOCK
from gpu_exporter.common.config.defaults import Policy
from gpu_exporter.common.config.rules import Match, PolicyRule
from gpu_exporter.common.outside import parse_timestamp
from gpu_exporter.reconciler.cycle import ReconcileCycle
from gpu_exporter.reconciler.decision.rulebook import Rulebook
from gpu_exporter.reconciler.evidence.records import Evidence, HolderEvidence, HolderName, UnitEvidence
from gpu_exporter.reconciler.judge import judge_of
from gpu_exporter.reconciler.marks import MarkError, timestamp
from gpu_exporter.reconciler.slurm.live import FIELDS
from gpu_exporter.reconciler.slurm.marker import JobMarker
from tests.testbed.clocks import StoppableClock
from tests.testbed.pages import serve_page
from tests.testbed.processes import Processes, run_exporter, wait_for
from tests.testbed.slurm import USER, Layout, Slurm, chroot_of, start_slurm

pytestmark = pytest.mark.slurm
POLICY = Policy()._replace(candidate_after=1.0, underused_after=2.0, startup_grace=1.0)


class Cluster(NamedTuple):
    slurm: Slurm
    field: str

    def row(self, job: str) -> dict[str, Any]:
        """The job's entry in slurmctld."""
        rows = json.loads(self.slurm.run("squeue", "--json"))["jobs"]
        (row,) = [row for row in rows if row["job_id"] == int(job)]
        return dict(row)

    def read(self, job: str, field: str = "") -> str:
        """A field, by default the one that carries marks."""
        return str(self.row(job)[FIELDS[field or self.field]] or "")

    def start_of(self, job: str) -> float:
        start = self.row(job)["start_time"]
        return float(start["number"] if isinstance(start, dict) else start)


# What a test proves of the reconciler alone, or of a command that is the same in every release.
of_one_release = pytest.mark.parametrize("cluster", ["24.11"], indirect=True)


@pytest.fixture(scope="module", params=["22.05", "24.11", "26.05"])
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    chroot = chroot_of(request.param)
    with (
        Processes(tmp_path_factory.mktemp("slurm")) as processes,
        start_slurm(processes, chroot, Layout(nodes=2)) as slurm,
    ):
        assert request.param in slurm.run("scontrol", "--version")
        yield Cluster(slurm, "Comment" if chroot is None else "Extra")


@pytest.fixture
def marker(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> JobMarker:
    for name in ("PATH", "SLURM_CONF"):
        monkeypatch.setenv(name, cluster.slurm.environment[name])
    return JobMarker(SYSTEM_CLOCK, POLICY, cluster.field)


class Bench:
    """Runs single cycles over one job, with the idle run and start that the test sets."""

    def __init__(self, marker: JobMarker) -> None:
        self.marker = marker
        self.runs: dict[str, tuple[float, float]] = {}
        self.cluster = "lab"  # the name in the chroot's slurm.conf
        self.writes: list[str] = []
        self.skips: list[str] = []
        self.rules: Sequence[PolicyRule] = ()
        self.facts: dict[str, dict[str, frozenset[str]]] = {}
        self.clock = StoppableClock()
        self.restart()

    def restart(self) -> None:
        """Continue as a new process, which knows only the texts on the jobs."""
        self.cycle = ReconcileCycle(
            judge_of(self, [self.marker], Rulebook(POLICY, self.rules)), [self.marker], POLICY, self, self.clock
        )

    def count_write(self, result: str) -> None:
        self.writes.append(result)

    def count_skip(self, reason: str) -> None:
        self.skips.append(reason)

    def read_evidence(self, marked: Collection[HolderName] = ()) -> Evidence:
        wall = self.clock.wall()
        holders = [
            HolderEvidence(
                HolderName("slurm", "", job),
                "",
                (UnitEvidence("n0", "0", "GPU-1", "", start, run, 1.0, 1.0, 2),),
                1,
                clusters=frozenset({self.cluster}),
                facts=self.facts.get(job, {}),
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
    """Start a job, and return it with its start some seconds later."""
    job = cluster.slurm.submit("--gres=gpu:1", *flags)
    start = cluster.start_of(job)
    wait_for(lambda: time.time() - start > 3, "the job to be a few seconds old")
    return job, start


def test_a_mark_is_set_grows_and_is_removed_at_the_first_activity(cluster: Cluster, bench: Bench) -> None:
    job, start = run_job(cluster)
    bench.runs[job] = (start, 1.5)
    assert bench.run() == (["written"], [])
    assert cluster.read(job).startswith("gpu-exporter.io/utilization=candidate;since=20")
    text, _, observed = cluster.read(job).rpartition(";observed-until=")
    assert text.endswith(f";gpus=1;start={timestamp(start)}")
    assert abs((parse_timestamp(observed) or 0.0) - time.time()) < 30
    assert bench.run() == ([], [])
    bench.runs[job] = (start, 2.5)
    assert bench.run() == (["written"], [])
    assert cluster.read(job).startswith("gpu-exporter.io/utilization=underused;since=20")
    bench.runs[job] = (start, 0.0)
    assert bench.run() == (["withdrawn"], [])
    assert cluster.read(job) == ""
    assert bench.run() == ([], [])


def test_without_evidence_the_mark_of_a_requeued_job_is_removed_at_once(cluster: Cluster, bench: Bench) -> None:
    """A requeued job keeps the mark of its last run. Prometheus is down while the job starts again."""
    job, start = run_job(cluster, "--requeue")
    bench.runs[job] = (start, 2.5)
    assert bench.run() == (["written"], [])
    bench.runs.clear()
    assert bench.run() == ([], [])
    cluster.slurm.requeue(job)
    cluster.slurm.run_again(job)
    assert cluster.read(job) != ""
    assert bench.run() == (["withdrawn"], [])
    assert cluster.read(job) == ""


def test_a_run_of_a_job_lives_until_it_is_requeued_or_ends(cluster: Cluster, bench: Bench) -> None:
    def lives(job: str, start: float) -> bool:
        asked = (HolderName("slurm", "", job), f"{start:.0f}")
        bench.marker.list_marks()  # the list of a new cycle
        return asked in bench.marker.find_living([asked])

    job, start = run_job(cluster, "--requeue")
    assert lives(job, start)
    cluster.slurm.requeue(job)
    assert not lives(job, start)
    cluster.slurm.run_again(job)
    assert (lives(job, start), lives(job, cluster.start_of(job))) == (False, True)
    start = cluster.start_of(job)
    cluster.slurm.cancel_all()
    assert not lives(job, start)


def test_without_evidence_the_mark_of_a_suspended_job_is_removed_at_once(cluster: Cluster, bench: Bench) -> None:
    job, start = run_job(cluster)
    bench.runs[job] = (start, 2.5)
    bench.run()
    bench.runs.clear()
    cluster.slurm.run("scontrol", "suspend", job)
    assert bench.run() == (["withdrawn"], [])
    assert cluster.read(job) == ""


def page_of(jobs: dict[str, tuple[float, str]]) -> str:
    """The series of an exporter for jobs that have been idle for three hours: start and info labels by job id."""
    lines = ["gpu_exporter_sample_interval_seconds 1", f"gpu_exporter_last_sample_timestamp_seconds {time.time():.0f}"]
    for i, (job, (start, labels)) in enumerate(jobs.items()):
        key = f'gpu="{i}",uuid="GPU-{i}",mig="",mig_uuid="",scheduler="slurm",job_id="{job}"'
        lines += [
            f"gpu_allocation_info{{{key},{labels}}} 1",
            f"gpu_allocation_start_timestamp_seconds{{{key}}} {start:.0f}",
            f"gpu_allocation_idle_run_seconds{{{key}}} 3",
            f"gpu_allocation_idle_run_witnesses{{{key}}} 3",
            f"gpu_allocation_held_seconds_total{{{key}}} 20000",
            f"gpu_allocation_observed_seconds_total{{{key}}} 20000",
            f"gpu_allocation_holder_units{{{key}}} 1",
        ]
    return "\n".join(lines) + "\n"


def test_the_dry_run_shows_job_ids_as_users_write_them_and_the_field(
    cluster: Cluster, bench: Bench, tmp_path: Path
) -> None:
    array = cluster.slurm.submit("--gres=gpu:1", "--array=0-1")
    tasks = cluster.slurm.run("squeue", "-h", "-r", "-j", array, "-O", "JobID:20,ArrayTaskID:20").split()
    ids = dict(zip(tasks[1::2], tasks[::2], strict=True))
    (raw, task) = next((ids[task], task) for task in ids if ids[task] != array)
    other = ids[next(each for each in ids if each != task)]
    wait_for(lambda: time.time() - cluster.start_of(raw) > 3, "the tasks to be a few seconds old")
    cluster.slurm.run("scontrol", "update", f"JobId={array}_{task}", f"{cluster.field}=my own")
    shown = f"job {array}_{task} [{raw}]"
    settings = tmp_path / "config.yaml"
    policy = "policy: {candidate_after: 1s, underused_after: 2s, startup_grace: 1s}\n"
    settings.write_text(policy, encoding="utf-8")

    def labels(number: str) -> str:
        return f'slurm_cluster="lab",user="ada",array_job_id="{array}",array_task_id="{number}",het_job_id="",het_job_offset=""'

    held = {
        raw: (cluster.start_of(raw), labels(task)),
        other: (cluster.start_of(other), labels("0" if task == "1" else "1")),
    }
    with serve_page(lambda: page_of(held)) as address:
        command = (
            "reconcile",
            "--once",
            f"--source.exporter={address}",
            "--no-kubernetes",
            f"--slurm.field={cluster.field}",
            f"--config.file={settings}",
        )
        done = run_exporter(*command, environment=cluster.slurm.environment)
        rows = {line.partition("  ")[0]: line for line in done.stdout.splitlines()}
        assert rows[shown].endswith("REFUSED: foreign"), done.stdout + done.stderr
        (free,) = (line for title, line in rows.items() if title.startswith(f"job {array}_") and title != shown)
        assert free.endswith(f"{cluster.field}=gpu-exporter.io/utilization=underused")
        rows = json.loads(run_exporter(*command, "--format=json", environment=cluster.slurm.environment).stdout)[
            "holders"
        ]
        (row,) = [row for row in rows if row["name"] == raw]
        assert (row["job"], row["refused"]) == (f"{array}_{task}", "foreign")
        for asked in (f"job/{array}_{task}", f"job/{raw}"):
            given = [each for each in command[1:] if each != "--once"]
            done = run_exporter("explain", asked, *given, environment=cluster.slurm.environment)
            assert done.stdout.startswith(shown) and "stage underused: " in done.stdout, done.stdout + done.stderr
            assert "  REFUSED: foreign: the field contains a text that the reconciler did not write\n" in done.stdout
        done = run_exporter(*command, "--apply", environment=cluster.slurm.environment)
    assert f"{shown}: not marked underused: the field contains a text that the reconciler did not write" in done.stderr
    assert cluster.read(raw) == "my own"
    assert cluster.read(other).startswith("gpu-exporter.io/utilization=underused")
    cluster.slurm.run("scontrol", "update", f"JobId={array}_{task}", f"{cluster.field}=")
    remove = ("reconcile", "--remove-all", "--no-kubernetes", "--slurm")
    done = run_exporter(*remove, environment=cluster.slurm.environment)
    assert done.stdout.startswith(f"job {array}_") and done.stdout.endswith(
        f" [{other}]: underused: would be withdrawn with --apply\n"
    )


def test_a_restarted_job_is_not_marked_and_loses_its_old_mark(cluster: Cluster, bench: Bench) -> None:
    job, start = run_job(cluster, "--requeue")
    bench.runs[job] = (start, 2.5)
    assert bench.run() == (["written"], [])
    cluster.slurm.requeue(job)
    wait_for(lambda: bench.run()[0] == ["withdrawn"], "the withdrawal", each_s=0.2)
    assert cluster.read(job) == ""
    wait_for(lambda: "PENDING" in cluster.slurm.run("squeue", "-h", "-j", job, "-o", "%T"), "the job to wait")
    assert bench.run() == ([], ["not_running"])
    cluster.slurm.run_again(job)
    assert bench.run() == ([], ["replaced"])
    assert cluster.read(job) == ""
    cluster.slurm.run("scancel", job)
    running = ("squeue", "-h", "-t", "RUNNING", "-o", "%A")
    wait_for(lambda: job not in cluster.slurm.run(*running).split(), "the end of the job", each_s=0.2)
    written, skipped = bench.run()  # 24.11 no longer lists the job, which then has no surroundings
    assert (written, skipped in (["not_running"], ["replaced"], [])) == ([], True)


def test_only_the_idle_task_of_an_array_is_marked(cluster: Cluster, bench: Bench) -> None:
    array = cluster.slurm.submit("--gres=gpu:1", "--array=0-1")
    tasks = cluster.slurm.run("squeue", "-h", "-r", "-j", array, "-O", "JobID:20").split()
    assert len(tasks) == 2 and array in tasks  # the array's id is also the job id of one task
    (other,) = set(tasks) - {array}
    wait_for(lambda: time.time() - cluster.start_of(array) > 3, "the tasks to be a few seconds old")
    bench.runs[array] = (cluster.start_of(array), 2.5)
    assert bench.run() == (["written"], [])
    assert cluster.read(array).startswith("gpu-exporter.io/utilization=underused")
    assert cluster.read(other) == ""
    bench.runs[array] = (cluster.start_of(array), 0.0)
    assert bench.run() == (["withdrawn"], [])
    assert cluster.read(array) == ""


def test_a_heterogeneous_job_is_judged_as_a_whole_and_its_components_are_named(cluster: Cluster, bench: Bench) -> None:
    leader = cluster.slurm.submit("--gres=gpu:1", ":", "-n1", "--gres=gpu:1")
    (other,) = set(cluster.slurm.run("squeue", "-h", "-j", leader, "-O", "JobID:20").split()) - {leader}
    wait_for(lambda: time.time() - cluster.start_of(other) > 3, "the components to be a few seconds old")
    idle = {job: (cluster.start_of(job), 2.5) for job in (leader, other)}
    bench.runs = {leader: idle[leader]}
    assert bench.run() == ([], []), "of the other component nothing is known"
    cluster.slurm.run("scontrol", "update", f"JobId={leader}+1", f"{cluster.field}=my own text")
    bench.runs = dict(idle)
    assert bench.run() == (["written"], ["foreign"])
    assert cluster.read(leader).startswith("gpu-exporter.io/utilization=underused")
    assert cluster.read(other) == "my own text"
    cluster.slurm.run("scontrol", "update", f"JobId={leader}+1", f"{cluster.field}=")
    assert bench.run() == (["written"], [])
    assert cluster.read(other).startswith("gpu-exporter.io/utilization=underused")
    bench.runs = {leader: idle[leader], other: (idle[other][0], 0.0)}
    assert sorted(bench.run()[0]) == ["withdrawn", "withdrawn", "written"]
    assert cluster.read(leader).startswith("gpu-exporter.io/utilization=partial")
    assert cluster.read(other) == ""


@of_one_release
def test_remove_all_lists_marks_and_removes_them_with_apply(cluster: Cluster, bench: Bench) -> None:
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


@pytest.mark.parametrize("cluster", ["24.11", "26.05"], indirect=True)  # 22.05 ignores the field
def test_the_reconciler_does_not_write_extra_if_slurm_reads_it_as_a_filter(cluster: Cluster, marker: JobMarker) -> None:
    assert marker.fields == [cluster.field]
    configuration = cluster.slurm.root / "etc" / "slurm.conf"
    before = configuration.read_text("utf-8")
    configuration.write_text(before.replace("sched_interval=2", "extra_constraints"), encoding="utf-8")
    cluster.slurm.run("scontrol", "reconfigure")
    wait_for(lambda: "extra_constraints" in cluster.slurm.run("scontrol", "show", "config"), "the setting")
    command = ("reconcile", "--remove-all", "--no-kubernetes", "--slurm", "--slurm.field=Extra")
    try:
        done = run_exporter(*command, environment=cluster.slurm.environment)
        assert done.returncode == 2
        assert (
            "with SchedulerParameters=extra_constraints, Slurm filters nodes by Extra; the reconciler marks "
            "no job: set another --slurm.field"
        ) in done.stderr
    finally:
        configuration.write_text(before, encoding="utf-8")
        cluster.slurm.run("scontrol", "reconfigure")


def test_by_default_the_owner_of_a_job_cannot_change_its_mark(cluster: Cluster, bench: Bench) -> None:
    bench.marker = JobMarker(SYSTEM_CLOCK, POLICY)
    bench.restart()
    job, start = run_job(cluster)
    cluster.slurm.run("scontrol", "update", f"JobId={job}", f"{cluster.field}=my own")
    bench.runs[job] = (start, 2.5)
    assert bench.run() == (["written"], [])
    assert cluster.read(job, "AdminComment").startswith("gpu-exporter.io/utilization=underused;since=20")
    denied = cluster.slurm.attempt("scontrol", "update", f"JobId={job}", "AdminComment=mine", user=USER)
    assert "Access/permission denied" in denied.stderr
    assert bench.run() == ([], [])
    bench.runs[job] = (start, 0.0)
    assert bench.run() == (["withdrawn"], [])
    assert (cluster.read(job, "AdminComment"), cluster.read(job)) == ("", "my own")


@of_one_release
def test_a_renewal_moves_a_mark_to_the_new_field_and_keeps_other_text(cluster: Cluster, bench: Bench) -> None:
    job, start = run_job(cluster)
    bench.runs[job] = (start, 2.5)
    assert bench.run() == (["written"], [])
    assert cluster.read(job).startswith("gpu-exporter.io/utilization=underused")
    bench.marker = JobMarker(SYSTEM_CLOCK, POLICY)
    bench.restart()
    assert bench.run() == ([], [])
    bench.clock.later += POLICY.unsupported_max / 2
    assert bench.run() == (["renewed"], [])
    assert cluster.read(job) == ""
    assert cluster.read(job, "AdminComment").startswith("gpu-exporter.io/utilization=underused")
    noted = f"{cluster.read(job, 'AdminComment')},my note"
    cluster.slurm.run("scontrol", "update", f"JobId={job}", f"AdminComment={noted}")
    bench.clock.later += POLICY.unsupported_max / 2
    assert bench.run() == (["renewed"], [])
    assert cluster.read(job, "AdminComment").endswith("my note")
    cluster.slurm.run("scontrol", "update", f"JobId={job}", "AdminComment=JS1:None")
    assert bench.run() == (["written"], [])
    assert (cluster.read(job, "AdminComment"), cluster.read(job)[:15]) == ("JS1:None", "gpu-exporter.io")
    cluster.slurm.run("scontrol", "update", f"JobId={job}", f"{cluster.field}=mine")
    assert bench.run() == ([], ["foreign"])


def test_without_administrator_rights_the_reconciler_writes_the_other_field(
    cluster: Cluster, bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The test uses the owner of the job instead of an Operator: neither may write AdminComment."""
    job, start = run_job(cluster)

    def run_as_owner(*command: str) -> str:
        done = cluster.slurm.attempt(*command, user=USER)
        if done.returncode != 0:
            raise MarkError("error", done.stderr)
        return done.stdout

    monkeypatch.setattr(JobMarker, "_run", staticmethod(run_as_owner))
    bench.marker = JobMarker(SYSTEM_CLOCK, POLICY)
    bench.restart()
    bench.runs[job] = (start, 2.5)
    assert bench.run() == (["error"], [])
    assert "only an Administrator of Slurm (sacctmgr), SlurmUser and root may write AdminComment" in caplog.text
    assert f"from the next cycle on, the reconciler writes marks to {cluster.field}" in caplog.text
    assert bench.run() == (["written"], [])
    assert (cluster.read(job, "AdminComment"), cluster.read(job)[:15]) == ("", "gpu-exporter.io")


GROUP = "nogroup"  # of USER, whom 26.05 does not accept as a user of a reservation
LONGER = (("candidate_after", 4 * 3600.0), ("underused_after", 5 * 3600.0))
NOTEBOOKS = PolicyRule("notebooks", Match(job_names=("jupyter*",)), LONGER)
COURSE = PolicyRule("course", Match(reservations=("course-*",)), exempt="a course")


@contextmanager
def reserved(cluster: Cluster, *names: str) -> Iterator[None]:
    """Reservations that admit the owner of the jobs, until the end of the test and of its jobs."""
    for name in names:
        cluster.slurm.run(
            *("scontrol", "create", "reservation", f"ReservationName={name}", "StartTime=now", "Duration=60"),
            *(f"Groups={GROUP}", "NodeCnt=1", "Flags=OVERLAP"),
        )
    try:
        yield
    finally:
        cluster.slurm.cancel_all()
        for name in names:
            cluster.slurm.run("scontrol", "delete", f"ReservationName={name}")


def test_a_name_or_reservation_that_the_owner_changes_has_its_policy_in_the_next_cycle(
    cluster: Cluster, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpu_exporter.reconciler.slurm.marker.LISTED_S", 0.0)
    bench.rules = [COURSE, NOTEBOOKS]
    bench.restart()
    with reserved(cluster, "course-101"):
        job, start = run_job(cluster, "--reservation=course-101", "--job-name=train")
        bench.runs[job] = (start, 2.5)

        def change(text: str) -> tuple[list[str], list[str]]:
            cluster.slurm.run("scontrol", "update", f"JobId={job}", text, user=USER)
            return bench.run()

        assert bench.run() == ([], []), "it is exempt"
        assert change("ReservationName=") == (["written"], [])
        assert change("JobName=jupyter-lab") == (["withdrawn"], [])
        assert change("JobName=x*\njupyter") == (["written"], []), "the pattern begins at the name's beginning"
        assert change("JobName=jupyter" + "*" * 900) == (["withdrawn"], [])
        assert change("JobName=") == (["written"], [])
        assert change("ReservationName=course-101") == (["withdrawn"], [])


def test_a_job_of_two_reservations_is_marked_only_if_no_policy_matches_one_of_them(
    cluster: Cluster, bench: Bench
) -> None:
    bench.rules = [COURSE]
    bench.restart()
    with reserved(cluster, "course-101", "lab-1", "lab-2"):
        jobs = [run_job(cluster, f"--reservation={names}") for names in ("lab-1,course-101", "lab-1,lab-2")]
        bench.runs = {job: (start, 2.5) for job, start in jobs}
        assert bench.run() == (["written"], [])
        assert [bool(cluster.read(job)) for job, _ in jobs] == [False, True]


def test_a_name_of_another_encoding_hides_no_other_job(cluster: Cluster, bench: Bench) -> None:
    bench.rules = [NOTEBOOKS]
    bench.restart()
    jobs = [run_job(cluster, f"--job-name={name}") for name in ("odd", "train")]
    (odd, _), (plain, _) = jobs
    command = [b"scontrol", b"update", f"JobId={odd}".encode(), b"JobName=jupyter\xe9"]
    subprocess.run(command, env=cluster.slurm.environment, check=True, timeout=60)
    bench.runs = {job: (start, 2.5) for job, start in jobs}
    writes = bench.run()
    cluster.slurm.run(
        "scontrol", "update", f"JobId={odd}", "JobName=train"
    )  # other commands of the test read it as UTF-8
    assert writes == (["written"], [])
    assert [bool(cluster.read(job)) for job in (odd, plain)] == [False, True]


def test_tasks_have_the_name_of_their_array_and_a_requeued_job_keeps_its_name(cluster: Cluster, bench: Bench) -> None:
    bench.rules = [NOTEBOOKS]
    bench.restart()
    array = cluster.slurm.submit("--gres=gpu:1", "--array=0-1", "--job-name=jupyter")
    tasks = cluster.slurm.run("squeue", "-h", "-r", "-j", array, "-O", "JobID:20").split()
    job, _ = run_job(cluster, "--requeue", "--job-name=jupyter")
    cluster.slurm.requeue(job)
    cluster.slurm.run_again(job)
    wait_for(lambda: time.time() - cluster.start_of(job) > 3, "the job to be a few seconds old")
    bench.runs = {each: (cluster.start_of(each), 2.5) for each in (*tasks, job)}
    assert len(bench.runs) == 3
    assert bench.run() == ([], [])
    bench.rules = ()
    bench.restart()
    assert bench.run() == (["written"] * 3, [])


@of_one_release
def test_components_have_their_own_values_and_the_longest_windows_apply_to_all(
    cluster: Cluster, bench: Bench, tmp_path: Path
) -> None:
    cluster.slurm.run("scontrol", "create", "PartitionName=debug", "Nodes=ALL", "State=UP")
    quick = "- name: quick\n  match: {partitions: [debug], job_names: [one]}\n  candidate_after: 1s\n  underused_after: 2s\n"
    late = "- name: late\n  match: {partitions: [gpu]}\n  underused_after: 90m\n"
    settings = tmp_path / "config.yaml"
    settings.write_text(
        f"policy: {{candidate_after: 2s, underused_after: 1h, startup_grace: 1s}}\npolicies:\n{quick}{late}"
    )
    flags = ("--gres=gpu:1", "-p", "debug", "--job-name=one", ":", "-n1", "--gres=gpu:1", "-p", "gpu", "--job-name=two")
    leader = cluster.slurm.submit(*flags)
    (other,) = set(cluster.slurm.run("squeue", "-h", "-j", leader, "-O", "JobID:20").split()) - {leader}
    assert [cluster.row(job)["partition"] for job in (leader, other)] == ["debug", "gpu"]
    wait_for(lambda: time.time() - cluster.start_of(other) > 3, "the components to be a few seconds old")
    labels = 'slurm_cluster="lab",user="ada",het_job_id="{}",het_job_offset="{}",partition="{}"'
    held = {
        leader: (cluster.start_of(leader), labels.format(leader, 0, "debug")),
        other: (cluster.start_of(other), labels.format(leader, 1, "gpu")),
    }
    audit = tmp_path / "audit.jsonl"
    with serve_page(lambda: page_of(held)) as address:
        command = (
            f"--source.exporter={address}",
            "--no-kubernetes",
            f"--config.file={settings}",
            f"--audit.file={audit}",
        )
        done = run_exporter("explain", f"job/{leader}", *command[:3], environment=cluster.slurm.environment)
        assert (
            "  policy quick (partition 'debug', job name 'one'): candidate after 1s, underused after 2s" in done.stdout
        )
        assert "stage candidate: " in done.stdout, "the windows of the other component count too"
        done = run_exporter("explain", f"job/{other}", *command[:3], environment=cluster.slurm.environment)
        assert "  policy late (partition 'gpu'): candidate after 2s, underused after 90m" in done.stdout
        run_exporter("reconcile", "--once", "--apply", *command, environment=cluster.slurm.environment)
    lines = [json.loads(line) for line in audit.read_text("utf-8").splitlines()]
    assert {(line["name"], line["stage"], line["rule"], line["rule_why"]) for line in lines} == {
        (leader, "candidate", "quick", "partition 'debug', job name 'one'"),
        (other, "candidate", "late", "partition 'gpu'"),
    }
