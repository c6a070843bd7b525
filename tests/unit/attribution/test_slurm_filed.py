"""Jobs that are known from the prolog's files alone: slurmctld is not asked, and nothing is guessed."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.attribution.test_slurm import Cluster, fail
from tests.unit.attribution.test_slurm_quiet import Filing

import gpu_exporter
from gpu_exporter.attribution.slurm.controller import bound_clock, how_far_ahead
from gpu_exporter.attribution.slurm.filed import FILL_S, start_here
from gpu_exporter.attribution.slurm.job_files import FiledRun, JobFile, read_job_files
from gpu_exporter.attribution.slurm.presence import STALE_S
from gpu_exporter.attribution.source import Answer, SourceError
from gpu_exporter.clock import ManualClock

EPILOG = Path(gpu_exporter.__file__).parent / "contrib" / "slurm" / "epilog.sh"
AWAY = "Unable to contact slurm controller"
START = 4_000_000_500


@pytest.fixture
def filing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Filing:
    for name in [name for name in os.environ if name.startswith("SLURM")]:
        monkeypatch.delenv(name)
    found = Filing(tmp_path)
    found.steps = {}
    found.settle()
    return found


def begin(filing: Filing, job: str, gpus: str, *, start: int = START, restarts: int = 0, **words: str) -> None:
    """The prolog of a job has run, and the job's step exists."""
    said = {
        "gpus": gpus, "visible": gpus, "user": "ada", "uid": "1000", "account": "chem", "partition": "gpu",
        "cluster": "lab", "restarts": str(restarts), "start": str(start), "nodes": "1", **words,
    }  # fmt: skip
    filing.file(job, "".join(f"{name}={value}\n" for name, value in said.items() if value))
    assert filing.steps is not None
    filing.steps[job] = {1000 + int(job)}


def end(filing: Filing, job: str) -> None:
    """The epilog has run."""
    (filing.files / job).unlink()
    assert filing.steps is not None
    filing.steps.pop(job, None)


def held(answer: Answer) -> dict[str, list[str]]:
    jobs: dict[str, list[str]] = {}
    for grant in answer.grants:
        assert (grant.kind, grant.running) == ("minor", True)
        jobs.setdefault(grant.holder.job_id, []).append(grant.device)
    return jobs


def asked(filing: Filing) -> list[str]:
    return [text for text in filing.asked if "listpids" not in text]


def poll(filing: Filing) -> Answer:
    filing.clock.advance(5.0)
    return filing.source.poll()


def fill(filing: Filing) -> None:
    """Advance until slurmctld has reported what no prolog is told."""
    for _ in range(int(FILL_S / 5) + 3):
        poll(filing)


def test_jobs_begin_and_end_without_a_question_to_slurmctld(filing: Filing) -> None:
    fail(filing, "sinfo", AWAY)
    filing.asked.clear()
    begin(filing, "7", "0,2")
    (first, second) = poll(filing).grants
    holder = first.holder
    assert (first.device, second.device) == ("0", "2")
    assert (holder.user, holder.uid, holder.account, holder.partition) == ("ada", "1000", "chem", "gpu")
    assert (holder.start_wall, holder.units, holder.key.incarnation) == (START, 2, f"lab/7/0/{START}")
    assert first.witnesses == "step, prolog"
    begin(filing, "8", "1", start=START + 9)
    assert held(poll(filing)) == {"7": ["0", "2"], "8": ["1"]}
    end(filing, "7")
    begin(filing, "9", "0", start=START + 20)
    answer = poll(filing)
    assert (held(answer), answer.problem, answer.is_late) == ({"8": ["1"], "9": ["0"]}, "", False)
    for job in ("8", "9"):
        end(filing, job)
    answer = poll(filing)
    assert (held(answer), answer.problem) == ({}, "")
    assert asked(filing) == []


def test_a_long_job_is_asked_about_once_for_what_no_prolog_is_told(filing: Filing) -> None:
    begin(filing, "7", "0")
    filing.begin(j7="gpu:h100:1(IDX:0)")
    filing.steps = {"7": {1007}}
    filing.columns = {"QOS": "high", "Account": "chem", "Partition": "gpu", "ArrayJobID": "6", "ArrayTaskID": "3"}
    filing.asked.clear()
    keys = set()
    for _ in range(int(FILL_S / 5) + 3):
        (grant,) = poll(filing).grants
        keys.add(grant.holder.key)
    assert (grant.holder.qos, grant.holder.array_task_id, grant.witnesses) == ("high", "3", "step, prolog, slurmctld")
    assert len(keys) == 1, "the holder is the same before and after"
    before = len(asked(filing))
    assert 1 <= before <= 3
    for _ in range(500):
        poll(filing)
    filing.jobs, filing.used = {}, ""
    end(filing, "7")
    assert held(poll(filing)) == {}
    assert len(asked(filing)) == before


