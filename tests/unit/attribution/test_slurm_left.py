"""Jobs whose epilog did not run: with PrologFlags=Contain, the lists of steps show that they have ended."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.unit.attribution.filed_jobs import AWAY, REFUSED, START, asked, begin, end_and_say, fill, held, poll
from tests.unit.attribution.slurm_cluster import fail
from tests.unit.attribution.slurm_quiet_node import Filing

from gpu_exporter.agent.attribution.slurm.on_node.presence import STALE_S
from gpu_exporter.agent.attribution.source import SourceError
from gpu_exporter.common.clock import ManualClock


@pytest.fixture
def filing(tmp_path: Path) -> Filing:
    found = Filing(tmp_path)
    found.steps = {}
    found.clock = ManualClock(wall=float(START))
    found.slurmd_start = START - 1000
    found.restart()
    found.settle()
    return found


def start(filing: Filing, job: str, gpus: str, **words: str) -> None:
    now = int(filing.clock.wall())
    begin(filing, job, gpus, start=now, began=str(now), **words)


def ends(filing: Filing) -> list[tuple[str, float]]:
    """Poll once. Each job that has ended, and how many seconds ago."""
    answer = poll(filing)
    return [(grant.holder.job_id, filing.clock.monotonic() - grant.confirmed) for grant in answer.ended]


def test_a_job_without_a_step_in_two_complete_lists_ended_at_the_last_list_with_one(filing: Filing) -> None:
    start(filing, "7", "0")
    start(filing, "8", "1")
    poll(filing)
    filing.steps = {"8": {1008}}
    fail(filing, "sinfo", AWAY)
    answer = poll(filing)
    assert held(answer) == {"7": ["0"], "8": ["1"]}
    ages = {
        grant.holder.job_id: filing.clock.monotonic() - grant.confirmed for grant in answer.grants if grant.confirmed
    }
    assert ages == {"7": 5.0}, "job 7 is charged only until the last list with its step"
    answer = poll(filing)
    assert held(answer) == {"8": ["1"]}
    assert [(grant.holder.job_id, filing.clock.monotonic() - grant.confirmed) for grant in answer.ended] == [
        ("7", 10.0)
    ]
    assert "no job belongs to the files 7: check whether the epilog failed" in answer.notice
    for _ in range(30):
        assert (ends(filing), held(poll(filing))) == ([], {"8": ["1"]})


def test_an_answer_about_another_job_does_not_prolong_a_job_without_a_step(filing: Filing) -> None:
    """slurmctld has reported both jobs: no file proves a job on two nodes."""
    start(filing, "7", "0", nodes="2")
    filing.begin(j7="gpu:h100:1(IDX:0)")
    filing.steps = {"7": {1007}}
    poll(filing)
    filing.steps = {}
    start(filing, "8", "1", nodes="2")
    filing.begin(j7="gpu:h100:1(IDX:0)", j8="gpu:h100:1(IDX:1)")
    filing.used = "gpu:h100:2(IDX:0-1)"
    filing.asked.clear()
    confirmed = {grant.holder.job_id: grant.confirmed for grant in poll(filing).grants}
    assert asked(filing) and confirmed == {"7": filing.clock.monotonic() - 5.0, "8": 0.0}


@pytest.mark.parametrize("left", [None, {}])
def test_a_failed_list_is_no_list(filing: Filing, left: dict[str, set[int]] | None) -> None:
    start(filing, "7", "0")
    poll(filing)
    filing.steps, filing.blind, filing.left = {}, REFUSED, left
    for _ in range(4):
        assert held(poll(filing)) == {"7": ["0"]}
    filing.blind = ""
    assert held(poll(filing)) == {"7": ["0"]}
    filing.steps = {"7": {1007}}
    assert held(poll(filing)) == {"7": ["0"]}
    filing.steps = {}
    assert held(poll(filing)) == {"7": ["0"]}
    assert ends(filing) == [("7", 10.0)]


def test_a_job_that_never_had_a_step_is_starting(filing: Filing) -> None:
    start(filing, "7", "0")
    filing.steps = {}
    for _ in range(int(STALE_S / 5) - 1):
        assert held(poll(filing)) == {"7": ["0"]}


def test_without_contain_a_job_may_have_no_step(filing: Filing) -> None:
    filing.flags = "Alloc"
    filing.restart()
    filing.settle()
    start(filing, "7", "0")
    poll(filing)
    filing.steps = {}
    for _ in range(6):
        assert ends(filing) == []


def test_an_epilog_that_runs_later_has_the_exact_end_and_is_reported_once(filing: Filing) -> None:
    start(filing, "7", "0")
    (holder,) = (grant.holder.key for grant in poll(filing).grants)
    filing.steps = {}
    poll(filing)
    assert ends(filing) == [("7", 10.0)]
    end_and_say(filing, "7", is_now=False)
    exact = poll(filing)
    assert ([grant.holder.key for grant in exact.ended], exact.missed) == ([holder], 0)
    assert (ends(filing), poll(filing).missed) == ([], 0)
    start(filing, "7", "1", restarts="1")
    assert held(poll(filing)) == {"7": ["1"]}
    end_and_say(filing, "7", is_now=False)
    assert [job for job, _ in ends(filing)] == ["7"], "the next run"


def test_an_epilog_that_runs_later_misses_no_job_that_was_counted_by_its_steps(filing: Filing) -> None:
    """slurmctld has reported the job, whose file names no user."""
    start(filing, "7", "0", user="")
    filing.begin(j7="gpu:h100:1(IDX:0)")
    filing.steps = {"7": {1007}}
    assert held(poll(filing)) == {"7": ["0"]}
    filing.steps = {}
    poll(filing)
    assert [job for job, _ in ends(filing)] == ["7"]
    end_and_say(filing, "7", is_now=False)
    assert poll(filing).missed == 0


def test_a_file_that_is_written_again_belongs_to_another_run(filing: Filing) -> None:
    start(filing, "7", "0")
    poll(filing)
    filing.steps = {}
    poll(filing)
    start(filing, "7", "0", restarts="1")
    filing.steps = {}
    for _ in range(4):
        assert held(poll(filing)) == {"7": ["0"]}


def test_a_job_that_slurmctld_still_reports_keeps_its_gpu(filing: Filing) -> None:
    """The slurmstepd of the extern step has died, and the job has no other step."""
    start(filing, "7", "0")
    filing.begin(j7="gpu:h100:1(IDX:0)")
    filing.job_start = int(filing.clock.wall())
    filing.steps = {"7": {1007}}
    fill(filing)
    filing.steps = {}
    filing.asked.clear()
    for _ in range(20):
        answer = poll(filing)
        assert ([grant.holder.job_id for grant in answer.grants], answer.ended) == (["7"], ())
    assert asked(filing)
    filing.jobs, filing.used = {}, ""
    found = [end for _ in range(30) for end in ends(filing)]
    assert [job for job, _ in found] == ["7"]
    assert held(poll(filing)) == {}


def test_slurmctld_is_asked_once_about_a_job_whose_epilog_did_not_run(filing: Filing) -> None:
    start(filing, "7", "0")
    poll(filing)
    filing.steps = {}
    filing.asked.clear()
    for _ in range(100):
        poll(filing)
    assert 1 <= len(asked(filing)) <= 3


def test_a_file_without_a_date_of_its_start_is_only_stale(filing: Filing) -> None:
    """The epilog's report could not be recognized as the same end."""
    filing.file("7", "gpus=0\nvisible=0\nuser=ada\nuid=1\ncluster=lab\nrestarts=0\nnodes=1\n")
    filing.steps = {"7": {1007}}
    poll(filing)
    filing.steps = {}
    for _ in range(6):
        assert (held(poll(filing)), ends(filing)) == ({"7": ["0"]}, [])


