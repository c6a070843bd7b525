"""Files, steps or lists that cannot be read: no job is lost, and no GPU is free because of it."""

from __future__ import annotations

import pytest
from tests.unit.attribution.filed_jobs import AWAY, REFUSED, asked, begin, end_and_say, fill, held, poll
from tests.unit.attribution.slurm_cluster import fail
from tests.unit.attribution.slurm_quiet_node import Filing

from gpu_exporter.agent.attribution.slurm.on_node.presence import STALE_S


def test_unreadable_files_leave_no_gpu_free(filing: Filing) -> None:
    begin(filing, "7", "0")
    poll(filing)
    filing.files.chmod(0o777)
    fail(filing, "sinfo", AWAY)
    answer = poll(filing)
    assert held(answer) == {}
    assert "job 7 has only a prolog's file, and Slurm does not list the job" in answer.problem
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
    assert "no job belongs to the files 7" in answer.notice
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
    assert "no job belongs to the files 7: check whether the epilog failed" in answer.notice
    before = len(asked(filing))
    assert before
    for _ in range(100):
        assert poll(filing).problem == ""
    assert len(asked(filing)) == before, "slurmctld is asked once about the file"
