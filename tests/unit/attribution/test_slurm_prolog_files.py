"""What the Slurm source asks on a node whose prolog writes files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.unit.attribution.slurm_cluster import SINFO, fail
from tests.unit.attribution.slurm_quiet_node import KTHREADD, MIXED, ONE, Filing, Node, start_slurmd

from gpu_exporter.agent.attribution.slurm.pace import INTERVAL_MAX_S
from gpu_exporter.common.procfs import NewestProcess, Procfs


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
    assert answer.notice == "no job belongs to the files 7: check whether the epilog failed"
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
    assert "PrologFlags lacks Alloc" in filing.source.poll().notice


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
    assert "other users can write to it" in answer.notice
    assert len([text for text in filing.questions(300) if text == SINFO]) == 5


def test_a_configured_directory_that_does_not_exist_is_reported(filing: Filing) -> None:
    filing.files.rmdir()
    assert "no such directory: check whether the prolog has run" in filing.source.poll().notice


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