@pytest.mark.parametrize(
    "words",
    [
        {"user": ""}, {"uid": ""}, {"restarts": ""}, {"nodes": ""}, {"cluster": ""},
        {"cluster": "other"}, {"nodes": "2"}, {"user": "a b"}, {"account": "x;y"}, {"start": "soon"}, {"uid": "-1"},
        {"start": "9" * 30},
    ],
)  # fmt: skip
def test_an_incomplete_file_leads_to_a_question(filing: Filing, words: dict[str, str]) -> None:
    begin(filing, "7", "1", **words)
    filing.jobs, filing.used = {"7": ["gpu:h100:1(IDX:1)"]}, "gpu:h100:1(IDX:1)"
    filing.asked.clear()
    assert held(poll(filing)) == {"7": ["1"]}
    assert asked(filing)


def test_before_slurm_23_02_a_job_began_when_its_prolog_ran(filing: Filing) -> None:
    """Such a Slurm does not tell the prolog when the job started."""
    began = START + 0.5
    begin(filing, "7", "1", start=0)
    filing.file("7", (filing.files / "7").read_text().replace("start=0\n", ""), filing.clock.wall() - began)
    filing.asked.clear()
    (grant,) = poll(filing).grants
    assert (grant.device, grant.holder.start_wall, grant.holder.key.incarnation) == ("1", START, f"lab/7/0/{START}")
    assert asked(filing) == []
    filing.jobs, filing.used, filing.job_start = {"7": ["gpu:h100:1(IDX:1)"]}, "gpu:h100:1(IDX:1)", START - 1
    filing.clock.advance(START)
    (grant,) = poll(filing).grants
    assert grant.holder.start_wall == START - 1, "slurmctld takes precedence"
    assert asked(filing)


@pytest.mark.parametrize(
    "line", ["Name=shard Count=4 File=/dev/nvidia0", "Name=mps Count=100", "NodeName=n[0-3] Name=shard"]
)
def test_on_a_node_that_shares_gpus_no_file_counts_alone(filing: Filing, line: str) -> None:
    with filing.gres_conf.open("a") as file:
        file.write(line + "\n")
    poll(filing)
    begin(filing, "7", "1")
    filing.jobs, filing.used = {"7": ["shard:h100:1(0/0,1/4,0/4,0/4)"]}, "shard:h100:1(0/0,1/4,0/4,0/4)"
    filing.asked.clear()
    answer = poll(filing)
    assert [(grant.device, grant.share) for grant in answer.grants] == [("1", "shard")]
    assert asked(filing)


def test_shares_on_another_node_do_not_affect_this_node(filing: Filing) -> None:
    with filing.gres_conf.open("a") as file:
        file.write("NodeName=n7 Name=shard Count=4\n")
    poll(filing)
    begin(filing, "7", "1")
    filing.asked.clear()
    assert held(poll(filing)) == {"7": ["1"]}
    assert asked(filing) == []


def test_another_run_of_a_job_is_another_holder_with_other_gpus(filing: Filing) -> None:
    begin(filing, "7", "0")
    (before,) = poll(filing).grants
    end(filing, "7")
    begin(filing, "7", "3", restarts=1, start=START + 60)
    filing.asked.clear()
    (after,) = poll(filing).grants
    assert (before.device, after.device) == ("0", "3")
    assert before.holder.key != after.holder.key
    assert asked(filing) == []


def end_and_say(filing: Filing, job: str, *, is_now: bool = True) -> None:
    """The epilog of gpu-exporter has run. `is_now`: also by the exporter's clock."""
    environment = {"PATH": "/usr/bin:/bin", "GPU_EXPORTER_JOB_FILES": str(filing.files), "SLURM_JOB_ID": job}
    path = filing.files / job
    path.write_text(f"job={job}\n{path.read_text()}")
    subprocess.run(["sh", str(EPILOG)], env=environment, check=True, timeout=10)
    assert not path.exists()
    assert filing.steps is not None
    filing.steps.pop(job, None)
    if is_now:
        filing.clock.advance(max(0.0, time.time() - filing.clock.wall()))


@pytest.fixture
def now(filing: Filing) -> float:
    """The exporter's clock is that of the file system."""
    filing.clock = ManualClock(wall=time.time() - 0.2)
    filing.slurmd_start = int(time.time()) + 1
    filing.restart()
    filing.source.poll()
    return filing.clock.wall()


