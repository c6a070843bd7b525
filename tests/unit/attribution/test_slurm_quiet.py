"""How rarely the Slurm source asks the controller, and what it knows in between."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.attribution.slurm_cluster import SINFO, fail
from tests.unit.attribution.slurm_quiet_node import ONE, Filing, Node, start_slurmd

from gpu_exporter.agent.attribution.source import SourceError


def test_a_quiet_node_asks_for_its_own_record_once_a_minute(node: Node) -> None:
    node.begin(j1=ONE)
    node.source.poll()
    assert node.questions(240) == [SINFO] * 4


def test_each_job_is_asked_for_again_within_minutes(node: Node) -> None:
    node.begin(j1=ONE)
    node.source.poll()
    assert len([text for text in node.questions(600) if "squeue" in text]) == 2


def test_a_job_that_begins_is_known_at_the_next_poll(node: Node) -> None:
    node.source.poll()
    node.questions(20)
    node.begin(j1=ONE)
    node.clock.advance(5.0)
    assert node.grants() == [("job 1", "minor", "0")]


def test_a_job_that_begins_on_a_gpu_of_which_another_job_has_a_shard_is_known_at_the_next_poll(node: Node) -> None:
    shard = "shard:h100:1(1/4,0/4,0/4,0/4)"
    node.begin(j1=shard)
    node.source.poll()
    node.questions(20)
    node.begin(j1=shard, j2=shard)
    node.used = "shard:h100:2(2/4,0/4,0/4,0/4)"
    node.clock.advance(5.0)
    assert node.grants() == [("job 1", "minor", "0"), ("job 2", "minor", "0")]
    assert node.questions(50) == [], "a known job needs no further question"


def test_a_job_that_ends_is_gone_at_the_next_poll(node: Node) -> None:
    node.begin(j1=ONE)
    node.source.poll()
    node.questions(20)
    node.begin()
    node.clock.advance(5.0)
    assert node.grants() == []


def test_a_job_that_slurm_ends_later_than_its_steps_is_looked_at_again(node: Node) -> None:
    """An epilog may run for a long time. The looks become rarer, because the job may also be an allocation without
    steps.
    """
    node.begin(j1=ONE)
    node.source.poll()
    node.questions(20)
    node.steps = {}
    looks = []
    for second in range(5, 205, 5):
        if node.questions(5):
            looks.append(second)
    assert looks == [5, 10, 20, 40, 80, 140, 200]
    node.begin()
    assert node.questions(60)
    assert node.grants() == []


def test_jobs_without_gpus_lead_only_to_a_question_about_the_node(node: Node) -> None:
    node.begin(j1=ONE)
    node.source.poll()
    node.jobs["2"] = [""]
    assert node.questions(5) == [SINFO]


def test_a_grant_with_a_step_is_as_new_as_the_poll_and_any_other_as_old_as_the_answer(node: Node) -> None:
    node.begin(j1=ONE, j2="gpu:h100:1(IDX:1)")
    node.used = "gpu:h100:3(IDX:0-2)"
    node.steps = {"1": {1001}}
    node.source.poll()
    node.questions(300)  # until the hidden job leads to no more questions
    while not node.questions(5):
        pass
    asked = node.clock.monotonic()
    node.clock.advance(30.0)
    grants = {grant.holder.label: grant for grant in node.source.poll().grants}
    assert (grants["job 1"].confirmed, grants["job 1"].renewed_s) == (0.0, 0.0)  # the poller adds the time
    assert [grants[label].witnesses for label in ("job 1", "job 2")] == ["step, slurmctld", "slurmctld"]
    for label in ("job 2", "a hidden job"):
        assert (grants[label].confirmed, grants[label].renewed_s) == (asked, 60.0)


def test_jobs_with_steps_remain_known_while_the_controller_is_down(node: Node) -> None:
    node.begin(j1=ONE, j2="gpu:h100:1(IDX:1)")
    node.steps = {"1": {1001}}
    asked = node.clock.monotonic()
    node.source.poll()
    failed = fail(node, "sinfo", "Unable to contact slurm controller")
    for _ in range(120):
        node.clock.advance(5.0)
        answer = node.source.poll()
    assert answer.problem == "Unable to contact slurm controller"
    assert [(grant.holder.label, grant.confirmed, grant.renewed_s) for grant in answer.grants] == [
        ("job 1", 0.0, 0.0),
        ("job 2", asked, 60.0),
    ]
    assert len(failed) <= 6  # in ten minutes
    node.source._controller._run_command = node.run
    node.clock.advance(300.0)
    assert node.source.poll().problem == ""


def test_a_controller_that_has_never_answered_is_an_error(node: Node) -> None:
    fail(node, "config", "Unable to contact slurm controller")
    for _ in range(3):
        with pytest.raises(SourceError, match="Unable to contact slurm controller"):
            node.source.poll()
        node.clock.advance(5.0)


def test_a_job_that_was_requeued_between_two_polls_is_asked_for_again(node: Node) -> None:
    node.begin(j1=ONE)
    node.steps = {"1": {1001, 1002}}
    node.source.poll()
    node.steps = {"1": {1002, 1003}}  # steps start and end
    assert node.questions(5) == []
    node.columns = {"RestartCnt": "1", "StartTime": "1700000500"}
    node.steps = {"1": {2001}}
    node.clock.advance(5.0)
    (grant,) = node.source.poll().grants
    assert grant.holder.key.incarnation == "lab/1/1/1700000500"


def test_a_job_with_new_processes_is_not_proven_to_be_the_same_while_no_question_is_left(node: Node) -> None:
    node.begin(j1=ONE)
    node.source.poll()
    fail(node, "sinfo", "slow")
    node.steps = {"1": {2001}}
    node.clock.advance(5.0)
    (grant,) = node.source.poll().grants
    assert grant.confirmed != 0.0


@pytest.mark.parametrize(
    ("states", "runs"), [("S", True), ("T", False), ("TS", True), ("TT", False), ("t", True), ("", True)]
)
def test_a_job_whose_processes_are_all_stopped_does_not_run(node: Node, states: str, runs: bool) -> None:
    """As after `scontrol suspend`, which no message reports to this node. A job whose processes are not visible counts
    as running.
    """
    node.begin(j1=ONE)
    pids = set(range(1001, 1001 + max(1, len(states))))
    for pid, state in zip(sorted(pids), states, strict=False):
        node.run_job(pid, state)
    node.steps = {"1": pids}
    (grant,) = node.source.poll().grants
    assert (grant.running, grant.why) == (runs, "" if runs else "all processes of the job are stopped")
    assert grant.obstacle == ("" if runs else "stopped")


@pytest.mark.parametrize("left", [{}, {"1": {1001}}, {"2": {1002}}])
def test_a_stopped_job_does_not_idle_while_steps_are_not_visible(node: Node, left: dict[str, set[int]]) -> None:
    """The job's processes in the last complete list show whether it runs again."""
    node.begin(j1=ONE, j2="gpu:h100:1(IDX:1)")
    node.steps = {"1": {1001}, "2": {1002}}
    node.run_job(1001, "T")
    node.run_job(1002, "S")
    assert [grant.running for grant in node.source.poll().grants] == [False, True]
    node.blind, node.left = "Unable to connect to slurmstepd: Connection refused", left
    for state in ("T", "S", "T"):
        node.run_job(1001, state)
        node.clock.advance(5.0)
        assert [grant.running for grant in node.source.poll().grants] == [state == "S", True]


