"""Files against slurmctld: runs, requeues, contradictions, clocks."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from hypothesis import given
from tests.unit.attribution.filed_jobs import (
    AWAY,
    FILED,
    START,
    STEPS,
    UNDATED,
    ask_nothing,
    asked,
    begin,
    end,
    end_and_say,
    fill,
    held,
    poll,
)
from tests.unit.attribution.slurm_cluster import Cluster, fail
from tests.unit.attribution.slurm_quiet_node import Filing

from gpu_exporter.agent.attribution.slurm.controller import bound_clock, how_far_ahead, narrow
from gpu_exporter.agent.attribution.slurm.filed import FILL_S, start_here
from gpu_exporter.agent.attribution.slurm.on_node.job_files import FiledRun, JobFile, read_job_files
from gpu_exporter.agent.attribution.slurm.on_node.presence import STALE_S
from gpu_exporter.agent.attribution.source import SlowSource, SourceError
from gpu_exporter.common.clock import ManualClock


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
    filing.steps = {}
    poll(filing)
    fail(filing, "sinfo", AWAY)
    for _ in range(60):
        answer = poll(filing)
        assert held(answer) == {"7": ["0"]} or "job 7 has only a prolog's file" in answer.problem


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


def test_a_job_whose_steps_have_ended_is_no_holder_again_while_no_question_is_asked(filing: Filing) -> None:
    """Its epilog is slow. slurmctld then reports that the job runs all the same, so the list of steps was wrong."""
    begin(filing, "7", "0", nodes="2")
    filing.begin(j7="gpu:h100:1(IDX:0)")
    filing.steps = {"7": {1007}}
    assert held(poll(filing)) == {"7": ["0"]}
    ask_nothing(filing)
    filing.steps = {}
    ends = []
    for _ in range(8):
        answer = poll(filing)
        ends += [grant.holder.job_id for grant in answer.ended]
        names = [(grant.device, grant.holder.job_id) for grant in answer.grants]
        assert names == [("0", "" if ends else "7")], "its GPU is not free either"
    assert ends == ["7"]
    filing.source._pace.is_due = lambda now, changed: True  # type: ignore[method-assign]
    assert held(poll(filing)) == {"7": ["0"]}


def test_an_answer_without_the_row_of_a_job_does_not_report_that_the_job_runs(filing: Filing) -> None:
    """Its steps have ended, and its epilog is slow. The begin of another job leads to a question."""
    begin(filing, "7", "0", nodes="2")
    filing.begin(j7="gpu:h100:1(IDX:0)")
    filing.steps = {"7": {1007}}
    assert held(poll(filing)) == {"7": ["0"]}
    filing.steps = {}
    begin(filing, "8", "1", nodes="2")
    filing.used = "gpu:h100:2(IDX:0-1)"
    failed = fail(filing, "squeue", SlowSource("no answer"))
    answers = [poll(filing) for _ in range(6)]
    assert failed
    assert [grant.holder.job_id for answer in answers for grant in answer.ended] == ["7"]
    assert "7" not in {grant.holder.job_id for grant in answers[-1].grants}


def test_an_ended_run_is_no_holder_again_after_the_end_of_the_next_run(filing: Filing) -> None:
    """slurmctld has reported the first run, and is not asked again. The second run had another GPU."""
    begin(filing, "7", "0", nodes="2")
    filing.begin(j7="gpu:h100:1(IDX:0)")
    filing.steps = {"7": {1007}}
    assert held(poll(filing)) == {"7": ["0"]}
    ask_nothing(filing)
    fail(filing, "sinfo", AWAY)
    for restarts, gpu in enumerate("03"):
        if restarts:
            begin(filing, "7", gpu, nodes="2", restarts=restarts, start=START + 900)
            poll(filing)
        end_and_say(filing, "7")
        answer = poll(filing)
    for _ in range(3):
        assert "7" not in {grant.holder.job_id for grant in answer.grants}
        answer = poll(filing)


@pytest.mark.parametrize("flags", ["Alloc,Contain", "Alloc"])
def test_a_job_that_starts_while_no_question_is_asked_leaves_no_gpu_free(filing: Filing, flags: str) -> None:
    """As after many starts in a minute. With Alloc alone, a file of an ended job lets no file count alone."""
    filing.flags = flags
    filing.restart()
    filing.settle()
    ask_nothing(filing)
    if flags == "Alloc":
        filing.file("6", "gpus=1\nvisible=1\n")
    begin(filing, "7", "0", nodes="2" if "Contain" in flags else "1")
    answer = poll(filing)
    assert (answer.is_late, answer.problem) == (True, "")
    assert "slurmctld is not asked yet about job" in answer.notice
    filing.source._pace.is_due = lambda now, changed: changed  # type: ignore[method-assign]
    filing.begin(j7="gpu:h100:1(IDX:0)")
    filing.steps = {"7": {1007}}
    answer = poll(filing)
    assert (held(answer), answer.is_late, answer.notice) == ({"7": ["0"]}, False, "")


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


@pytest.mark.parametrize("nodes", ["1", "2"])
def test_a_step_that_remains_after_slurmctld_has_forgotten_its_job_hides_no_later_job(
    filing: Filing, nodes: str
) -> None:
    """No prolog's file proves a job on two nodes."""
    begin(filing, "7", "0", nodes="2")
    filing.begin(j7="gpu:h100:1(IDX:0)")
    assert held(poll(filing)) == {"7": ["0"]}
    begin(filing, "8", "0", nodes=nodes, start=START + 10)
    filing.begin(j8="gpu:h100:1(IDX:0)")
    poll(filing)
    answer = poll(filing)
    assert (held(answer), answer.problem) == ({"8": ["0"]}, "")


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