def test_each_end_is_reported_once_with_its_time(filing: Filing, now: float) -> None:
    begin(filing, "7", "0,1", start=filing.slurmd_start + 1)
    assert held(filing.source.poll()) == {"7": ["0", "1"]}
    begin(filing, "8", "2", start=filing.slurmd_start + 1)  # no poll has seen this job
    end_and_say(filing, "7")
    end_and_say(filing, "8")
    filing.clock.advance(5.0)
    answer = filing.source.poll()
    assert (held(answer), answer.missed) == ({}, 0)
    assert sorted((grant.holder.job_id, grant.device, grant.holder.user) for grant in answer.ended) == [
        ("7", "0", "ada"), ("7", "1", "ada"), ("8", "2", "ada")
    ]  # fmt: skip
    for grant in answer.ended:
        assert 0.0 < filing.clock.monotonic() - grant.confirmed <= 6.0
    filing.clock.advance(5.0)
    assert filing.source.poll().ended == ()


def test_a_job_has_ended_even_if_its_processes_still_run(filing: Filing, now: float) -> None:
    begin(filing, "7", "0", start=filing.slurmd_start + 1)
    filing.source.poll()
    end_and_say(filing, "7")
    filing.steps = {"7": {1007}}
    filing.asked.clear()
    answer = filing.source.poll()
    assert (held(answer), [grant.device for grant in answer.ended]) == ({}, ["0"])
    assert (answer.problem, asked(filing)) == ("", [])


def test_a_new_run_of_a_job_is_not_the_run_that_ended(filing: Filing, now: float) -> None:
    begin(filing, "7", "0", start=filing.slurmd_start + 1)
    (first,) = filing.source.poll().grants
    end_and_say(filing, "7")
    begin(filing, "7", "1", start=filing.slurmd_start + 3, restarts=1)
    answer = filing.source.poll()
    assert [grant.holder.key for grant in answer.ended] == [first.holder.key]
    assert held(answer) == {"7": ["1"]}
    end_and_say(filing, "7")
    begin(filing, "7", "2", start=filing.slurmd_start + 5, restarts=2)
    end_and_say(filing, "7")  # in the same file as the previous run, whose end is lost unless it was seen
    answer = filing.source.poll()
    assert [(grant.device, grant.holder.key.incarnation.split("/")[2]) for grant in answer.ended] == [("2", "2")]


@pytest.mark.parametrize("words", [{"user": ""}, {"nodes": "2"}, {"cluster": "other"}])
def test_an_ended_job_that_was_not_seen_and_has_an_incomplete_file_is_counted(
    filing: Filing, now: float, words: dict[str, str]
) -> None:
    begin(filing, "7", "0", **words)
    end_and_say(filing, "7")
    answer = filing.source.poll()
    assert (answer.ended, answer.missed) == ((), 1)
    assert filing.source.poll().missed == 0
    assert filing.steps == {}


def test_a_changed_file_of_an_ended_job_does_not_end_it_again(filing: Filing, now: float) -> None:
    """As `restorecon -R /run` and `chown -R` do, while the exporter restarts."""
    begin(filing, "7", "0", start=filing.slurmd_start + 1)
    end_and_say(filing, "7")
    assert [grant.holder.job_id for grant in filing.source.poll().ended] == ["7"]
    kept = filing.files / ".ended" / "7"
    kept.chmod(0o600)
    os.utime(kept, (1.0, 1.0))
    assert filing.source.poll().ended == ()
    filing.restart()
    filing.source.poll()
    kept.chmod(0o644)
    assert filing.source.poll().ended == ()


def test_each_end_is_reported_once_even_if_the_clock_is_set_back(filing: Filing, now: float) -> None:
    begin(filing, "7", "0", start=filing.slurmd_start + 1)
    end_and_say(filing, "7")
    assert len(filing.source.poll().ended) == 1
    filing.clock = ManualClock(wall=time.time() - 3600.0)
    filing.source._clock = filing.source._presence._clock = filing.clock
    assert filing.source.poll().ended == ()
    begin(filing, "8", "0", start=filing.slurmd_start + 1)
    end_and_say(filing, "8", is_now=False)
    (grant,) = filing.source.poll().ended
    assert (grant.holder.job_id, grant.confirmed) == ("8", filing.clock.monotonic()), "not later than now"
    assert filing.source.poll().ended == ()


def test_ends_are_reported_when_slurm_answers_for_the_first_time(filing: Filing, now: float) -> None:
    filing.restart()
    failed = fail(filing, "config", AWAY)
    begin(filing, "7", "0", start=filing.slurmd_start + 1)
    end_and_say(filing, "7")
    with pytest.raises(SourceError):
        filing.source.poll()
    assert failed
    filing.source._controller._run_command = filing.run  # type: ignore[union-attr]
    filing.clock.advance(60.0)
    answer = filing.source.poll()
    assert ([grant.holder.job_id for grant in answer.ended], answer.missed) == (["7"], 0)


