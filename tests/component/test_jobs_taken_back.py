"""Actions on jobs of a real Slurm: requeued if the job allows it, cancelled if the site allows it, and only once."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_exporter.common.clock import SYSTEM_CLOCK
from gpu_exporter.common.config.defaults import Actions
from gpu_exporter.reconciler.actions.acts import UNCONFIRMED_S, Acts
from gpu_exporter.reconciler.actions.ends import Ends
from gpu_exporter.reconciler.actions.gates import Gates
from gpu_exporter.reconciler.actions.journal import KEY, Journal, parse
from gpu_exporter.reconciler.actions.runner import ActionRunner, Parts
from gpu_exporter.reconciler.actor import ENDING
from gpu_exporter.reconciler.cycle import CycleHooks, ReconcileCycle
from gpu_exporter.reconciler.decision.policy import Decision
from gpu_exporter.reconciler.decision.rulebook import Rulebook
from gpu_exporter.reconciler.evidence.records import Evidence, HolderName, HostLimits
from gpu_exporter.reconciler.judge import judge_of
from gpu_exporter.reconciler.marks import MarkError
from gpu_exporter.reconciler.slurm.actor import JobActor
from gpu_exporter.reconciler.slurm.marker import JobMarker, run_slurm
from gpu_exporter.reconciler.texts import TextFiles
from tests.component.taken_back.team import Died
from tests.component.test_jobs_marked import (  # noqa: F401  # fixtures
    POLICY,
    Bench,
    Cluster,
    cluster,
    marker,
    of_one_release,
    run_job,
)
from tests.testbed.processes import wait_for
from tests.testbed.proven import SaidProofs, SaidRecord
from tests.testbed.slurm import USER

pytestmark = pytest.mark.slurm
# The other tests try the commands of Slurm with every release.
ACT = Actions(mode="act", kinds="requeue, cancel", warned_for=0.0, cycle_max=5, hour_max=16)
IDLE_S = 2.5
KILL_WAIT_S = 30.0  # Slurm's default
OK = "--comment=gpu-requeue-ok, from a checkpoint"
STRANGER = "daemon"


class Desk(Bench):
    """A reconciler that acts on jobs and keeps its journal in a directory."""

    settings = ACT

    def __init__(self, marker: JobMarker, texts: TextFiles) -> None:  # noqa: F811
        self.proofs, self.said, self.texts = SaidProofs("gpu"), SaidRecord(), texts
        self.done: list[tuple[str, str]] = []
        self.held: set[str] = set()
        self.commands: list[str] = []
        self.run_command: Any = run_slurm
        super().__init__(marker)

    def count_action(self, action: str, result: str) -> None:
        self.done.append((action, result))

    def count_not_acted(self, reason: str) -> None:
        self.held.add(reason)

    def note_spared(self, decisions: Collection[Decision], reason: str) -> None:
        pass

    def read_holders(self, names: Collection[HolderName]) -> Evidence:
        evidence = self.read_evidence()
        return evidence._replace(holders=tuple(each for each in evidence.holders if each.name in names))

    def command(self, *command: str) -> str:
        self.commands.append(" ".join(command))
        return str(self.run_command(*command))

    def restart(self) -> None:
        """Continue as a new process, which knows only the texts on the jobs and the journal."""
        actors: Any = {"slurm": JobActor(self.marker, POLICY, self.command)}
        proofs: Any = self.proofs  # answers like the real one (see test_proofs)
        record: Any = self.said
        judge = judge_of(self, [self.marker], Rulebook(POLICY))
        parts = Parts(
            proofs,
            Gates(self.settings, proofs, record, HostLimits(0.25, 20e6), self.clock),
            Acts(Journal(self.texts), actors, Ends(actors, proofs), record, None, self, self.clock, ACT.grace_max),
            actors,
            {"slurm": self.marker},
            judge.look_again,
            lambda: True,
        )
        runner = ActionRunner(self.settings, parts, self, self.clock)
        self.cycle = ReconcileCycle(judge, [self.marker], POLICY, self, self.clock, CycleHooks(act=runner.run))

    def act(self, cycles: int = 2) -> tuple[list[tuple[str, str]], set[str]]:
        """Run a cycle that marks, and then a cycle that may act."""
        self.done, self.held = [], set()
        for _ in range(cycles):
            self.run()
        return self.done, self.held

    def act_until_known(self) -> tuple[list[tuple[str, str]], set[str]]:
        """The same, until the outcome of the action is known."""
        done, held = self.act()

        def is_known() -> bool:
            self.run()
            return not any(entry.is_open for entry in parse(self.texts.read_text(KEY)))

        wait_for(is_known, "the end of what was begun", each_s=0.3)
        return done, held


@pytest.fixture
def desk(
    cluster: Cluster,  # noqa: F811
    marker: JobMarker,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Desk]:
    """Marks are in AdminComment, the default. The unit tests check how long the reconciler watches an outcome."""
    monkeypatch.setattr("gpu_exporter.reconciler.actions.gates.REGRET_S", 0.0)
    made = Desk(JobMarker(SYSTEM_CLOCK, POLICY), TextFiles(tmp_path / "state"))
    assert marker.fields == [cluster.field] and made.marker.fields[0] == "AdminComment"
    yield made
    cluster.slurm.cancel_all()


def read_mark(cluster: Cluster, job: str) -> str:  # noqa: F811
    return cluster.read(job, "AdminComment")


def state(cluster: Cluster, job: str) -> str:  # noqa: F811
    """The state of a job, "" if squeue no longer lists it or reports its end."""
    lines = cluster.slurm.run("squeue", "-h", "-a", "-t", "all", "-o", "%i %T").splitlines()
    found = dict(line.split() for line in lines)
    word = found.get(job, "")
    return "" if word in ("CANCELLED", "COMPLETING") else word


def idle_job(cluster: Cluster, desk: Desk, *flags: str) -> str:  # noqa: F811
    job, start = run_job(cluster, *flags)
    desk.runs[job] = (start, IDLE_S)
    return job


def test_a_job_that_allows_a_requeue_is_requeued_only_once(cluster: Cluster, desk: Desk) -> None:  # noqa: F811
    job = idle_job(cluster, desk, OK)
    cluster.slurm.run("scontrol", "update", "PartitionName=gpu", "State=DOWN")  # starts no job, also not this one again
    try:
        assert desk.act_until_known() == ([("requeue", "done")], set())
        assert desk.commands == [f"scontrol requeue Incomplete {job}"]
        wait_for(lambda: state(cluster, job) == "PENDING", "the requeued job")
        assert desk.act()[0] == []
    finally:
        cluster.slurm.run("scontrol", "update", "PartitionName=gpu", "State=UP")
    cluster.slurm.run_again(job)
    desk.runs[job] = (cluster.start_of(job), 0.0)
    assert desk.act()[0] == []
    assert "acted" not in read_mark(cluster, job), "the mark of its last run is gone"
    wait_for(lambda: time.time() - cluster.start_of(job) > 3, "the job to be a few seconds old")
    desk.runs[job] = (cluster.start_of(job), IDLE_S)
    assert desk.act() == ([], {"requeued"}), "one that stages its data for longer would never end"
    assert len(desk.commands) == 1 and state(cluster, job) == "RUNNING", "it is not cancelled instead"


def test_a_job_is_cancelled_only_if_the_site_allows_it(cluster: Cluster, desk: Desk) -> None:  # noqa: F811
    job = idle_job(cluster, desk, "--comment=no gpu-requeue-okay")
    desk.settings = ACT._replace(kinds="requeue")
    desk.restart()
    assert desk.act() == ([], {"kind"})
    assert state(cluster, job) == "RUNNING"
    desk.settings = ACT
    desk.restart()
    assert desk.act_until_known() == ([("cancel", "done")], set())
    wait_for(lambda: state(cluster, job) == "", "the end of the job")


@of_one_release
def test_a_job_that_cannot_be_requeued_is_not_requeued(cluster: Cluster, desk: Desk) -> None:  # noqa: F811
    job = idle_job(cluster, desk, OK, "--no-requeue")
    desk.settings = ACT._replace(kinds="requeue")
    desk.restart()
    assert desk.act() == ([], {"kind"})
    assert state(cluster, job) == "RUNNING" and desk.commands == []


@of_one_release
@pytest.mark.parametrize(("verb", "comment"), [("requeue", OK), ("cancel", "--comment=x")])
def test_an_action_is_open_while_a_job_that_ignores_sigterm_still_has_its_gpu(
    cluster: Cluster,  # noqa: F811
    desk: Desk,
    verb: str,
    comment: str,
) -> None:
    """Slurm kills it after KillWait."""
    script = cluster.slurm.root / "stubborn.sh"
    script.write_text("#!/bin/sh\ntrap '' TERM\nwhile :; do sleep 1; done\n", encoding="utf-8")
    script.chmod(0o755)
    job = cluster.slurm.submit_script(script, "-n1", "--gres=gpu:1", comment)
    cluster.slurm.wait_until_runs(job)
    wait_for(lambda: time.time() - cluster.start_of(job) > 3, "the job to be a few seconds old")
    desk.runs[job] = (cluster.start_of(job), IDLE_S)
    desk.settings = ACT._replace(grace_max=KILL_WAIT_S - 1.0)
    desk.restart()
    assert desk.act() == ([], {"grace"})
    desk.settings = ACT
    desk.restart()
    assert desk.act(1) == ([], set())
    wait_for(lambda: "COMPLETING" in str(cluster.row(job)["job_state"]), "Slurm to end the job")
    desk.restart()
    assert desk.act(1)[0] == []
    (entry,) = parse(desk.texts.read_text(KEY))
    assert entry.told == ENDING and entry.until_wall - entry.wall == KILL_WAIT_S + UNCONFIRMED_S
    assert desk.act_until_known()[0] == [(verb, "done")]
    assert time.time() - entry.wall > 25.0 and len(desk.commands) == 1


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_crash_at_the_command_does_not_notify_the_owner_twice(cluster: Cluster, desk: Desk, moment: str) -> None:  # noqa: F811
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
        assert desk.act() == ([], {"pending"}), "a command may still be on its way"
        desk.clock.later += KILL_WAIT_S + UNCONFIRMED_S
        desk.runs[job] = (cluster.start_of(job), IDLE_S)
        assert desk.act() == ([("cancel", "unconfirmed")], {"acted"})
        assert state(cluster, job) == "RUNNING"
    else:
        wait_for(lambda: state(cluster, job) == "", "the end of the job")
        assert desk.act_until_known()[0] == [("cancel", "done")]
    assert len(desk.commands) == 1


def test_a_job_that_ended_by_itself_does_not_count_as_cancelled(cluster: Cluster, desk: Desk) -> None:  # noqa: F811
    job = idle_job(cluster, desk)

    def end(*command: str) -> str:
        cluster.slurm.run("scancel", "--signal=TERM", "--batch", job)  # this ends the job's script
        wait_for(lambda: state(cluster, job) != "RUNNING", "the end of the job")
        raise Died

    desk.run_command = end
    desk.restart()
    with pytest.raises(Died):
        desk.act()
    desk.restart()
    assert desk.act_until_known()[0] == [("cancel", "replaced")]


@of_one_release
def test_the_note_of_an_act_remains_until_the_mark_is_removed(cluster: Cluster, desk: Desk) -> None:  # noqa: F811
    job = idle_job(cluster, desk)

    def refuse(*command: str) -> str:
        raise MarkError("error", "scancel: no")

    desk.run_command = refuse
    desk.restart()
    assert desk.act() == ([], set())
    desk.clock.later += KILL_WAIT_S + UNCONFIRMED_S
    desk.runs[job] = (cluster.start_of(job), IDLE_S)
    assert desk.run()[0] == ["renewed"]
    assert desk.done == [("cancel", "unconfirmed")]
    assert ";acted=cancel@20" in read_mark(cluster, job) and len(desk.commands) == 1
    desk.runs[job] = (cluster.start_of(job), 0.0)
    assert desk.run()[0] == ["withdrawn"]
    assert "acted" not in read_mark(cluster, job)


@of_one_release
def test_an_exemption_since_the_list_was_read_prevents_the_act(cluster: Cluster, desk: Desk) -> None:  # noqa: F811
    job = idle_job(cluster, desk)
    desk.run()
    listed = desk.marker.list_marks()
    cluster.slurm.run("scontrol", "update", f"JobId={job}", "Comment=gpu-keep=4h:evaluation", user=USER)
    desk.marker.list_marks = lambda: listed  # type: ignore[method-assign]  # the list that the cycle read a moment before
    desk.marker._jobs_of_this_cycle = lambda: [mark.live for mark in listed]  # type: ignore[method-assign]
    desk.run()
    assert desk.held == {"exempt"} and desk.commands == []


@of_one_release
def test_an_exemption_right_before_the_command_prevents_the_act(cluster: Cluster, desk: Desk) -> None:  # noqa: F811
    job = idle_job(cluster, desk)
    desk.run()
    set_text = desk.marker.set_text

    def wish(*what: Any) -> None:
        set_text(*what)
        cluster.slurm.run("scontrol", "update", f"JobId={job}", "Comment=gpu-keep=4h", user=USER)

    desk.marker.set_text = wish  # type: ignore[method-assign]
    desk.run()
    assert desk.done == [("cancel", "refused")] and desk.commands == []
    assert state(cluster, job) == "RUNNING"


@of_one_release
def test_a_mark_removed_since_the_list_was_read_prevents_the_act(cluster: Cluster, desk: Desk) -> None:  # noqa: F811
    job = idle_job(cluster, desk)
    desk.run()
    listed = desk.marker.list_marks()
    cluster.slurm.run("scontrol", "update", f"JobId={job}", "AdminComment=")
    desk.marker.list_marks = lambda: listed  # type: ignore[method-assign]
    desk.run()
    assert (desk.held, desk.commands, read_mark(cluster, job)) == ({"changed"}, [], "")


@of_one_release
def test_the_reconciler_does_not_act_on_a_later_run_of_the_job(cluster: Cluster, desk: Desk) -> None:  # noqa: F811
    job = idle_job(cluster, desk)
    desk.run()
    read = desk.marker.read
    # The job was requeued and runs again since the cycle's list was read. It still has the mark of its last run.
    desk.marker.read = lambda job_id, **_: read(job_id)._replace(start=read(job_id).start + 100.0)  # type: ignore[method-assign]
    desk.run()
    assert (desk.done, desk.commands) == ([("cancel", "refused")], [])
    assert state(cluster, job) == "RUNNING"


@of_one_release
def test_an_act_that_cannot_be_noted_is_not_done(
    cluster: Cluster,  # noqa: F811
    desk: Desk,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = idle_job(cluster, desk)
    desk.run()
    monkeypatch.setattr(
        desk.marker, "update", lambda target, texts: None
    )  # as if another program reverted the text at once
    desk.run()
    assert desk.done == [("cancel", "refused")] and desk.commands == []
    assert state(cluster, job) == "RUNNING"


@of_one_release
def test_the_note_of_an_act_is_in_the_same_field_as_the_mark(
    cluster: Cluster,  # noqa: F811
    desk: Desk,
    marker: JobMarker,  # noqa: F811
) -> None:
    job = idle_job(cluster, desk)
    desk.marker = marker
    desk.run_command = lambda *command: ""  # a command without an effect
    desk.restart()
    assert desk.act() == ([], set())
    assert ";acted=cancel@20" in cluster.read(job)
    assert desk.act(1) == ([], {"pending"})
    desk.clock.later += KILL_WAIT_S + UNCONFIRMED_S
    desk.runs[job] = (cluster.start_of(job), IDLE_S)
    assert desk.act(1) == ([("cancel", "unconfirmed")], {"acted"})


@of_one_release
def test_a_job_with_a_false_note_of_an_act_is_left_alone(cluster: Cluster, desk: Desk) -> None:  # noqa: F811
    job = idle_job(cluster, desk)
    desk.run()
    by_hand = f"AdminComment={read_mark(cluster, job)};acted=cancel@2026-01-01T00:00:00Z.0a0b"
    cluster.slurm.run("scontrol", "update", f"JobId={job}", by_hand)
    assert desk.act() == ([], {"noted"})
    assert desk.commands == []


def het_job(cluster: Cluster, desk: Desk, *parts: str) -> list[str]:  # noqa: F811
    """Start a job whose components have one GPU or none. The components with a GPU are idle."""
    flags: list[str] = []
    for part in parts:
        flags += [*([":", "-n1"] if flags else []), *([f"--gres=gpu:{part}"] if part else []), "--comment=x"]
    leader = cluster.slurm.submit(*flags)
    jobs = [str(int(leader) + at) for at in range(len(parts))]
    start = cluster.start_of(leader)
    wait_for(lambda: time.time() - start > 3, "the job to be a few seconds old")
    for job, part in zip(jobs, parts, strict=True):
        if part:
            desk.runs[job] = (start, IDLE_S)
    return jobs


def test_all_components_of_a_heterogeneous_job_are_one_target(cluster: Cluster, desk: Desk) -> None:  # noqa: F811
    jobs = het_job(cluster, desk, "1", "1")
    start = desk.runs[jobs[0]][0]
    desk.runs[jobs[1]] = (start, 0.0)
    assert desk.act()[0] == [] and desk.commands == [], "one component works"
    desk.runs[jobs[1]] = (start, IDLE_S)
    assert desk.act_until_known() == ([("cancel", "done")], set())
    assert desk.commands == [f"scancel --state=RUNNING {jobs[0]}"]
    wait_for(lambda: all(state(cluster, f"{jobs[0]}+{at}") == "" for at in (0, 1)), "the end of both")


@of_one_release
@pytest.mark.parametrize("parts", [("", "1"), ("1", "")])
def test_an_unknown_component_without_gpus_protects_the_whole_job(
    cluster: Cluster,  # noqa: F811
    desk: Desk,
    parts: tuple[str, ...],
) -> None:
    """The exporter has no series about the work of a component without a GPU."""
    jobs = het_job(cluster, desk, *parts)
    assert desk.act() == ([], {"beside"})
    assert desk.commands == [] and state(cluster, f"{jobs[0]}+0") == "RUNNING"


def test_a_job_that_another_job_depends_on_is_not_cancelled(cluster: Cluster, desk: Desk) -> None:  # noqa: F811
    job = idle_job(cluster, desk)
    other = cluster.slurm.submit(f"--dependency=afterok:{job}", runs=False)
    assert desk.act() == ([], {"above"})
    cluster.slurm.run("scancel", other)
    wait_for(lambda: state(cluster, other) == "", "the other one to go")
    desk.marker._recent = None
    assert desk.act_until_known() == ([("cancel", "done")], set())


@of_one_release
def test_a_job_that_was_requeued_before_is_neither_requeued_nor_cancelled(cluster: Cluster, desk: Desk) -> None:  # noqa: F811
    job = idle_job(cluster, desk, OK)
    cluster.slurm.requeue(job)
    cluster.slurm.run_again(job)
    start = cluster.start_of(job)
    wait_for(lambda: time.time() - start > 3, "the job to be a few seconds old")
    desk.runs[job] = (start, IDLE_S)
    assert desk.act() == ([], {"requeued"})
    assert desk.commands == [] and state(cluster, job) == "RUNNING"


WORDS = st.sampled_from(
    ("gpu-keep=4h", "gpu-requeue-ok", "gpu-exporter.io/utilization=underused;acted=cancel@2026", "x", "sys/dashboard/x")
)
SUBMISSIONS = st.lists(
    st.tuples(
        st.sampled_from(("", "--array=0-1", "het")),
        st.sampled_from(("", "afterok", "afterany", "after", "singleton")),
        WORDS,
        WORDS,
    ),
    min_size=1,
    max_size=3,
)


def test_jobs_of_a_stranger_do_not_affect_the_jobs_of_others(cluster: Cluster, desk: Desk) -> None:  # noqa: F811
    """The stranger chooses names, Comments, arrays, components, and dependencies on another user's job."""
    job = idle_job(cluster, desk, "--comment=honest", "--job-name=honest")
    desk.run()
    actor, jobs = JobActor(desk.marker, POLICY), desk.marker.list_marks
    wall = time.time()
    names = [HolderName("slurm", "", job)]

    def look() -> tuple[Any, ...]:
        desk.marker._recent = None
        jobs()
        target = actor.read(reference, "", ("cancel",), IDLE_S, wall)
        return target._replace(live=None), desk.marker.survey(names, names, wall)[names[0]]

    first = desk.marker.survey(names, names, wall)[names[0]]
    reference = first.target
    honest = look()

    @settings(max_examples=6, deadline=None)
    @given(SUBMISSIONS)
    def meddle(submissions: list[tuple[str, str, str, str]]) -> None:
        made = []
        for shape, dependency, name, comment in submissions:
            flags = [f"--job-name={name}", f"--comment={comment}", "--hold"]
            if dependency:
                flags.append(f"--dependency={dependency}" + ("" if dependency == "singleton" else f":{job}"))
            if shape == "het":
                flags += [":", "-n1", f"--comment={comment}"]
            elif shape:
                flags.append(shape)
            made.append(cluster.slurm.submit(*flags, runs=False, user=STRANGER))
        assert look() == honest, submissions
        for each in made:
            cluster.slurm.run("scancel", each)

    meddle()