def test_a_list_without_one_step_proves_no_job_stopped(node: Node) -> None:
    """One step of the job is stopped. Another step runs, but its slurmstepd does not answer."""
    node.begin(j1=ONE)
    node.steps, node.blind, node.left = {"1": {1001}}, "Unable to connect to slurmstepd: x", {"1": {1001}}
    node.run_job(1001, "T")
    assert [grant.running for grant in node.source.poll().grants] == [True]


def test_a_resumed_job_counts_as_running_at_once(node: Node) -> None:
    node.begin(j1=ONE)
    node.steps = {"1": {1001}}
    node.run_job(1001, "T")
    node.states = {"1": "SUSPENDED"}
    assert node.source.poll().grants[0].why == "the job is SUSPENDED"
    node.run_job(1001, "S")
    node.states = {}
    node.clock.advance(5.0)
    assert node.source.poll().grants[0].running


def test_pids_of_another_proc_do_not_show_stopped_jobs(node: Node) -> None:
    """In a pod without hostPID, the pids of slurmstepd's processes are those of other processes."""
    (node.directory / "proc" / "2" / "stat").unlink()
    node.begin(j1=ONE)
    node.steps = {"1": {1001}}
    node.run_job(1001, "T")
    assert node.source.poll().grants[0].running


def test_a_node_with_invisible_steps_reports_it_and_asks_every_minute(node: Node) -> None:
    node.blind = "scontrol: error: Domain socket directory /var/spool/slurmd: No such file or directory"
    node.begin(j1=ONE)
    answer = node.source.poll()
    assert [grant.holder.label for grant in answer.grants] == ["job 1"]
    assert answer.problem == ""
    assert node.blind in answer.notice
    assert len([text for text in node.questions(300) if text == SINFO]) == 5
    # Without steps, only Slurm knows whether the job still runs: one small question each time.
    assert len([text for text in node.questions(300) if "squeue" in text and "-j 1" in text]) == 5


