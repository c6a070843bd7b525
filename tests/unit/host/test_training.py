"""Files in which jobs describe their training: whose they are follows from where they lie, and any content is survived."""

from __future__ import annotations

import json
import logging
import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.testbed.processes import PROMPT_S, wait_for

from gpu_exporter.common.clock import SYSTEM_CLOCK, ManualClock
from gpu_exporter.common.model.holders import Allocation, Holder, HolderKey, Who
from gpu_exporter.common.model.training import RankReport
from gpu_exporter.common.model.units import UnitId
from gpu_exporter.common.report_rules import FILES_MAX, PHASES, SIZE_MAX
from gpu_exporter.diagnosis.host.cgroups import Cgroups
from gpu_exporter.diagnosis.host.loop import HostLoop, HostNode
from gpu_exporter.diagnosis.host.progress import ProgressReader
from gpu_exporter.diagnosis.host.work import HostWorks
from gpu_exporter.diagnosis.training.files import (
    IN_POD,
    NAMES_MAX,
    TrainingFiles,
    TrainingPlaces,
    TrainingReader,
)
from gpu_exporter.diagnosis.training.reports import parse_report

UID = "3f7c5a52-0f4b-4b0e-9d0a-0c5a3e6f9b11"
OTHER = "99999999-0f4b-4b0e-9d0a-0c5a3e6f9b11"
POD, JOB = ("pod", UID), ("job", "42")
REPORT: dict[str, Any] = {
    "format": "gpu-exporter-training/1",
    "run": "abc123",
    "rank": 0,
    "world_size": 1,
    "steps": 500,
    "measured_steps": 495,
    "step_seconds": 49.5,
    "wait_seconds": 30.0,
    "gpu_wait_seconds": 28.0,
    "gpu_work_seconds": 21.0,
    "phases": {"forward": {"seconds": 5.0, "gpu_seconds": 9.0}, "dance": {"seconds": 1.0}},
    "facts": {"num_workers": 2, "cpus": 3.5, "parameters": "float32", "pin_memory": False, "secret": "token"},
    "gpus": ["GPU-1234"],
}


class Site:
    def __init__(self, path: Path) -> None:
        self.pods, self.jobs = path / "pods", path / "jobs"
        self.pods.mkdir()
        self.jobs.mkdir(mode=0o755)
        self.clock = ManualClock()
        self.reader = TrainingReader(TrainingPlaces(self.pods, self.jobs), self.clock)

    def pod(self, uid: str = UID) -> Path:
        folder = self.pods.joinpath(uid, *IN_POD)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def job(self, number: str = "42", uid: int | None = None) -> Path:
        folder = self.jobs / number
        folder.mkdir(exist_ok=True)
        if uid is not None:
            os.chown(folder, uid, -1)
        return folder

    def read(self, *whos: tuple[str, str]) -> dict[tuple[str, str], tuple[RankReport, ...]]:
        self.clock.advance(20.0)
        return {who: files.reports for who, files in self.reader.read(whos or (POD, JOB))}


def write(path: Path, **changes: Any) -> Path:
    path.write_text(json.dumps(REPORT | changes))
    return path


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_a_report_is_read_with_its_numbers_and_without_what_the_format_does_not_have(site: Site) -> None:
    write(site.pod() / "run-abc123.json")
    (report,) = site.read(POD)[POD]
    assert (report.steps, report.measured, report.step_s, report.wait_s) == (500, 495, 49.5, 30.0)
    assert (report.starved_s, report.worked_s, report.is_gpu) == (28.0, 21.0, True)
    assert report.phases == {"forward": 9.0}
    assert report.facts == {"num_workers": 2, "cpus": 3.5, "parameters": "float32", "pin_memory": False}
    assert report.gpus == ("GPU-1234",)


def test_the_smallest_report_that_any_framework_may_write(site: Site) -> None:
    (site.job() / "run-jax.json").write_text('{"format": "gpu-exporter-training/1", "steps": 7}')
    (report,) = site.read(JOB)[JOB]
    assert (report.steps, report.step_s, report.rank, report.facts) == (7, None, None, {})