def test_ends_before_the_exporters_start_are_not_reported(filing: Filing) -> None:
    begin(filing, "7", "0")
    end_and_say(filing, "7")
    filing.clock = ManualClock(wall=time.time() + 60.0)
    filing.restart()
    answer = filing.source.poll()
    assert (answer.ended, answer.missed) == ((), 0)


@pytest.mark.parametrize("body", ["", "job=8\n", "job=x\ngpus=0\n", "gpus=0\n", "job=7\ngpus=9-\n", "\0" * 5000])
def test_files_that_gpu_exporters_epilog_did_not_write_report_no_end(filing: Filing, now: float, body: str) -> None:
    ended = filing.files / ".ended"
    ended.mkdir(mode=0o755)
    (ended / "7").write_text(body)
    (ended / "9").symlink_to("/etc/passwd")
    answer = filing.source.poll()
    assert (answer.ended, answer.missed) == ((), 0)
    ended.chmod(0o777)
    assert filing.source.poll().ended == ()


def test_a_reused_job_number_is_another_holder(filing: Filing) -> None:
    """As after slurmctld lost its state."""
    filing.jobs, filing.used, filing.job_start = {"7": ["gpu:h100:1(IDX:0)"]}, "gpu:h100:1(IDX:0)", START
    begin(filing, "7", "0", user="")
    (before,) = poll(filing).grants
    assert before.holder.start_wall == START
    begin(filing, "7", "1", start=START + 900)
    (after,) = poll(filing).grants
    assert (after.device, after.holder.start_wall) == ("1", START + 900)
    assert before.holder.key != after.holder.key


def test_processes_that_start_and_end_lead_to_no_question(filing: Filing) -> None:
    begin(filing, "7", "0")
    poll(filing)
    filing.asked.clear()
    for pid in range(2000, 2010):
        filing.steps = {"7": {pid}}
        assert held(poll(filing)) == {"7": ["0"]}
    assert asked(filing) == []


def test_if_slurm_counts_gpus_without_positions_its_count_takes_precedence_over_files(filing: Filing) -> None:
    filing.gres_conf.write_text("Name=gpu File=/dev/nvidia[0-3]\n", "utf-8")
    filing.configured, filing.used = "gpu:4", "gpu:1"
    filing.jobs = {"5": ["gpu:1(IDX:0)"]}
    begin(filing, "5", "0", user="")
    filing.clock.advance(4000.0)
    begin(filing, "5", "0", user="")
    assert held(poll(filing)) == {"5": ["0"]}
    begin(filing, "7", "1")
    filing.jobs["7"], filing.used = ["gpu:1(IDX:1)"], "gpu:2"
    filing.asked.clear()
    assert held(poll(filing)) == {"5": ["0"], "7": ["1"]}
    assert asked(filing)


def test_unreadable_files_leave_no_gpu_free(filing: Filing) -> None:
    begin(filing, "7", "0")
    poll(filing)
    filing.files.chmod(0o777)
    fail(filing, "sinfo", AWAY)
    answer = poll(filing)
    assert held(answer) == {}
    assert "only a prolog's file reported job 7, and the job is not seen now" in answer.problem
    filing.files.chmod(0o755)
    answer = poll(filing)
    assert held(answer) == {"7": ["0"]}


def test_steps_that_are_not_visible_leave_no_gpu_free(filing: Filing) -> None:
    begin(filing, "7", "0")
    poll(filing)
    filing.blind = "no slurmd here"
    fail(filing, "sinfo", AWAY)
    filing.clock.advance(STALE_S)
    answer = poll(filing)
    assert answer.problem and held(answer) == {}


REFUSED = "Unable to connect to slurmstepd: Connection refused"


@pytest.mark.parametrize("left", [None, {}, {"8": {1008}}])
def test_steps_that_are_not_visible_for_a_moment_lead_to_no_question(
    filing: Filing, left: dict[str, set[int]] | None
) -> None:
    """A single slurmstepd that is just starting fails the whole command."""
    fail(filing, "sinfo", AWAY)
    begin(filing, "7", "0")
    begin(filing, "8", "1")
    poll(filing)
    filing.clock.advance(STALE_S)
    poll(filing)
    filing.asked.clear()
    filing.blind, filing.left = REFUSED, left
    begin(filing, "9", "2")
    answer = poll(filing)
    assert (held(answer), answer.problem, answer.notice) == ({"7": ["0"], "8": ["1"], "9": ["2"]}, "", "")
    assert asked(filing) == []