@given(STEPS)
def test_for_any_jobs_no_job_has_anothers_gpu_and_no_held_gpu_is_free(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int, bool]]
) -> None:
    """Jobs with and without a complete file, on four GPUs, while slurmctld answers only sometimes."""
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


@pytest.mark.parametrize(
    ("before", "found", "narrowed"),
    [
        (None, (1.0, 9.0), (1.0, 9.0)),
        ((4.0, 5.5), None, (4.0, 5.5)),
        ((4.0, 5.5), (-3.0, 5.0), (4.0, 5.0)),  # a slow answer, whose bounds contain 0
        ((4.0, 5.5), (60.0, 61.5), (60.0, 61.5)),  # a clock was set
    ],
)
def test_a_slow_answer_does_not_blur_the_difference_of_the_clocks(
    before: tuple[float, float] | None, found: tuple[float, float] | None, narrowed: tuple[float, float]
) -> None:
    assert narrow(before, found) == narrowed


def test_the_next_job_on_a_gpu_is_known_while_slurmctld_still_lists_the_last_one(filing: Filing) -> None:
    """squeue does not answer, and the files count only for GPUs that are in use without a job, since jobs may share them."""
    filing.gres_conf.write_text(f"{filing.gres_conf.read_text()}Name=shard Count=16 File=/dev/nvidia[0-3]\n", "utf-8")
    filing.restart()
    filing.settle()
    begin(filing, "7", "0")
    filing.begin(j7="gpu:h100:1(IDX:0)")
    filing.steps = {"7": {1007}}
    assert held(poll(filing)) == {"7": ["0"]}
    fail(filing, "squeue", "no answer")
    end_and_say(filing, "7", is_now=False)
    begin(filing, "8", "0")
    poll(filing)
    for _ in range(12):
        answer = poll(filing)
        assert [(grant.holder.job_id, grant.device) for grant in answer.grants] == [("8", "0")]