STEPS = st.lists(
    st.tuples(st.sampled_from(["begin", "end", "fail", "late", "blind", "see", "away", "back", "wait"]), st.integers(0, 2)),
    max_size=30,
)  # fmt: skip


@given(STEPS)
@example([("begin", 2), ("fail", 2), ("begin", 0), ("late", 2)])
def test_no_run_ends_twice_in_one_way_and_none_that_runs_ends(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]]
) -> None:
    filing = Filing(tmp_path_factory.mktemp("node"))
    filing.steps, filing.clock, filing.slurmd_start = {}, ManualClock(wall=float(START)), START - 1000
    filing.restart()
    filing.settle()
    run = filing.run
    runs, seen, late = dict[str, int](), list[tuple[str, bool]](), set[str]()
    for what, number in steps:
        job, alive = str(number + 1), filing.steps
        assert alive is not None
        if what == "begin" and job not in alive:
            runs[job] = runs.get(job, -1) + 1
            start(filing, job, str(number), restarts=str(runs[job]))
        elif what == "end" and job in alive:
            end_and_say(filing, job, is_now=False)
        elif what == "fail" and job in alive:
            del alive[job]
        elif what == "late" and job not in alive and (filing.files / job).exists():
            end_and_say(filing, job, is_now=False)
            late.add(f"lab/{job}/{runs[job]}/")
        elif what in ("blind", "see"):
            filing.blind = REFUSED if what == "blind" else ""
        elif what == "away":
            fail(filing, "sinfo", AWAY)
        elif what == "back":
            filing.source._controller._run_command = run  # type: ignore[union-attr]
        try:
            answer = poll(filing)
        except SourceError:
            continue
        for grant in answer.ended:
            run_id = grant.holder.key.incarnation
            seen.append((run_id, run_id.rpartition("/")[0] + "/" in late))  # a late epilog dates the end again
            now = f"lab/{grant.holder.job_id}/{runs[grant.holder.job_id]}/"
            assert grant.holder.job_id not in alive or not run_id.startswith(now)
    assert len(seen) == len(set(seen))