def test_an_end_reported_by_the_epilog_counts_while_steps_are_not_visible(filing: Filing, now: float) -> None:
    begin(filing, "7", "0", start=filing.slurmd_start + 1)
    begin(filing, "8", "1", start=filing.slurmd_start + 1)
    filing.begin(j7="gpu:h100:1(IDX:0)", j8="gpu:h100:1(IDX:1)")
    filing.job_start = filing.slurmd_start + 1
    filing.steps = {"7": {1007}, "8": {1008}}
    fill(filing)
    fail(filing, "sinfo", AWAY)
    filing.blind = REFUSED
    end_and_say(filing, "8")
    for _ in range(3):
        answer = poll(filing)
        assert (held(answer), "only a prolog's file" in answer.problem) == ({"7": ["0"]}, False)


@pytest.mark.parametrize("is_filled", [True, False])
@pytest.mark.parametrize("is_away", [True, False])
def test_a_lost_file_frees_no_gpu_while_its_step_is_not_visible(filing: Filing, is_filled: bool, is_away: bool) -> None:
    """A cleanup of /run removes the file while the job runs."""
    begin(filing, "7", "0")
    filing.begin(j7="gpu:h100:1(IDX:0)")
    filing.steps = {"7": {1007}}
    poll(filing)
    if is_filled:
        fill(filing)
    if is_away:
        fail(filing, "sinfo", AWAY)
    filing.blind = REFUSED
    (filing.files / "7").unlink()
    for _ in range(4):
        answer = poll(filing)
        assert held(answer) or answer.problem


def test_jobs_with_listed_steps_remain_known_while_a_dead_slurmstepd_fails_the_list(filing: Filing) -> None:
    """The dead slurmstepd has left its socket in SlurmdSpoolDir, for hours."""
    fail(filing, "sinfo", AWAY)
    begin(filing, "7", "0")
    begin(filing, "8", "1")
    poll(filing)
    filing.blind, filing.left = REFUSED, {"7": {1007}, "8": {1008}}
    filing.clock.advance(4 * STALE_S)
    filing.asked.clear()
    answer = poll(filing)
    assert (held(answer), answer.problem, answer.notice) == ({"7": ["0"], "8": ["1"]}, "", "")
    assert asked(filing) == []
    filing.left = {"7": {1007}}  # it is unknown which slurmstepd died
    answer = poll(filing)
    assert answer.problem and REFUSED in answer.notice, "so no GPU is reported as free"


def test_a_stale_file_remains_stale_while_steps_are_not_visible(filing: Filing) -> None:
    begin(filing, "7", "0")
    filing.steps = {}
    filing.clock.advance(2 * STALE_S)
    poll(filing)
    filing.blind = REFUSED
    answer = poll(filing)
    assert "the files of 7 have no job" in answer.notice
    begin(filing, "7", "0", restarts=1)
    assert held(poll(filing)) == {"7": ["0"]}, "the file was written again"


def test_a_file_that_its_epilog_left_behind_is_asked_about_and_then_holds_nothing(filing: Filing) -> None:
    begin(filing, "7", "0")
    filing.steps = {}
    filing.asked.clear()
    assert held(poll(filing)) == {"7": ["0"]}, "the prolog runs before the first step"
    assert asked(filing) == []
    filing.clock.advance(STALE_S)
    answer = poll(filing)
    assert (held(answer), answer.problem) == ({}, "")
    assert "the files of 7 have no job: check whether the epilog failed" in answer.notice
    before = len(asked(filing))
    assert before
    for _ in range(100):
        assert poll(filing).problem == ""
    assert len(asked(filing)) == before, "slurmctld is asked once about the file"


def test_a_job_whose_other_prologs_take_long_keeps_its_gpu(filing: Filing) -> None:
    begin(filing, "7", "0")
    filing.begin(j7="gpu:h100:1(IDX:0)")
    filing.steps = {}
    for _ in range(60):
        answer = poll(filing)
        assert [(grant.holder.job_id, grant.device) for grant in answer.grants] == [("7", "0")], answer
    filing.steps = {"7": {1007}}
    assert held(poll(filing)) == {"7": ["0"]}


def test_a_job_with_long_other_prologs_leaves_no_gpu_free_while_slurmctld_is_silent(filing: Filing) -> None:
    begin(filing, "7", "0")
    poll(filing)
    filing.steps = {}
    fail(filing, "sinfo", AWAY)
    for _ in range(60):
        answer = poll(filing)
        assert held(answer) == {"7": ["0"]} or "only a prolog's file reported job 7" in answer.problem


