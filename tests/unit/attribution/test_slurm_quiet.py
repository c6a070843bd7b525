"""How rarely the Slurm source asks the controller, and what it knows in between."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.unit.attribution.test_slurm import SINFO, Cluster, fail

from gpu_exporter.attribution.procfs import NewestProcess, Procfs
from gpu_exporter.attribution.slurm.pace import INTERVAL_MAX_S, Pace
from gpu_exporter.attribution.slurm.source import SlurmOptions, SlurmSource
from gpu_exporter.attribution.source import SourceError

ONE = "gpu:h100:1(IDX:0)"
KTHREADD = "2 (kthreadd) S 0 0 0 0 -1 2129984 " + "0 " * 40


class Node(Cluster):
    """A node that asks every minute, and whose /proc is the host's."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.source = self.new_source(Pace(60.0, lambda: 0.0))
        self.put(2, KTHREADD)

    def put(self, pid: int, stat: str) -> None:
        folder = self.directory / "proc" / str(pid)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "stat").write_text(stat, "utf-8")

    def run_job(self, pid: int, state: str) -> None:
        self.put(pid, f"{pid} (python) {state} 1 1 1 0 -1 64 " + "0 " * 30)

    def begin(self, **jobs: str) -> None:
        """Start jobs j1, j2 ... with these GPUs, each with one process."""
        self.jobs = {name[1:]: [gres] for name, gres in jobs.items()}
        self.used = ",".join(jobs.values())

    def questions(self, seconds: float) -> list[str]:
        """The questions to the controller in this time, with polls every 5 s."""
        self.asked.clear()
        for _ in range(int(seconds / 5)):
            self.clock.advance(5.0)
            self.source.poll()
        return [text for text in self.asked if "listpids" not in text]


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    for name in [name for name in os.environ if name.startswith("SLURM")]:
        monkeypatch.delenv(name)
    return Node(tmp_path)


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
    assert "a line that is not understood" in answer.notice
    assert answer.grants[0].confirmed != 0.0


class Filing(Node):
    """A node whose prolog writes files, in a cluster with PrologFlags=Contain."""

    def __init__(self, directory: Path, flags: str = "Alloc,Contain") -> None:
        super().__init__(directory)
        self.flags = flags
        self.files = directory / "jobs"
        self.files.mkdir(mode=0o755)
        self.restart()

    def restart(self) -> None:
        """An exporter that has just started."""
        self.source = SlurmSource(
            SlurmOptions(node="n0", procfs=self.directory / "proc", job_files=self.files),
            run=self.run,
            clock=self.clock,
            pace=Pace(60.0, lambda: 0.0),
        )

    def file(self, job: str, text: str, written_s_ago: float = 0.0) -> None:
        path = self.files / job
        path.write_text(text, "utf-8")
        path.chmod(0o644)
        when = self.clock.wall() - written_s_ago
        os.utime(path, (when, when))

    def settle(self) -> None:
        """Get the first answer, which also contains the PrologFlags."""
        self.source.poll()
        self.questions(60)


@pytest.fixture
def filing(node: Node, tmp_path: Path) -> Filing:
    (tmp_path / "filing").mkdir()
    return Filing(tmp_path / "filing")


def test_a_node_with_files_of_a_prolog_asks_nothing_until_a_change(filing: Filing) -> None:
    filing.begin(j1=ONE)
    filing.file("1", "gpus=0\nvisible=0\n")
    filing.settle()
    assert filing.questions(3600) == []
    filing.begin(j1=ONE, j2="gpu:h100:1(IDX:1)")
    filing.used = "gpu:h100:2(IDX:0-1)"
    filing.file("2", "gpus=1\nvisible=1\n")
    filing.clock.advance(5.0)
    assert filing.grants() == [("job 1", "minor", "0"), ("job 2", "minor", "1")]
    filing.begin(j2="gpu:h100:1(IDX:1)")
    (filing.files / "1").unlink()
    filing.clock.advance(5.0)
    assert filing.grants() == [("job 2", "minor", "1")]
    assert filing.questions(3600) == []


def test_jobs_without_a_gpu_lead_to_no_question_if_a_prolog_writes_files(filing: Filing) -> None:
    filing.begin(j1=ONE)
    filing.file("1", "gpus=0\nvisible=0\n")
    filing.settle()
    filing.jobs["2"] = [""]
    assert filing.questions(600) == []


def test_a_job_that_began_before_the_prolog_was_installed_is_known_by_its_step(filing: Filing) -> None:
    filing.begin(j1=ONE)
    filing.settle()
    assert filing.questions(600) == []
    filing.begin()
    filing.clock.advance(5.0)
    assert filing.grants() == []


