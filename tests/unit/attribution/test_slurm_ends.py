"""Ends of jobs while the exporter does not run: each is reported once, or counted as missed."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.attribution.filed_jobs import begin, end_and_say, held
from tests.unit.attribution.slurm_quiet_node import Filing

from gpu_exporter.agent.attribution.slurm.on_node.ends import FIRST, LATE_S, TOLD_MAX, JobEnds, NewEnds
from gpu_exporter.agent.attribution.slurm.on_node.job_files import FILES_MAX, READ_MAX
from gpu_exporter.common.clock import ManualClock
from gpu_exporter.common.model.holders import PastEnds

WALL = 1_800_000_000


class Node:
    """A directory of the prolog's files, and exporters that watch it one after the other."""

    def __init__(self, directory: Path) -> None:
        self.place = directory
        (directory / ".ended").mkdir(parents=True, mode=0o755)
        directory.chmod(0o755)
        self.clock = ManualClock(wall=float(WALL))
        self._ends = JobEnds(directory, self.clock, None)
        self.saved: PastEnds | None = None  # the state file
        self.next = FIRST

    def end(self, job: str, *, restarts: int = 0, began: float | None = None, name: str = "") -> Path:
        """The epilog has recorded the end of a job, now."""
        end = int(self.clock.wall())
        text = f"job={job}\ngpus=0\nvisible=0\nuser=ada\nuid=7\ncluster=lab\nrestarts={restarts}\nnodes=1\n"
        text += f"began={end - 5 if began is None else began:.0f}\nend={end}\n"
        path = self.place / ".ended" / (name or f"{self.next}.{job}")
        self.next += not name
        path.write_text(text)
        path.chmod(0o644)
        return path

    def start(self, past: PastEnds | None) -> NewEnds:
        """An exporter has started with this state file."""
        self._ends = JobEnds(self.place, self.clock, lambda: past)
        return self._ends.read()

    def poll(self) -> NewEnds:
        return self._ends.read()

    def save(self) -> PastEnds:
        return PastEnds(list(self._ends.reported), self.clock.monotonic())


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path / "jobs")


def jobs(found: NewEnds) -> list[str]:
    return [job.job_id for job in found.ended]


def test_each_end_that_the_state_file_does_not_contain_is_reported_once_after_a_restart(node: Node) -> None:
    node.start(None)
    node.end("7")
    assert jobs(node.poll()) == ["7"]
    saved = node.save()
    node.clock.advance(3600.0)
    node.end("8")
    node.clock.advance(5.0)
    node.end("264")  # 256 more
    node.clock.advance(30.0)
    assert (jobs(node.start(saved)), node.poll()) == (["8", "264"], NewEnds())
    assert jobs(node.start(saved)) == ["8", "264"], "the first of two starts was killed before it saved anything"
    assert (jobs(node.start(node.save())), node.poll()) == ([], NewEnds())


def test_without_a_state_file_of_this_boot_ends_before_the_start_are_missed(node: Node) -> None:
    node.end("7")
    (node.place / ".ended" / "5").write_text("job=5\ngpus=\nvisible=\nend=1800000000\n")  # no GPU
    assert node.start(None) == NewEnds((), 1)
    node.end("8")
    assert (jobs(node.poll()), node.poll()) == (["8"], NewEnds())
    assert node.start(node.save()) == NewEnds(), "a missed job is not reported later"


def test_ends_between_the_start_and_the_first_poll_are_not_missed(node: Node) -> None:
    ends = JobEnds(node.place, node.clock, lambda: None)
    node.end("7")
    assert jobs(ends.read()) == ["7"]


def test_one_reading_counts_no_end(node: Node) -> None:
    node.end("7")
    assert JobEnds(node.place, node.clock, None).read() == NewEnds()


def test_files_that_the_epilog_has_removed_unread_are_missed(node: Node) -> None:
    node.start(None)
    first = node.end("7")
    node.poll()
    saved = node.save()
    for number in range(300):
        path = node.end(str(100 + number))
        if number < 44:
            path.unlink()
    first.unlink()
    found = node.start(saved)
    assert (len(found.ended), found.missed) == (256, 44)
    assert node.start(node.save()) == NewEnds()
    for number in range(3):  # also while the exporter runs
        node.end(str(500 + number))
    for path in (node.place / ".ended").iterdir():
        path.unlink()
    node.end("600")
    found = node.poll()
    assert (jobs(found), found.missed) == (["600"], 3)