def test_a_later_report_of_slurmctld_takes_precedence_over_a_file(filing: Filing) -> None:
    """Job 7 is requeued. Its new prolog has not reached gpu-exporter's prolog when another job leads to a question."""
    begin(filing, "7", "0")
    filing.begin(j7="gpu:h100:1(IDX:0)")
    filing.steps = {"7": {1007}}
    fill(filing)
    end(filing, "7")
    filing.jobs, filing.used = {}, ""
    assert held(poll(filing)) == {}
    filing.columns, filing.job_start = {"RestartCnt": "1"}, START + 900
    filing.jobs = {"7": ["gpu:h100:1(IDX:2)"], "8": ["gpu:h100:1(IDX:1)"]}
    filing.used = "gpu:h100:2(IDX:1-2)"
    begin(filing, "8", "1", nodes="2")
    for _ in range(3):
        answer = poll(filing)
        assert {grant.device for grant in answer.grants} == {"1", "2"} or answer.problem or answer.is_late
    assert {grant.holder.job_id: grant.device for grant in answer.grants} == {"7": "2", "8": "1"}


def ask_nothing(filing: Filing) -> None:
    """The limit of early questions is reached, or a collector's round is not over."""
    filing.source._pace.is_due = lambda now, changed: False  # type: ignore[method-assign]


def test_a_later_run_known_only_from_a_file_is_not_taken_for_the_previous_run(filing: Filing) -> None:
    begin(filing, "7", "0")
    filing.begin(j7="gpu:h100:1(IDX:0)")
    filing.steps = {"7": {1007}}
    fill(filing)
    end(filing, "7")
    begin(filing, "7", "3", restarts=1, start=START + 900)
    assert held(poll(filing)) == {"7": ["3"]}
    filing.blind = "no slurmd here"
    ask_nothing(filing)
    filing.clock.advance(STALE_S)
    answer = poll(filing)
    assert answer.problem, "so no GPU is reported as free"


def test_a_job_that_is_requeued_between_two_polls_is_asked_about(filing: Filing) -> None:
    """The job has several nodes, so its file is incomplete."""
    begin(filing, "7", "0", nodes="2")
    filing.begin(j7="gpu:h100:1(IDX:0)")
    filing.steps = {"7": {1007}}
    assert held(poll(filing)) == {"7": ["0"]}
    end(filing, "7")
    filing.begin(j7="gpu:h100:1(IDX:3)")
    filing.columns, filing.job_start = {"RestartCnt": "1"}, START + 900
    begin(filing, "7", "3", nodes="2", restarts=1, start=START + 900)
    filing.steps = {}
    first = poll(filing)
    assert {grant.device for grant in first.grants} == {"3"} or first.is_late or first.problem
    filing.steps = {"7": {2007}}
    for _ in range(3):
        answer = poll(filing)
    assert (held(answer), answer.problem) == ({"7": ["3"]}, "")


def test_a_job_that_is_requeued_while_no_question_is_asked_leaves_no_gpu_free(filing: Filing) -> None:
    begin(filing, "7", "0", nodes="2")
    filing.begin(j7="gpu:h100:1(IDX:0)")
    filing.steps = {"7": {1007}}
    assert held(poll(filing)) == {"7": ["0"]}
    ask_nothing(filing)
    end(filing, "7")
    begin(filing, "7", "3", nodes="2", restarts=1, start=START + 900)
    for _ in range(3):
        answer = poll(filing)
        assert answer.is_late and not any(grant.running for grant in answer.grants)


def test_a_long_job_whose_epilog_left_the_file_is_asked_about_once(filing: Filing) -> None:
    begin(filing, "7", "0")
    filing.begin(j7="gpu:h100:1(IDX:0)")
    filing.steps = {"7": {1007}}
    fill(filing)
    filing.steps, filing.jobs, filing.used = {}, {}, ""
    filing.asked.clear()
    for _ in range(100):
        answer = poll(filing)
        assert (held(answer), answer.problem) == ({}, "")
    assert 1 <= len(asked(filing)) <= 4


def test_with_shares_that_only_slurm_conf_has_no_file_counts_alone(filing: Filing) -> None:
    filing.jobs, filing.used = {"5": ["shard:h100:1(1/4,0/4,0/4,0/4)"]}, "shard:h100:1(1/4,0/4,0/4,0/4)"
    begin(filing, "5", "0", user="")
    poll(filing)
    begin(filing, "7", "1")
    filing.jobs["7"], filing.used = ["shard:h100:1(0/4,1/4,0/4,0/4)"], "shard:h100:2(1/4,1/4,0/4,0/4)"
    answer = poll(filing)
    assert {(grant.holder.job_id, grant.share) for grant in answer.grants} == {("5", "shard"), ("7", "shard")}