def test_a_file_that_its_epilog_left_behind_is_not_a_job(filing: Filing) -> None:
    filing.file("7", "gpus=0\nvisible=0\n", written_s_ago=61.0)
    filing.begin(j1="gpu:h100:1(IDX:1)")
    filing.file("1", "gpus=1\nvisible=1\n")
    answer = filing.source.poll()
    assert [grant.holder.job_id for grant in answer.grants] == ["1"]
    answer = filing.source.poll()
    assert answer.notice == "the files of 7 have no job: check whether the epilog failed"
    assert filing.questions(600) == []


def test_a_file_without_a_step_is_asked_about_if_nothing_else_shows_that_the_job_runs(filing: Filing) -> None:
    filing.flags = "Alloc"
    filing.begin(j1=ONE)
    filing.steps = {}
    filing.file("1", "gpus=0\nvisible=0\n", written_s_ago=3600.0)
    filing.source.poll()
    asked = filing.questions(300)
    assert len([text for text in asked if text == SINFO]) == 5
    filing.begin()
    filing.clock.advance(60.0)
    assert filing.grants() == []  # even though its file still exists


def test_without_alloc_a_job_may_hold_gpus_before_its_prolog_runs(filing: Filing) -> None:
    filing.flags = "(null)"
    filing.begin(j1=ONE)
    filing.file("1", "gpus=0\nvisible=0\n")
    filing.source.poll()
    assert len(filing.questions(300)) == 5 + 2  # and the job's own, after five minutes
    assert "PrologFlags has no Alloc" in filing.source.poll().notice


def test_a_gpu_in_use_that_no_file_explains_leads_to_questions(filing: Filing) -> None:
    filing.begin(j1=ONE)
    filing.file("1", "gpus=0\nvisible=0\n")
    filing.used = "gpu:h100:2(IDX:0-1)"
    filing.source.poll()
    assert len([text for text in filing.questions(600) if text == SINFO]) >= 10


def test_prolog_and_controller_that_name_different_gpus_contradict_each_other(filing: Filing) -> None:
    filing.begin(j1="gpu:h100:1(IDX:2)")
    filing.file("1", "gpus=1\nvisible=1\n")
    answer = filing.source.poll()
    (grant,) = answer.grants
    assert (grant.running, grant.why) == (False, "the prolog's file lists IDX 1, but slurmctld reports IDX 2")
    assert grant.witnesses == "step, prolog, slurmctld"
    assert answer.conflicts == 1


def test_a_job_that_gave_gpus_back_contradicts_nothing(filing: Filing) -> None:
    filing.begin(j1="gpu:h100:1(IDX:2)")
    filing.file("1", "gpus=1-2\nvisible=1,2\n")
    answer = filing.source.poll()
    assert [(grant.device, grant.running) for grant in answer.grants] == [("2", True)]
    assert answer.conflicts == 0


@pytest.mark.parametrize(
    ("name", "text"), [("1", "gpus=0,4\nvisible=GPU-a,MIG-b\n"), ("MIG-b", "1 1000\n")], ids=["ours", "gpustat"]
)
def test_a_position_that_is_not_a_whole_gpu_gets_the_uuid_from_the_prolog(filing: Filing, name: str, text: str) -> None:
    filing.begin(j1="gpu:h100:1(IDX:4)" if name != "1" else "gpu:h100:2(IDX:0,4)")
    filing.file(name, text)
    grants = filing.source.poll().grants
    assert [(grant.kind, grant.device) for grant in grants][-1] == ("uuid", "MIG-b")
    if name == "1":
        assert (grants[0].kind, grants[0].device) == ("minor", "0")  # a proven order takes precedence


def test_files_that_other_users_may_write_are_ignored(filing: Filing) -> None:
    filing.begin(j1=ONE)
    filing.file("1", "gpus=0\nvisible=0\n")
    filing.files.chmod(0o777)
    answer = filing.source.poll()
    assert [grant.device for grant in answer.grants] == ["0"]
    assert "other users may write there" in answer.notice
    assert len([text for text in filing.questions(300) if text == SINFO]) == 5


def test_a_configured_directory_that_does_not_exist_is_reported(filing: Filing) -> None:
    filing.files.rmdir()
    assert "no such directory: check whether the prolog has run" in filing.source.poll().notice


MIXED = """Name=gpu Type=h100 File=/dev/nvidia[0-3]
Name=gpu Type=1g.10gb MultipleFiles=/dev/nvidia4,/dev/nvidia-caps/nvidia-cap30,/dev/nvidia-caps/nvidia-cap31
Name=gpu Type=1g.10gb MultipleFiles=/dev/nvidia4,/dev/nvidia-caps/nvidia-cap39,/dev/nvidia-caps/nvidia-cap40
"""