def test_numbers_that_begin_again_remove_nothing(node: Node) -> None:
    """An administrator has removed the directory."""
    node.start(None)
    for job in "789":
        node.end(job)
    node.poll()
    saved = node.save()
    for path in (node.place / ".ended").iterdir():
        path.unlink()
    node.next = FIRST
    node.end("7", restarts=1)
    found = node.start(saved)
    assert (jobs(found), found.missed) == (["7"], 0)


def test_another_run_of_a_job_and_a_reused_job_id_are_other_ends(node: Node) -> None:
    node.start(None)
    node.end("7", began=WALL)
    node.poll()
    saved = node.save()
    node.clock.advance(60.0)
    node.end("7", restarts=1)
    node.end("7", began=WALL + 50)
    found = node.start(saved)
    assert {job.run for job in found.ended} == {f"7/1/{WALL + 55}", f"7/0/{WALL + 50}"}


def test_an_end_before_the_last_poll_of_the_state_file_is_missed_because_the_clock_was_set(node: Node) -> None:
    node.start(None)
    saved = node.save()
    node.clock.advance(30.0)
    node.end("7")
    node.clock = ManualClock(monotonic=node.clock.monotonic() + 5.0, wall=node.clock.wall() + 5.0 + 3600.0)
    assert node.start(saved) == NewEnds((), 1)
    node.clock = ManualClock(monotonic=node.clock.monotonic(), wall=float(WALL) - 3600.0)
    assert jobs(node.start(saved)) == ["7"]


def test_an_epilog_that_was_late_is_not_missed(node: Node) -> None:
    node.start(None)
    node.clock.advance(60.0)
    written = node.end("7")
    hidden = written.rename(node.place / "later")
    node.clock.advance(LATE_S - 1.0)
    saved = node.save()
    hidden.rename(written)
    assert jobs(node.start(saved)) == ["7"]


def test_names_of_earlier_epilogs_are_read(node: Node) -> None:
    node.start(None)
    saved = node.save()
    node.end("7", name="7")
    node.end("8")
    found = node.start(saved)
    assert ({(job.job_id, job.number) for job in found.ended}, found.missed) == ({("7", 0), ("8", FIRST)}, 0)