def test_a_file_that_is_removed_under_a_running_job_leads_to_a_question(filing: Filing) -> None:
    begin(filing, "7", "0")
    poll(filing)
    filing.begin(j7="gpu:h100:1(IDX:0)")
    filing.steps = {"7": {1007}}
    (filing.files / "7").unlink()
    filing.asked.clear()
    for _ in range(3):
        answer = poll(filing)
        assert held(answer) == {"7": ["0"]} or answer.problem
    assert asked(filing) and held(answer) == {"7": ["0"]}


def test_slurmctld_takes_precedence_over_a_file_of_a_former_run(filing: Filing) -> None:
    begin(filing, "7", "0")
    filing.begin(j7="gpu:h100:1(IDX:3)")
    filing.steps = {"7": {1007}}
    filing.columns, filing.job_start = {"RestartCnt": "1"}, START + 900
    for _ in range(int(FILL_S / 5) + 3):
        answer = poll(filing)
    (grant,) = answer.grants
    assert (grant.device, grant.running) == ("3", False), "the file contradicts slurmctld"


def test_of_two_files_that_claim_one_gpu_the_file_with_a_step_is_right(filing: Filing) -> None:
    begin(filing, "7", "0")
    begin(filing, "8", "0")
    filing.steps = {"8": {1008}}
    fail(filing, "sinfo", AWAY)
    answer = poll(filing)
    assert held(answer) == {"8": ["0"]}
    assert "the prolog's file of job 7 lists IDX 0, which job 8 holds" in answer.problem


def test_slurmctld_decides_about_a_file_that_claims_a_gpu_of_another_job(filing: Filing) -> None:
    filing.jobs, filing.used = {"5": ["gpu:h100:1(IDX:0)"]}, "gpu:h100:1(IDX:0)"
    filing.steps = {"5": {1005}}
    filing.file("5", "gpus=0\nvisible=0\n")  # from a prolog before this release
    assert held(poll(filing)) == {"5": ["0"]}
    begin(filing, "7", "0")
    filing.asked.clear()
    answer = poll(filing)
    assert (held(answer), answer.problem) == ({"5": ["0"]}, "the prolog's file of job 7 lists IDX 0, which job 5 holds")
    poll(filing)
    assert asked(filing), "the file leads to a question"
    filing.jobs = {"7": ["gpu:h100:1(IDX:0)"]}
    end(filing, "5")
    answer = poll(filing)
    assert (held(answer), answer.problem) == ({"7": ["0"]}, "")
    assert asked(filing)


def test_a_job_can_lose_its_gpu_to_a_new_job_while_slurmctld_is_silent(filing: Filing) -> None:
    filing.jobs, filing.used = {"5": ["gpu:h100:1(IDX:0)"]}, "gpu:h100:1(IDX:0)"
    filing.steps = {"5": {1005}}
    filing.file("5", "gpus=0\nvisible=0\n")
    assert held(poll(filing)) == {"5": ["0"]}
    fail(filing, "sinfo", AWAY)
    end(filing, "5")
    begin(filing, "7", "0")
    answer = poll(filing)
    assert (held(answer), answer.problem) == ({"7": ["0"]}, AWAY)


def test_the_values_in_files_are_read_as_slurmd_gave_them(filing: Filing) -> None:
    begin(filing, "7", "0,2")
    run = read_job_files(filing.files).jobs["7"].run
    assert run == FiledRun("ada", "1000", "chem", "gpu", "lab", "0", START, 1)


STEPS = st.lists(
    st.tuples(st.sampled_from(["begin", "end", "requeue", "away", "back", "wait"]), st.integers(0, 3), st.booleans()),
    max_size=30,
)