def test_a_line_of_listpids_that_is_not_understood_proves_nothing(node: Node) -> None:
    node.begin(j1=ONE)
    node.steps = {"1; reboot": {1}}
    answer = node.source.poll()
    assert "cannot parse a line of scontrol listpids" in answer.notice
    assert answer.grants[0].confirmed != 0.0


@pytest.mark.parametrize("filing", [True, False], ids=["a prolog's files", "no files"])
def test_private_data_counts_when_slurmd_is_new(node: Node, tmp_path: Path, filing: bool) -> None:
    """From Slurm 23.11, `scontrol reconfigure` restarts slurmd."""
    if filing:
        node = Filing(tmp_path)
    start_slurmd(node, 700, 1_700_000_100)
    node.source.poll()
    node.questions(600)
    node.private = "users"
    node.clock.advance(5.0)
    assert not node.source.poll().hides_users
    (tmp_path / "proc" / "700" / "stat").unlink()
    start_slurmd(node, 701, 1_700_000_900)
    assert "scontrol show config" in node.questions(5)
    assert node.source.poll().hides_users
    assert "scontrol show config" not in node.questions(600), "it is asked once"


def test_private_data_counts_with_each_list_of_jobs(node: Node) -> None:
    node.source.poll()
    node.questions(60)
    node.private, node.steps = "users", {}
    node.begin(j1=ONE)  # a job without a step here
    asked = node.questions(120)
    assert [text.partition(" -h")[0] for text in asked if "-w n0" in text] == ["squeue"]
    assert asked.count("scontrol show config") == 1
    assert node.source.poll().hides_users


def test_the_state_of_the_node_comes_with_the_gpus_in_use(node: Node) -> None:
    node.source.poll()
    node.state, node.reason = "IDLE+DRAIN", "bad fan"
    assert node.questions(90) == [SINFO]
    answer = node.source.poll()
    assert (answer.closed, answer.closed_reason) == ("drained", "bad fan")
    failed = fail(node, "sinfo", "slow")
    node.questions(90)
    assert failed
    assert (node.source.poll().closed, node.source.poll().closed_reason) == ("", ""), "the state is unknown"


def test_a_closed_node_asks_until_it_is_open_again(tmp_path: Path) -> None:
    filing = Filing(tmp_path)
    filing.settle()
    assert filing.questions(600) == [], "the prolog's files make questions unnecessary"
    filing.state = "DOWN"
    filing.source._pace.failed(0.0)  # a question is due
    filing.questions(300)
    assert filing.source.poll().closed == "down"
    assert len(filing.questions(300)) >= 4
    filing.state = "IDLE"
    filing.questions(90)
    assert filing.source.poll().closed == ""
    filing.questions(90)
    assert filing.questions(600) == []