def test_a_holder_without_a_folder_costs_nothing_and_says_nothing(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    assert site.read() == {}
    assert site.read(("pod", "../../etc"), ("job", "../42"), ("job", "x"), ("pod", "static-hash")) == {}
    assert caplog.text == ""


def test_it_looks_every_fifteen_seconds_at_most(site: Site) -> None:
    write(site.pod() / "run-abc123.json")
    assert site.read()
    site.clock.advance(5.0)
    assert list(site.reader.read([POD])) == []


def link_file(site: Site) -> None:
    target = write(site.pod(OTHER) / "run-abc123.json")
    (site.pod() / "run-abc123.json").symlink_to(target)


def link_folder(site: Site) -> None:
    write(site.pod(OTHER) / "run-abc123.json")
    folder = site.pod()
    folder.rmdir()
    folder.symlink_to(site.pod(OTHER))


def link_hard(site: Site) -> None:
    os.link(write(site.pod(OTHER) / "run-abc123.json"), site.pod() / "run-abc123.json")


def pipe(site: Site) -> None:
    os.mkfifo(site.pod() / "run-abc123.json")


def folder_as_file(site: Site) -> None:
    (site.pod() / "run-abc123.json").mkdir()


def too_long(site: Site) -> None:
    write(site.pod() / "run-abc123.json", padding="x" * SIZE_MAX)


def too_deep(site: Site) -> None:
    (site.pod() / "run-abc123.json").write_text("[" * 50_000)


def no_json(site: Site) -> None:
    (site.pod() / "run-abc123.json").write_bytes(b"\xff\x00{")


def wrong_format(site: Site) -> None:
    write(site.pod() / "run-abc123.json", format="gpu-exporter-training/2")


ATTACKS = (link_file, link_folder, link_hard, pipe, folder_as_file, too_long, too_deep, no_json, wrong_format)


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_what_is_no_plain_file_of_this_pod_is_refused_and_costs_only_itself(
    attack: Any, site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    attack(site)
    if attack is not link_folder:
        write(site.pod() / "rank-1.json", rank=1, world_size=2, run="good")
    write(site.job() / "run-b.json", run="b")
    with caplog.at_level(logging.WARNING):
        found = site.read(POD, JOB)
    assert [each.run for each in found.get(POD, ())] == ([] if attack is link_folder else ["good"])
    assert [each.run for each in found[JOB]] == ["b"]
    assert len(caplog.records) == 1 and UID in caplog.text
    site.read(POD, JOB)
    assert len(caplog.records) == 1, "the same refusal is logged once"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make a file of another user")
def test_a_job_cannot_be_described_by_another_user(site: Site) -> None:
    path = write(site.job(uid=1000) / "run-abc123.json")
    assert site.read(JOB) == {}
    os.chown(path, 1000, -1)
    assert len(site.read(JOB)[JOB]) == 1


def test_jobs_folders_that_any_user_could_have_made_do_not_count(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    write(site.job() / "run-abc123.json")
    site.jobs.chmod(0o1777)
    assert site.read(JOB) == {}
    assert "users other than root can write" in caplog.text or "cannot be read" in caplog.text


def test_of_two_files_of_one_rank_the_newest_counts_and_old_ones_do_not(site: Site) -> None:
    old = write(site.pod() / "rank-0.json", rank=0, world_size=2, run="old", steps=9)
    os.utime(old, (time.time() - 100, time.time() - 100))
    write(site.pod() / "rank-00.json", rank=0, world_size=2, run="new", steps=1)
    assert [each.run for each in site.read(POD)[POD]] == ["new"]
    ancient = write(site.pod() / "rank-7.json", rank=7, world_size=8)
    os.utime(ancient, (time.time() - 90_000, time.time() - 90_000))
    assert [each.run for each in site.read(POD)[POD]] == ["new"]


def test_files_that_cost_much_cost_only_their_holder(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    write(site.job() / "run-a.json", run="a")
    for number in range(FILES_MAX):
        (site.pod() / f"run-{number}.json").write_text(
            json.dumps(REPORT | {"run": str(number), "x": [1e5] * ((SIZE_MAX - 1000) // 10)})
        )
    assert len(site.read(POD, JOB)[POD]) < 10
    assert "bytes of reports; only the newest are used" in caplog.text
    for _ in range(10):
        assert JOB in site.read(POD, JOB), "the honest job is read every time"


def test_two_writers_without_a_run_are_two_processes(site: Site) -> None:
    for name in ("run-a", "run-b"):
        report = {"format": REPORT["format"], "steps": 7}
        (site.job() / f"{name}.json").write_text(json.dumps(report))
    assert sorted(each.run for each in site.read(JOB)[JOB]) == ["run-a", "run-b"]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make a device file")
def test_a_device_file_is_refused_before_it_is_opened(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mknod(site.pod() / "run-a.json", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    opened, original = [], os.open

    def note(path: Any, flags: int, *arguments: Any, **keywords: Any) -> int:
        if not flags & (os.O_PATH | os.O_DIRECTORY):
            opened.append(Path(path).readlink())
        return original(path, flags, *arguments, **keywords)

    monkeypatch.setattr(os, "open", note)
    assert site.read(POD) == {}
    assert [path.name for path in opened] == ["mountinfo"]


def test_a_folder_full_of_files_costs_a_bounded_look_that_the_log_names(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(NAMES_MAX + 40):
        write(site.pod() / f"rank-{number}.json", rank=number, world_size=9999)
    assert len(site.read(POD)[POD]) <= FILES_MAX
    assert "more than" in caplog.text


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda each: st.lists(each, max_size=4) | st.dictionaries(st.text(max_size=8), each, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from([*REPORT, "state"]), JSON, max_size=14))
def test_any_value_of_any_key_is_bounded_or_unknown(changes: dict[str, Any]) -> None:
    text = json.dumps(REPORT | changes)
    try:
        report = parse_report(text.encode(), -5.0)
    except ValueError:
        return
    assert 0 <= report.measured <= report.steps <= 10**15
    assert report.age_s == 0.0
    for seconds in (report.step_s, report.wait_s, report.starved_s, report.worked_s, *report.phases.values()):
        assert seconds is None or 0.0 <= seconds <= 1e10
    assert set(report.phases) <= set(PHASES)
    assert "secret" not in report.facts
    assert all(isinstance(each, int | float | bool) or len(each) < 20 for each in report.facts.values())


@given(st.binary(max_size=300))
def test_any_bytes_are_a_report_or_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError):
        parse_report(data, 0.0)


def test_what_the_hook_writes_is_what_the_exporter_reads(tmp_path: Path) -> None:
    from gpu_exporter_torch import observe

    with observe(range(60), phases=True, directory=tmp_path, summary=False) as observed:
        for _ in observed:
            with observed.phase("forward"):
                pass
    (path,) = tmp_path.glob("*.json")
    report = parse_report(path.read_bytes(), 0.0)
    assert (report.steps, report.measured, report.has_ended, report.is_gpu) == (60, 55, True, False)
    assert set(report.phases) == {"forward"}
    assert report.step_s is not None and report.wait_s is not None


def test_a_fault_that_one_holders_report_shows_costs_the_others_nothing(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    write(site.pod() / "run-a.json", run="a")
    write(site.job() / "run-b.json", run="b")
    held = [
        Allocation(UnitId("GPU-0"), Holder(HolderKey("kubernetes", UID), pod_uid=UID), "none", 1.0),
        Allocation(UnitId("GPU-1"), Holder(HolderKey("slurm", "42"), job_id="42"), "none", 1.0),
    ]
    noted: list[Who] = []

    def note(who: Who, files: TrainingFiles) -> None:
        if who == POD:
            raise RuntimeError("injected")
        noted.append(who)

    node = HostNode(lambda: (held, 2), lambda: (), lambda *_: None, lambda: (), lambda *_: None, note)
    loop = make_loop(site)
    loop._read_training(site.reader, node)
    assert loop.tasks[1].failures == 1
    assert noted == [JOB]
    assert "injected" in caplog.text


LEASE = """
import fcntl, os, sys, signal, time
signal.signal(signal.SIGIO, signal.SIG_IGN)  # the kernel asks the holder to give the lease up
handle = os.open(sys.argv[1], os.O_RDONLY)
fcntl.fcntl(handle, fcntl.F_SETLEASE, fcntl.F_WRLCK)
print("held", flush=True)
time.sleep(60)
"""


def test_a_file_on_which_the_job_holds_a_lease_is_refused_at_once(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """A plain open waits for /proc/sys/fs/lease-break-time, 45 s: with 64 files that makes 48 minutes."""
    leased = write(site.pod() / "run-a.json")
    write(site.pod() / "run-b.json", run="b")
    holder = subprocess.Popen([sys.executable, "-c", LEASE, leased], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        began = time.monotonic()
        assert [report.run for report in site.read(POD)[POD]] == ["b"]
        assert time.monotonic() - began < PROMPT_S
    finally:
        holder.kill()
        holder.communicate()
    assert "run-a.json is ignored: another process holds a file lease on it" in caplog.text


def test_a_file_that_vanishes_while_the_folder_is_listed_costs_only_itself(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write(site.pod() / "run-a.json")
    gone = write(site.pod() / "run-gone.json", run="gone")
    real = os.scandir

    class Entries:
        def __init__(self, folder: int) -> None:
            self.entries = real(folder)

        def __enter__(self) -> Entries:
            return self

        def __exit__(self, *_: object) -> None:
            self.entries.close()

        def __iter__(self) -> Iterator[os.DirEntry[str]]:
            found = list(self.entries)
            gone.unlink()
            return iter(found)

    monkeypatch.setattr(os, "scandir", Entries)
    assert [report.run for report in site.read(POD)[POD]] == ["abc123"]
    assert caplog.text == ""


def test_each_reason_to_refuse_a_file_is_logged_once(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    folder = site.pod()
    for turn in range(6):
        (folder / "run-a.json").write_bytes(b"\xffsecret")
        write(folder / "run-b.json", steps="many")
        os.utime(folder / f"run-{'ab'[turn % 2]}.json", (time.time() + 10.0, time.time() + 10.0))
        site.read(POD)
    assert caplog.text.count("it is not UTF-8") == 1
    assert caplog.text.count("is ignored") == 2
    assert "xff" not in caplog.text and "secret" not in caplog.text


def make_loop(site: Site, looks: Any = None) -> HostLoop:
    class NoLooks:
        def read(self, *_: object) -> Iterator[Any]:
            return iter(())

    cgroups = Cgroups(site.pods)
    works, progress = HostWorks(cgroups, SYSTEM_CLOCK, 8), ProgressReader(cgroups, SYSTEM_CLOCK, None)
    return HostLoop(works, progress, looks or NoLooks(), SYSTEM_CLOCK, site.reader)


def test_a_training_that_cannot_be_read_delays_nothing_else(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a job finds to delay its reader: work, progress and evidence of all holders are read on."""
    stop, released, looks = threading.Event(), threading.Event(), threading.Semaphore(0)

    class Looks:
        def read(self, *_: object) -> Iterator[Any]:
            looks.release()
            return iter(())

    def hang(*_: object) -> Iterator[Any]:
        released.wait()
        return iter(())

    monkeypatch.setattr(site.reader, "read", hang)
    monkeypatch.setattr("gpu_exporter.diagnosis.host.loop.TICK_S", 0.01)
    holder = Allocation(UnitId("GPU-1"), Holder(HolderKey("slurm", "42"), job_id="42"), "none", 0.0)
    node = HostNode(lambda: ((holder,), 1), tuple, lambda *_: None, tuple, lambda *_: None, lambda *_: None)
    loop = make_loop(site, Looks())
    running = threading.Thread(target=loop.run, args=(stop, node))
    running.start()
    try:
        assert all(looks.acquire(timeout=60.0) for _ in range(3))
    finally:
        stop.set()
        released.set()
        running.join(60.0)


class Hanging:
    """The folders of some jobs do not answer, as a FUSE file system whose program has stopped. With them any open of a
    path waits; `answer` ends that.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, jobs: set[str]) -> None:
        self.jobs, self.waiting = jobs, set[str]()
        self._answers, self._open = {job: threading.Event() for job in jobs}, os.open
        monkeypatch.setattr("gpu_exporter.diagnosis.training.files.os.open", self)

    def __call__(self, path: Any, *given: Any, **named: Any) -> int:
        if path in self.jobs:
            self.waiting.add(path)
            self._answers[path].wait(60.0)
            self.waiting.discard(path)
        return self._open(path, *given, **named)

    def answer(self, job: str) -> None:
        self._answers[job].set()


class Jobs:
    """Reads the trainings of these jobs by a real loop, whose looks follow at once, while the test moves the clock."""

    def __init__(self, site: Site, monkeypatch: pytest.MonkeyPatch, *jobs: str) -> None:
        monkeypatch.setattr("gpu_exporter.diagnosis.host.loop.TICK_S", 0.005)
        for job in jobs:
            write(site.job(job) / "run-a.json", run=job)
        held = [
            Allocation(UnitId(f"GPU-{job}"), Holder(HolderKey("slurm", job), job_id=job), "none", 1.0) for job in jobs
        ]
        self.noted: list[str] = []
        self._node = HostNode(
            lambda: (held, len(held)), tuple, lambda *_: None, tuple, lambda *_: None, lambda who, _: self._note(who)
        )
        self.site, self.stop, self.loop = site, threading.Event(), make_loop(site)
        self._running = threading.Thread(target=self.loop.run, args=(self.stop, self._node))

    def _note(self, who: Who) -> None:
        self.noted.append(who[1])

    def __enter__(self) -> Jobs:
        self._running.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self._running.join(60.0)

    def until(self, condition: Callable[[], object]) -> None:
        """Let the clock run until the condition holds."""

        def turn() -> object:
            self.site.clock.advance(5.0)
            return condition() or None

        wait_for(turn, "the condition")

    def readers(self) -> int:
        return sum(thread.name == "training" and thread.is_alive() for thread in threading.enumerate())


def test_a_folder_that_does_not_answer_costs_only_its_own_job(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hanging = Hanging(monkeypatch, {"1", "3"})
    with Jobs(site, monkeypatch, "1", "2", "3", "4") as jobs:
        jobs.until(lambda: hanging.waiting == {"1", "3"} and jobs.noted.count("4") >= 3)
        assert {"2", "4"} == set(jobs.noted)
        assert jobs.readers() == 3
        said = [record.getMessage() for record in caplog.records]
        text = "training of job {}: its folder has not answered for 60 s: the exporter skips it until it answers"
        assert said == [text.format(1), text.format(3)]
        for job in ("3", "1"):
            hanging.answer(job)
            jobs.until(lambda job=job: jobs.noted.count(job) >= 2)  # type: ignore[misc]
        wait_for(lambda: jobs.readers() == 1 or None, "the end of the readers that were left behind")


@pytest.mark.slow
def test_no_more_than_two_readers_are_left_behind(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hanging = Hanging(monkeypatch, {"1", "2", "3"})
    with Jobs(site, monkeypatch, "1", "2", "3", "4") as jobs:
        jobs.until(
            lambda: "3 folders do not answer now, and until one of them does, the exporter reads no" in caplog.text
        )
        start = site.clock.monotonic()
        jobs.until(lambda: site.clock.monotonic() - start > 600.0)
        assert jobs.readers() == 3 and jobs.noted == [] and len(caplog.records) == 3
        hanging.answer("2")
        jobs.until(lambda: jobs.noted.count("4") >= 2)
        assert set(jobs.noted) == {"2", "4"}
        assert jobs.readers() == 3
        for job in ("1", "3"):
            hanging.answer(job)


def test_a_folder_on_a_file_system_that_may_never_answer_is_not_opened(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hanging = Hanging(monkeypatch, {"1"})
    for job in ("1", "2"):
        write(site.job(job) / "run-a.json", run=job)
    table = site.pods.parent / "mountinfo"
    table.write_text(f"90 25 0:50 / {site.jobs}/1 rw - fuse.sshfs\x1b[31m none rw\n")
    reader = TrainingReader(TrainingPlaces(site.pods, site.jobs, table), site.clock)
    assert [who for who, _ in reader.read([("job", "1"), ("job", "2")])] == [("job", "2")]
    assert not hanging.waiting
    (record,) = caplog.records
    assert record.getMessage() == (
        "training of job 1: the exporter does not read its folder, because "
        "fuse.sshfs\ufffd[31m is mounted there and may never answer"
    )
