"""Actions on jobs of a real Slurm: requeued where they asked for it, cancelled where the site allows it, and once."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from gpu_exporter.clock import SYSTEM_CLOCK
from gpu_exporter.defaults import Actions
from gpu_exporter.reconciler.actions.runner import ActionRunner
from gpu_exporter.reconciler.cycle import Cycle
from gpu_exporter.reconciler.judge import judge_of
from gpu_exporter.reconciler.marks import MarkError
from gpu_exporter.reconciler.rulebook import Rulebook
from gpu_exporter.reconciler.slurm.actor import JobActor
from gpu_exporter.reconciler.slurm.marker import JobMarker, run_slurm
from tests.component.test_jobs_marked import POLICY, Bench, Cluster, cluster, marker, run_job  # noqa: F401  # fixtures
from tests.component.test_pods_taken_back import Died, SaidProofs
from tests.testbed.processes import wait_for
from tests.testbed.slurm import USER

pytestmark = pytest.mark.slurm
ACT = Actions(mode="act", kinds="requeue, cancel", warned_for=0.0, cycle_max=5, hour_max=100)
IDLE_S = 2.5
OK = "--comment=gpu-requeue-ok, from a checkpoint"


class Desk(Bench):
    """A reconciler that acts on jobs."""

    settings = ACT

    def __init__(self, marker: JobMarker) -> None:  # noqa: F811
        self.proofs = SaidProofs()
        self.done: list[tuple[str, str]] = []
        self.held: set[str] = set()
        self.commands: list[str] = []
        self.run_command: Any = run_slurm
        super().__init__(marker)

    def count_action(self, action: str, result: str) -> None:
        self.done.append((action, result))

    def count_held(self, reason: str) -> None:
        self.held.add(reason)

    def command(self, *command: str) -> str:
        self.commands.append(" ".join(command))
        return str(self.run_command(*command))

    def restart(self) -> None:
        runner = ActionRunner(
            self.settings,
            self.proofs,  # type: ignore[arg-type]  # as the real one answers, which test_proofs shows
            [JobActor(self.marker, POLICY, self.command)],
            {"slurm": self.marker},
            self,
            self.clock,
            None,
            lambda: True,
        )
        judge = judge_of(self, [self.marker], Rulebook(POLICY), self.clock)
        self.cycle = Cycle(judge, [self.marker], POLICY, self, self.clock, act=runner.run)

    def act(self) -> tuple[list[tuple[str, str]], set[str]]:
        """A cycle that marks, and one that may act."""
        self.done, self.held = [], set()
        self.run()
        self.run()
        return self.done, self.held


@pytest.fixture
def desk(cluster: Cluster, marker: JobMarker) -> Iterator[Desk]:  # noqa: F811
    """Marks go to AdminComment, as by default."""
    made = Desk(JobMarker(SYSTEM_CLOCK, POLICY))
    assert marker.fields == [cluster.field] and made.marker.fields[0] == "AdminComment"
    yield made
    cluster.slurm.cancel_all()


def read_mark(cluster: Cluster, job: str) -> str:  # noqa: F811
    return cluster.read(job, "AdminComment")


def state(cluster: Cluster, job: str) -> str:  # noqa: F811
    """The state of a job, "" when squeue lists it no more or calls it ended."""
    lines = cluster.slurm.run("squeue", "-h", "-a", "-t", "all", "-o", "%i %T").splitlines()
    found = dict(line.split() for line in lines)
    word = found.get(job, "")
    return "" if word in ("CANCELLED", "COMPLETING") else word


def idle_job(cluster: Cluster, desk: Desk, *flags: str) -> str:  # noqa: F811
    job, start = run_job(cluster, *flags)
    desk.runs[job] = (start, IDLE_S)
    return job


def test_a_job_that_asked_for_it_is_requeued_once_for_each_run(cluster: Cluster, desk: Desk) -> None:  # noqa: F811
    job = idle_job(cluster, desk, OK)
    done, held = desk.act()
    assert done in ([("requeue", "done")], [("requeue", "unconfirmed")]) and held == set()
    assert desk.commands == [f"scontrol requeue Incomplete {job}"]
    wait_for(lambda: state(cluster, job) == "PENDING", "the requeued job", 30)
    assert desk.act()[0] == []
    cluster.slurm.run_again(job)
    desk.runs[job] = (cluster.start_of(job), 0.0)
    assert desk.act()[0] == []
    assert "acted" not in read_mark(cluster, job), "the mark of its last run is gone"
    assert len(desk.commands) == 1


def test_another_job_is_cancelled_only_where_the_site_allows_it(cluster: Cluster, desk: Desk) -> None:  # noqa: F811
    job = idle_job(cluster, desk, "--comment=no gpu-requeue-okay")
    desk.settings = ACT._replace(kinds="requeue")
    desk.restart()
    assert desk.act() == ([], {"kind"})
    assert state(cluster, job) == "RUNNING"
    desk.settings = ACT
    desk.restart()
    done, _ = desk.act()
    assert done in ([("cancel", "done")], [("cancel", "unconfirmed")])
    wait_for(lambda: state(cluster, job) == "", "the end of the job", 30)


def test_a_job_that_may_not_be_requeued_is_not(cluster: Cluster, desk: Desk) -> None:  # noqa: F811
    job = idle_job(cluster, desk, OK, "--no-requeue")
    desk.settings = ACT._replace(kinds="requeue")
    desk.restart()
    assert desk.act() == ([], {"kind"})
    assert state(cluster, job) == "RUNNING" and desk.commands == []


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_process_that_dies_at_the_command_leaves_a_note_and_tells_nobody_twice(
    cluster: Cluster,  # noqa: F811
    desk: Desk,
    moment: str,
) -> None:
    job = idle_job(cluster, desk)

    def die(*command: str) -> str:
        if moment == "after":
            run_slurm(*command)
        raise Died

    desk.run_command = die
    desk.restart()
    with pytest.raises(Died):
        desk.act()
    assert len(desk.commands) == 1
    desk.run_command = run_slurm
    desk.restart()
    if moment == "before":
        assert ";acted=cancel@20" in read_mark(cluster, job)
        assert desk.act() == ([], {"acted"})
        assert state(cluster, job) == "RUNNING"
    else:
        wait_for(lambda: state(cluster, job) == "", "the end of the job", 30)
        assert desk.act()[0] == []
    assert len(desk.commands) == 1


def test_the_note_lasts_through_renewals_and_goes_with_the_mark(cluster: Cluster, desk: Desk) -> None:  # noqa: F811
    job = idle_job(cluster, desk)

    def refuse(*command: str) -> str:
        raise MarkError("error", "scancel: no")

    desk.run_command = refuse
    desk.restart()
    assert desk.act()[0] == [("cancel", "error")]
    desk.clock.later += 0.5 * POLICY.unsupported_max
    desk.runs[job] = (cluster.start_of(job), IDLE_S)
    assert desk.run()[0] == ["renewed"]
    assert ";acted=cancel@20" in read_mark(cluster, job) and len(desk.commands) == 1
    desk.runs[job] = (cluster.start_of(job), 0.0)
    assert desk.run()[0] == ["withdrawn"]
    assert "acted" not in read_mark(cluster, job)


def test_a_wish_of_the_last_moment_is_heard(cluster: Cluster, desk: Desk) -> None:  # noqa: F811
    job = idle_job(cluster, desk)
    desk.run()
    listed = desk.marker.list_marks()
    cluster.slurm.run("scontrol", "update", f"JobId={job}", "Comment=gpu-keep=4h:evaluation", user=USER)
    desk.marker.list_marks = lambda: listed  # type: ignore[method-assign]  # as the cycle saw it a moment before
    desk.marker._jobs_of_this_cycle = lambda: [mark.live for mark in listed]  # type: ignore[method-assign]
    desk.run()
    assert desk.held == {"exempt"} and desk.commands == []


def test_a_mark_that_went_in_the_last_moment_is_no_reason_to_act(cluster: Cluster, desk: Desk) -> None:  # noqa: F811
    job = idle_job(cluster, desk)
    desk.run()
    listed = desk.marker.list_marks()
    cluster.slurm.run("scontrol", "update", f"JobId={job}", "AdminComment=")
    desk.marker.list_marks = lambda: listed  # type: ignore[method-assign]
    desk.run()
    assert (desk.held, desk.commands, read_mark(cluster, job)) == ({"changed"}, [], "")


def test_another_run_than_the_one_that_was_decided_on_is_left_alone(cluster: Cluster, desk: Desk) -> None:  # noqa: F811
    job = idle_job(cluster, desk)
    desk.run()
    read = desk.marker.read
    # As where it was requeued, and runs again, since the list of the cycle: the mark of its last run is still there.
    desk.marker.read = lambda job_id: read(job_id)._replace(start=read(job_id).start + 100.0)  # type: ignore[method-assign]
    desk.run()
    assert (desk.held, desk.commands) == ({"replaced"}, [])
    assert state(cluster, job) == "RUNNING"


def test_what_cannot_be_noted_is_not_done(
    cluster: Cluster,  # noqa: F811
    desk: Desk,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = idle_job(cluster, desk)
    desk.run()
    monkeypatch.setattr(desk.marker, "update", lambda target, texts: None)  # as where somebody writes it back at once
    desk.run()
    assert desk.done == [("cancel", "refused")] and desk.commands == []
    assert state(cluster, job) == "RUNNING"


def test_where_marks_are_in_another_field_the_note_is_there_too(
    cluster: Cluster,  # noqa: F811
    desk: Desk,
    marker: JobMarker,  # noqa: F811
) -> None:
    job = idle_job(cluster, desk)
    desk.marker = marker
    desk.run_command = lambda *command: ""  # as a command that has no effect
    desk.restart()
    assert desk.act()[0] == [("cancel", "unconfirmed")]
    assert ";acted=cancel@20" in cluster.read(job)
    assert desk.act() == ([], {"acted"})


def test_one_component_of_a_heterogeneous_job_is_not_taken_out_of_it(cluster: Cluster, desk: Desk) -> None:  # noqa: F811
    leader = cluster.slurm.submit("--gres=gpu:1", ":", "-n1", "--gres=gpu:1")
    jobs = [leader, str(int(leader) + 1)]
    start = cluster.start_of(leader)
    wait_for(lambda: time.time() - start > 3, "the job to be a few seconds old")
    for job in jobs:
        desk.runs[job] = (start, IDLE_S)
    assert desk.act() == ([], {"kind"})
    assert all(read_mark(cluster, job).startswith("gpu-exporter.io/utilization=underused") for job in jobs)
    assert desk.commands == []


def test_a_heterogeneous_job_with_gpus_in_one_component_is_left_alone(cluster: Cluster, desk: Desk) -> None:  # noqa: F811
    leader = cluster.slurm.submit("-n1", ":", "-n1", "--gres=gpu:1")
    job = str(int(leader) + 1)
    start = cluster.start_of(leader)
    wait_for(lambda: time.time() - start > 3, "the job to be a few seconds old")
    desk.runs[job] = (start, IDLE_S)
    assert desk.act() == ([], {"kind"})
    assert read_mark(cluster, job).startswith("gpu-exporter.io/utilization=underused")
    assert desk.commands == [] and state(cluster, f"{leader}+0") == "RUNNING"


def test_a_job_that_was_requeued_before_is_neither_requeued_nor_cancelled(cluster: Cluster, desk: Desk) -> None:  # noqa: F811
    job = idle_job(cluster, desk, OK)
    cluster.slurm.requeue(job)
    cluster.slurm.run_again(job)
    start = cluster.start_of(job)
    wait_for(lambda: time.time() - start > 3, "the job to be a few seconds old")
    desk.runs[job] = (start, IDLE_S)
    assert desk.act() == ([], {"requeued"})
    assert desk.commands == [] and state(cluster, job) == "RUNNING"