@given(STEPS)
def test_for_any_jobs_no_job_has_anothers_gpu_and_no_held_gpu_is_free(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int, bool]]
) -> None:
    """Jobs with and without a complete file, on four GPUs, while slurmctld answers only sometimes."""
    for name in [name for name in os.environ if name.startswith("SLURM")]:
        del os.environ[name]
    filing = Filing(tmp_path_factory.mktemp("filing"))
    filing.steps = {}
    filing.settle()
    real = Cluster.run
    is_away, number, truth, restarts = False, 10, dict[str, int](), dict[str, int]()

    def run(command: list[str], timeout_s: float) -> str:
        if is_away and "listpids" not in command:
            raise SourceError(AWAY)
        return real(filing, command, timeout_s)

    filing.source._controller._run_command = run  # type: ignore[union-attr,assignment]

    def update() -> None:
        filing.jobs = {job: [f"gpu:h100:1(IDX:{index})"] for job, index in truth.items()}
        filing.used = f"gpu:h100:{len(truth)}(IDX:{','.join(map(str, sorted(truth.values())))})" if truth else ""

    for what, index, is_whole in steps:
        holder = next((job for job, has in truth.items() if has == index), None)
        if what == "begin" and holder is None:
            number += 1
            truth[str(number)], restarts[str(number)] = index, 0
            begin(filing, str(number), str(index), **({} if is_whole else {"user": ""}))
        elif what in ("end", "requeue") and holder is not None:
            del truth[holder]
            end(filing, holder)
            free = sorted({0, 1, 2, 3} - {*truth.values()})
            if what == "requeue":
                truth[holder] = free[-1]
                restarts[holder] += 1
                begin(filing, holder, str(free[-1]), restarts=restarts[holder], start=START + restarts[holder])
        elif what in ("away", "back"):
            is_away = what == "away"
        update()
        answer = poll(filing)
        said = {
            (grant.holder.job_id, int(grant.device))
            for grant in answer.grants
            if grant.kind == "minor" and not grant.confirmed
        }
        named = {(job, index) for job, index in said if job}
        assert named <= {*truth.items()}, (what, answer)
        if not answer.problem and not answer.is_late:
            shown = {int(grant.device) for grant in answer.grants if grant.kind == "minor"}
            assert {*truth.values()} <= shown, (what, answer)


@pytest.mark.parametrize(
    ("told", "before", "after", "ahead"),
    [
        (None, 100.0, 100.2, 0.0),
        (100.0, 100.3, 100.4, 0.0),  # slurmctld reports whole seconds
        (99.0, 100.3, 100.4, 0.85),
        (95.0, 100.3, 100.5, 4.9),
        (110.0, 100.3, 100.5, -10.1),
        (99.0, 100.0, 104.0, 0.0),  # slurmctld may have reported at any time in between, and 99.99 is reported as 99
        (101.0, 100.0, 104.0, 0.0),
        (5000.0, 100.0, 100.2, 0.0),  # with such a difference, no job would start
        (-5000.0, 100.0, 100.2, 0.0),
    ],
)
def test_a_clock_counts_as_ahead_only_if_the_bounds_prove_it(
    told: float | None, before: float, after: float, ahead: float
) -> None:
    clock = bound_clock(told, before, after)
    assert how_far_ahead(clock, after, after) == pytest.approx(ahead)
    assert how_far_ahead(clock, after + 3000.0, after + 3000.0) == pytest.approx(ahead)
    if ahead:
        assert how_far_ahead(clock, after + 60.0, after + 60.0 - ahead) == 0.0, "the exporter's clock was stepped since"


FILED = JobFile((0,), (), 1000.0, FiledRun("ada", "1000", "", "", "lab", "0", 995.0, 1), 1001.0)
UNDATED = FiledRun("ada", "1000", "", "", "lab", "0", None, 1)


@pytest.mark.parametrize(
    ("start", "file", "ahead_s", "here"),
    [
        (None, FILED, 5.0, None),
        (1000.0, FILED, 0.0, 1001.0),  # the prolog ran at once
        (995.0, FILED, 5.0, 1001.0),
        (995.0, FILED, 0.0, 995.0),  # behind another prolog
        (900.0, FILED, 5.0, 905.0),
        (1020.0, FILED, -20.0, 1001.0),
        (995.0, JobFile(), 5.0, 1000.0),  # no prolog
        (1001.0, FILED._replace(run=UNDATED), 5.0, 1001.0),  # the prolog's own date, before Slurm 23.02
    ],
)
def test_the_start_of_a_job_is_by_the_clock_of_its_node(
    start: float | None, file: JobFile, ahead_s: float, here: float | None
) -> None:
    assert start_here(start, file, ahead_s) == here


def test_a_job_on_a_node_whose_clock_is_ahead_uses_the_present_order_and_has_its_own_time(filing: Filing) -> None:
    """By slurmctld's clock, the job started before this slurmd."""
    filing.clock.advance(float(filing.slurmd_start) + 100.0 - filing.clock.wall())  # type: ignore[arg-type]
    skew_s = 200.0
    real = Cluster.run

    def run(command: list[str], timeout_s: float) -> str:
        out = real(filing, command, timeout_s)
        clock = f"Configuration data as of {int(filing.clock.wall() - skew_s)}\n"
        return clock + out if "config" in command else out

    filing.source._controller._run_command = run  # type: ignore[union-attr,assignment]
    filing.source._controller._config = None  # type: ignore[union-attr]
    filing.clock.advance(3600.0)
    poll(filing)
    wall = int(filing.clock.wall())
    begin(filing, "7", "0", start=int(wall - skew_s), began=str(wall))
    (grant,) = poll(filing).grants
    assert (grant.kind, grant.start_here, grant.holder.start_wall) == ("minor", wall, int(wall - skew_s))