@pytest.mark.parametrize(
    "body",
    [b"", b"job=7\ngpus=0\nend=18", b"job=7\ngpus=0\nend=" + b"9" * 400 + b"\n", b"\0" * (READ_MAX + 1), b"\xff=7\nend=1\n"],
    ids=["empty", "torn", "a huge number", "huge", "not text"],
)  # fmt: skip
def test_odd_files_cost_only_themselves_and_are_named_and_missed_once(
    node: Node, body: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    node.start(None)
    saved = node.save()
    ended = node.place / ".ended"
    good = node.end("9", name=f"{FIRST + 3}.9")
    (ended / f"{FIRST}.7").write_bytes(body)
    (ended / f"{FIRST + 1}.8").symlink_to(good)
    os.mkfifo(ended / f"{FIRST + 2}.6", 0o644)
    for number in range(FILES_MAX):
        (ended / f".core.{number}").touch()  # no file of an epilog
    found = node.start(saved)
    assert (jobs(found), found.missed) == (["9"], 3)
    assert sorted(text.split(": ")[0] for text in caplog.messages) == [
        f"{ended}/{FIRST + number}.{job}" for number, job in enumerate((7, 8, 6))
    ]
    assert (node.poll(), node.start(node.save())) == (NewEnds(), NewEnds())


def test_a_directory_that_others_may_write_to_is_not_read_and_named(node: Node) -> None:
    node.start(None)
    node.end("7")
    (node.place / ".ended").chmod(0o775)
    found = node.poll()
    assert (found.ended, found.missed) == ((), 0)
    assert found.notice.startswith(f"{node.place}/.ended: not read, because other users can write to it (uid ")
    (node.place / ".ended").chmod(0o755)
    assert (jobs(last := node.poll()), last.notice) == (["7"], "")


def test_of_too_many_files_the_newest_count(node: Node) -> None:
    node.start(None)
    for number in range(FILES_MAX + 10):
        node.end(str(100 + number))
    assert jobs(node.poll())[0] == "110"


@pytest.mark.parametrize("reported", [["", "x", "7", "/", "a/b/c", "9" * 500 + "/7/0/1", "1000000009/7/0/1"]])
def test_any_text_in_the_state_file_is_read(node: Node, reported: list[str]) -> None:
    node.end("8")
    assert jobs(node.start(PastEnds(reported, node.clock.monotonic()))) == ["8"]


def test_the_memory_of_ends_is_limited_and_keeps_the_newest(node: Node) -> None:
    node.start(None)
    for number in range(TOLD_MAX + 40):
        path = node.end(str(100 + number))
        node.poll()
        if number < TOLD_MAX:
            path.unlink()
    saved = node.save()
    assert len(saved.reported) == TOLD_MAX
    assert node.start(saved) == NewEnds()


STEPS = st.lists(st.sampled_from(["end", "requeue", "poll", "save", "restart", "kill", "touch", "wait"]), max_size=40)


@given(STEPS)
def test_every_run_is_reported_once_in_each_history_that_the_state_file_continues(steps: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        node = Node(Path(folder) / "jobs")
        counted: list[str] = []  # as the counters: a kill takes what was not saved
        saved: list[str] = []
        node.start(None)
        past, runs = node.save(), dict[str, int]()

        def read(found: NewEnds) -> None:
            assert found.missed == 0
            counted.extend(job.run for job in found.ended)

        for step in [*steps, "poll"]:
            if step in ("end", "requeue"):
                job = str(len(runs) + 1) if step == "end" or not runs else next(iter(runs))
                runs[job] = runs.get(job, -1) + 1
                node.end(job, restarts=runs[job])
            elif step == "poll":
                read(node.poll())
            elif step == "save":
                past, saved = node.save(), list(counted)
            elif step == "restart":
                past = node.save()
                saved = list(counted)
                read(node.start(past))
            elif step == "kill":
                counted = list(saved)
                read(node.start(past))
            elif step == "touch":
                for path in (node.place / ".ended").iterdir():
                    os.utime(path, (1.0, 1.0))
            else:
                node.clock.advance(20.0)
        assert len(counted) == len(set(counted)) == sum(number + 1 for number in runs.values())


def test_a_source_reports_the_times_of_a_job_that_ended_before_its_start(filing: Filing) -> None:
    start = filing.slurmd_start
    assert isinstance(start, int)
    filing.clock = ManualClock(monotonic=5_000.0, wall=start + 100.0)
    filing.recall = lambda: PastEnds([], 5_000.0 - 60.0)
    begin(filing, "7", "0,2", start=start + 60)
    begin(filing, "8", "1", start=start + 70, user="")
    for job in "78":
        end_and_say(filing, job, is_now=False)
    for path in (filing.files / ".ended").iterdir():
        path.write_text(path.read_text().rpartition("end=")[0] + f"end={start + 90}\n")
    filing.restart()
    answer = filing.source.poll()
    assert (held(answer), answer.missed) == ({}, 1)
    assert [(grant.device, grant.confirmed, grant.start_here) for grant in answer.ended] == [
        (device, 4_990.0, start + 60) for device in "02"
    ]
    assert len(answer.reported) == 2
    again = filing.source.poll()
    assert (again.ended, again.missed, len(again.reported)) == ((), 0, 2)
    filing.recall = lambda: PastEnds(answer.reported, 5_000.0)
    filing.restart()
    answer = filing.source.poll()
    assert (answer.ended, answer.missed) == ((), 0)
    filing.recall = lambda: PastEnds([], 4_940.0)
    filing.clock = ManualClock(monotonic=5_000.0, wall=start + 80.0)  # set back by 20 s
    filing.restart()
    ended = filing.source.poll().ended
    assert [(grant.confirmed, grant.start_here) for grant in ended] == [(5_000.0, start + 50.0)] * 2, "30 s, as before"


def test_an_end_that_an_earlier_version_counted_by_its_steps_is_not_missed(node: Node) -> None:
    """Its state file does not have the number of the epilog's later file."""
    node.start(None)
    began = node.clock.wall()
    node.end("7", began=began)
    node.clock.advance(3600.0)
    saved = PastEnds([f"0/7/0/{began:.0f}"], node.clock.monotonic())
    assert node.start(saved) == NewEnds()