def test_mig_devices_are_found_by_the_files_that_gres_conf_names(node: Node) -> None:
    minors = node.directory / "proc" / "driver" / "nvidia-caps" / "mig-minors"
    minors.parent.mkdir(parents=True)
    minors.write_text("gpu4/gi7/access 30\ngpu4/gi7/ci0/access 31\ngpu4/gi8/access 39\ngpu4/gi8/ci0/access 40\n")
    node.gres_conf.write_text(MIXED, "utf-8")
    node.configured = "gpu:h100:4,gpu:1g.10gb:2"
    node.begin(j1=ONE, j2="gpu:1g.10gb:1(IDX:5)", j3="gpu:1g.10gb:1(IDX:4)")
    assert sorted(node.grants()) == [
        ("job 1", "minor", "0"),
        ("job 2", "instance", "4/8/0"),
        ("job 3", "instance", "4/7/0"),
    ]
    minors.unlink()  # whole GPUs remain attributed
    node.clock.advance(5.0)
    assert sorted(node.grants()) == [("job 1", "minor", "0"), ("job 2", "unproven", ""), ("job 3", "unproven", "")]


def test_a_job_that_ends_on_a_quiet_node_while_the_controller_is_down_soon_holds_nothing(filing: Filing) -> None:
    """A quiet node has not asked for hours, so only the step and the file have shown that the job is here."""
    filing.begin(j1=ONE)
    filing.file("1", "gpus=0\nvisible=0\n")
    filing.settle()
    assert filing.questions(3600) == []
    fail(filing, "show", "Unable to contact slurm controller")
    filing.begin()
    (filing.files / "1").unlink()
    filing.clock.advance(5.0)
    answer = filing.source.poll()
    assert answer.problem == "Unable to contact slurm controller"
    for grant in answer.grants:
        assert filing.clock.monotonic() - grant.confirmed > 3600
        assert grant.renewed_s <= INTERVAL_MAX_S


def test_hidden_jobs_are_not_asked_for_every_minute(node: Node) -> None:
    node.begin(**{f"j{number}": "" for number in range(1, 20)})
    node.used = "gpu:h100:1(IDX:0)"
    node.hidden = set(node.jobs)
    node.source.poll()
    node.questions(120)
    assert [text for text in node.questions(180) if "squeue" in text] == []


def start_slurmd(node: Node, pid: int, start_wall: float) -> None:
    """A slurmd that started at this time, on a host that was booted at 1,700,000,000."""
    (node.directory / "proc" / "stat").write_text("cpu 1 2\nbtime 1700000000\n", "utf-8")
    ticks = round((start_wall - 1_700_000_000) * os.sysconf("SC_CLK_TCK"))
    node.put(pid, f"{pid} (slurmd) S 1 1 1 0 -1 64 " + "0 " * 12 + f"{ticks} " + "0 " * 17)


def test_a_lost_proof_is_looked_for_at_once_after_a_restart_of_slurmd_and_otherwise_less_and_less_often(
    node: Node,
) -> None:
    now = node.gres_conf.stat().st_ctime
    node.slurmd_start, node.job_start = int(now) + 2, int(now) + 20
    start_slurmd(node, 700, node.slurmd_start)
    node.begin(j1=ONE)
    node.source.poll()
    node.gres_conf.write_text("Name=gpu Type=h100 File=/dev/nvidia[3,2,1,0]\n", "utf-8")
    os.utime(node.gres_conf, (now + 100, now + 100))
    record = "scontrol show node n0 -d"
    assert 7 <= node.questions(1800).count(record) <= 10  # after 5 s, 10 s, 20 s and so on
    assert node.questions(300).count(record) <= 1
    node.slurmd_start = int(now) + 3000
    (node.directory / "proc" / "700" / "stat").unlink()
    node.put(700, "700 (bash) S 1 1 1 0 -1 64 " + "0 " * 30)  # its pid now belongs to another process
    start_slurmd(node, 900, node.slurmd_start)
    assert node.questions(5).count(record) == 1
    assert node.source.poll().problem == ""


def test_the_newest_of_several_slurmd_counts_but_only_in_the_hosts_proc(tmp_path: Path) -> None:
    node = Node(tmp_path)
    newest = NewestProcess(Procfs(tmp_path / "proc"), "slurmd")
    assert newest.start_wall() is None
    start_slurmd(node, 700, 1_700_000_100)
    start_slurmd(node, 701, 1_700_000_200)
    assert newest.start_wall() == 1_700_000_200
    (tmp_path / "proc" / "stat").write_text("cpu 1 2\n", "utf-8")
    assert newest.start_wall() is None
    start_slurmd(node, 702, 1_700_000_300)
    node.put(2, KTHREADD.replace("kthreadd", "sh"))
    assert newest.start_wall() is None