def test_a_slurmctld_that_counts_too_few_gpus_leaves_none_free(filing: Filing) -> None:
    """As 22.05.8 after its start, until the node has registered: it counts one GPU in use, without its position."""
    begin(filing, "7", "0", nodes="2")
    begin(filing, "8", "1", nodes="2")
    filing.begin(j7="gpu:h100:1(IDX:0)")
    filing.used = "gpu:h100:1"
    filing.steps = {"7": {1007}, "8": {1008}}
    for _ in range(30):
        assert (
            "job 8 has steps and GPUs here, but slurmctld reports a GPU of it as free, so the exporter reports no GPU as free"
            in poll(filing).problem
        )
    filing.begin(j7="gpu:h100:1(IDX:0)", j8="gpu:h100:1(IDX:1)")
    filing.used = "gpu:h100:2(IDX:0-1)"
    filing.steps = {"7": {1007}, "8": {1008}}
    for _ in range(9):  # asks again soon, as after each contradiction
        answer = poll(filing)
    assert (held(answer), answer.problem) == ({"7": ["0"], "8": ["1"]}, "")


def test_a_job_that_ends_between_two_answers_is_no_contradiction(filing: Filing) -> None:
    """The steps are read before slurmctld is asked; meanwhile the epilog runs, and slurmctld forgets the job."""
    begin(filing, "7", "0")
    filing.begin(j7="gpu:h100:1(IDX:0)")
    filing.steps = {"7": {1007}}
    assert held(poll(filing)) == {"7": ["0"]}
    filing.restart()
    real = filing.run

    def run(command: Sequence[str], timeout_s: float) -> str:
        if "listpids" not in command and "7" in (filing.steps or {}):
            filing.jobs, filing.used = {}, ""
            end_and_say(filing, "7", is_now=False)
        return real(command, timeout_s)

    filing.source._controller._run_command = run  # type: ignore[union-attr]
    answer = poll(filing)
    assert "7" not in (filing.steps or {}), "the job ended during the poll"
    assert (answer.problem, held(answer)) == ("", {})


def test_a_job_that_slurmctld_is_ending_is_no_contradiction(filing: Filing) -> None:
    """slurmctld frees its GPU at once; its processes have some time to end, and then the epilog runs."""
    begin(filing, "7", "0", nodes="2")
    filing.steps = {"7": {1007}}
    filing.jobs, filing.states, filing.used = {"7": ["gpu:h100:1(IDX:0)"]}, {"7": "COMPLETING"}, ""
    for _ in range(30):
        answer = poll(filing)
        assert (answer.problem, held(answer)) == ("", {})
        assert answer.is_late and "job 7 is ending, but its processes still run" in answer.notice, "its GPU is not free"
    filing.states = {}
    begin(filing, "7", "0", nodes="2", restarts="1")
    filing.jobs, filing.steps = {}, {"7": {1007}}
    assert "slurmctld reports a GPU of it as free" in poll(filing).problem, "it runs again"


@pytest.fixture
def parts(filing: Filing) -> Filing:
    """gres.conf divides each GPU into shards, and the clock runs."""
    filing.gres_conf.write_text(f"{filing.gres_conf.read_text()}Name=shard Count=16 File=/dev/nvidia[0-3]\n", "utf-8")
    filing.clock = ManualClock(wall=float(START))
    filing.slurmd_start = START - 1000
    filing.restart()
    filing.settle()
    return filing


def start_part(filing: Filing, job: str) -> int:
    now = filing.job_start = int(filing.clock.wall())
    begin(filing, job, "0", start=now, began=str(now))
    return now


def end_now(filing: Filing, job: str) -> None:
    """The epilog has run, by the exporter's clock."""
    end_and_say(filing, job, is_now=False)
    (kept,) = (filing.files / ".ended").glob(f"*.{job}")
    kept.write_text(re.sub(r"(?m)^end=.*", f"end={int(filing.clock.wall())}", kept.read_text()))


@pytest.mark.parametrize("is_whole", [True, False])
def test_beside_parts_a_job_ends_when_a_job_with_the_whole_gpu_begins(parts: Filing, is_whole: bool) -> None:
    """The epilog of the first job is late. slurmctld reports the first job or the second one as the whole GPU's."""
    whole, part = "gpu:h100:1(IDX:0)", "shard:h100:1(1/4,0/4,0/4,0/4)"
    start_part(parts, "7")
    parts.begin(j7=whole if is_whole else part)
    assert held(poll(parts)) == {"7": ["0"]}
    parts.steps = {}
    parts.begin()
    parts.clock.advance(10.0)
    start = start_part(parts, "8")
    parts.begin(j8=part if is_whole else whole)
    assert held(poll(parts)) == {"8": ["0"]}
    end_now(parts, "7")
    (grant,) = poll(parts).ended
    now, wall = parts.clock.monotonic(), parts.clock.wall()
    assert (now - grant.confirmed, grant.possible, grant.why) == (pytest.approx(wall - start), grant.confirmed, "")


def test_a_job_with_a_part_has_no_time_after_the_begin_of_a_job_that_may_have_the_whole_gpu(parts: Filing) -> None:
    """slurmctld does not answer. The first job counts as missed; until its epilog, it may have had the GPU."""
    start_part(parts, "7")
    parts.begin(j7="shard:h100:1(1/4,0/4,0/4,0/4)")
    assert held(poll(parts)) == {"7": ["0"]}
    fail(parts, "sinfo", AWAY)
    parts.steps = {}
    parts.clock.advance(5.0)
    start = start_part(parts, "8")
    poll(parts)
    end_now(parts, "7")
    (grant,) = poll(parts).ended
    now, wall = parts.clock.monotonic(), parts.clock.wall()
    assert (now - grant.confirmed, now - grant.possible) == (pytest.approx(wall - start), pytest.approx(5.0, abs=1.0))
    assert grant.why


def test_a_job_beside_which_another_one_ran_is_no_reason_to_doubt_its_end(parts: Filing) -> None:
    """A list had steps of both, so that the other job had a part, although slurmctld has never reported it."""
    start_part(parts, "7")
    parts.begin(j7="shard:h100:1(1/4,0/4,0/4,0/4)")
    assert held(poll(parts)) == {"7": ["0"]}
    fail(parts, "sinfo", AWAY)
    start_part(parts, "8")
    assert parts.steps is not None
    parts.steps["7"] = {1007}
    assert held(poll(parts)) == {"7": ["0"], "8": ["0"]}
    end_now(parts, "8")
    end_now(parts, "7")
    assert [grant.why for grant in poll(parts).ended] == ["", ""]


def test_a_file_without_a_step_beside_a_job_that_ended_is_a_holder_until_its_last_step(parts: Filing) -> None:
    """Its epilog is late, so it may have had its part until now."""
    for job in ("7", "8"):
        start_part(parts, job)
    parts.begin(j7="shard:h100:1(1/4,0/4,0/4,0/4)", j8="shard:h100:1(1/4,0/4,0/4,0/4)")
    parts.used = "shard:h100:2(2/4,0/4,0/4,0/4)"
    assert held(poll(parts)) == {"7": ["0"], "8": ["0"]}
    at = parts.clock.monotonic()
    parts.begin()
    parts.steps = {"7": {1007}}
    end_now(parts, "7")
    answer = poll(parts)
    assert [(grant.holder.job_id, grant.confirmed) for grant in answer.grants] == [("8", pytest.approx(at, abs=1.0))]


def test_of_two_jobs_on_a_whole_gpu_the_one_that_began_later_has_it(filing: Filing) -> None:
    """The epilog of the first one is late: otherwise, two holders would share the GPU. squeue lists no job of the node."""
    filing.clock = ManualClock(wall=float(START))
    filing.slurmd_start = START - 1000
    filing.restart()
    filing.settle()
    for job in ("7", "8"):
        now = int(filing.clock.wall())
        begin(filing, job, "0", start=now, began=str(now), nodes="2")
        filing.steps, filing.used = {job: {1000 + int(job)}}, "gpu:h100:1(IDX:0)"
        assert held(poll(filing)) == {job: ["0"]}
