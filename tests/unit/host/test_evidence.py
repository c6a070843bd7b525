"""Looks at a holder: real processes and their threads, cgroups made of files in both versions, and what must stay secret."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

import psutil
import pytest
from tests.testbed.processes import wait_for

from gpu_exporter.common.clock import ManualClock
from gpu_exporter.common.model.evidence import HostEvidence
from gpu_exporter.common.model.holders import Who
from gpu_exporter.common.procfs import Procfs
from gpu_exporter.diagnosis.host import evidence as module
from gpu_exporter.diagnosis.host.cgroups import PIDS_MAX, Cgroups, Members
from gpu_exporter.diagnosis.host.evidence import CPU_SHARE, INTERVAL_S, EvidenceReader, _size
from gpu_exporter.diagnosis.host.network import Mount, list_mounts
from gpu_exporter.diagnosis.host.processes import THREADS_MAX, HolderProcesses
from gpu_exporter.diagnosis.host.subject import HostSubject, RankedGpu

WHO: Who = ("job", "7")
PLACE = PurePosixPath("job_7")
SECRET = "hunter2-of-the-owner"
# Ignores nothing: burns a CPU in one thread, or sleeps.
BURN = "while True: pass"
SLEEP = "import time; time.sleep(600)"
THREADS = """
import threading, time
for _ in range({}):
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
print("ready", flush=True)
time.sleep(600)
"""


class Children:
    def __init__(self) -> None:
        self._all: list[subprocess.Popen[bytes]] = []

    def start(self, code: str, *, name: str = "") -> int:
        rename = f"import ctypes; ctypes.CDLL(None).prctl(15, {name.encode()!r}, 0, 0, 0)\n" if name else ""
        child = subprocess.Popen(
            [sys.executable, "-c", rename + textwrap.dedent(code), SECRET],
            env={**os.environ, "PASSWORD": SECRET},
            stdout=subprocess.PIPE if "ready" in code else subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
        )
        self._all.append(child)
        if "ready" in code:
            assert child.stdout is not None
            child.stdout.readline()
        return child.pid

    def close(self) -> None:
        for child in self._all:
            child.kill()
            child.communicate()


@pytest.fixture
def children() -> Iterator[Children]:
    started = Children()
    yield started
    started.close()


class Holder:
    """A job with real processes in a cgroup of version 2 made of files."""

    def __init__(self, root: Path, *, with_files: bool = False, host: bool = True) -> None:
        self.root, self.clock = root, ManualClock()
        (root / "cgroup.controllers").touch()
        (root / PLACE).mkdir()
        self.pids: list[int] = []
        self.ranks: tuple[int, ...] | None = ()
        self.cpus = frozenset(range(8))
        self.reader = EvidenceReader(
            Cgroups(root), self.clock, 64, Path("/proc") if host else None, with_files=with_files
        )
        self.write(cpu__stat="usage_usec 0\n")

    def write(self, **files: str) -> None:
        for name, text in files.items():
            (self.root / PLACE / name.replace("__", ".")).write_text(text)

    def look(self, seconds: float = INTERVAL_S) -> HostEvidence | None:
        self.clock.advance(seconds)
        self.write(cgroup__procs="".join(f"{pid}\n" for pid in self.pids))
        gpus = None if self.ranks is None else (RankedGpu("GPU-0", self.cpus, self.ranks),)
        return dict(self.reader.read([HostSubject(WHO, gpus)], {WHO: PLACE})).get(WHO)


@pytest.fixture
def holder(tmp_path: Path) -> Holder:
    return Holder(tmp_path)


def wait_for_cpu(pid: int, seconds: float) -> None:
    """Until the process has used so much more CPU."""
    process = psutil.Process(pid)
    until = sum(process.cpu_times()[:2]) + seconds
    wait_for(lambda: sum(process.cpu_times()[:2]) >= until, f"{seconds} s of CPU time of process {pid}")


def after_work(holder: Holder, worker: int | None = None, seconds: float = INTERVAL_S) -> HostEvidence:
    """Two looks that far apart by the holder's clock; `worker` uses 0.2 s of CPU between them."""
    assert holder.look() is None
    if worker is not None:
        wait_for_cpu(worker, 0.2)
    found = holder.look(seconds)
    assert found is not None
    return found


def test_the_work_of_ranks_and_loaders_is_told_apart(holder: Holder, children: Children) -> None:
    rank, loader, sleeper = children.start(SLEEP), children.start(BURN, name="pt_data_worker"), children.start(SLEEP)
    holder.pids, holder.ranks = [rank, loader, sleeper], (rank,)
    seen = after_work(holder, loader).processes
    assert seen is not None
    assert (seen.processes, seen.is_all, seen.ranks, seen.loaders, seen.named_loaders) == (3, True, 1, 1, 1)
    assert seen.rank_cores is not None
    assert seen.rank_cores < 0.01
    assert seen.loader_most == seen.loader_cores > 0.005
    assert seen.runnable == 1
    assert seen.loader_bytes is not None
    assert seen.loader_bytes > 1e6


def test_without_the_driver_s_list_no_process_is_called_a_loader(holder: Holder, children: Children) -> None:
    holder.pids, holder.ranks = [children.start(BURN)], None
    seen = after_work(holder).processes
    assert seen is not None
    assert (seen.processes, seen.ranks, seen.loaders) == (1, None, None)


def test_a_pid_that_is_used_again_is_another_process(children: Children, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its CPU time is not compared with that of the process before it."""
    pid = children.start(BURN)
    holder = HolderProcesses(Path("/proc"), Procfs(Path("/proc")))
    members = Members(frozenset((pid,)), is_all=True)
    holder.look(members, (), 0.0)
    wait_for_cpu(pid, 0.2)
    assert holder.look(members, (), 1.0).loader_most > 0.0
    real = psutil._pslinux.Process.create_time

    def later(self: object, monotonic: bool = False) -> float:
        return float(real(self, monotonic=monotonic)) + 5.0

    monkeypatch.setattr(psutil._pslinux.Process, "create_time", later)
    seen = holder.look(members, (), 1.0)
    assert (seen.processes, seen.loader_most) == (1, 0.0)


def test_a_terminal_and_a_notebook_server_are_seen(holder: Holder, children: Children) -> None:
    import pty

    pid, descriptor = pty.fork()
    if pid == 0:
        os.execvp("sleep", ["sleep", "600"])
    try:
        holder.pids = [pid]
        wait_for(lambda: psutil.Process(pid).name() == "sleep", "the program, which has a terminal when it starts")
        seen = after_work(holder).processes
        assert seen is not None
        assert (seen.terminal, seen.notebook) == (True, False)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(descriptor)
    holder.pids = [children.start(SLEEP, name="jupyter-lab")]
    wait_for(lambda: (holder.look() or HostEvidence(0, 0)).processes.notebook, "the name")  # type: ignore[union-attr]


def test_a_stopped_process_is_counted(holder: Holder, children: Children) -> None:
    pid = children.start(SLEEP)
    os.kill(pid, signal.SIGSTOP)
    holder.pids = [pid, children.start(SLEEP)]
    seen = after_work(holder).processes
    assert seen is not None
    assert seen.stopped == 0  # an editor, not a rank
    holder.ranks = (pid,)
    again = holder.look()
    assert again is not None
    assert again.processes is not None
    assert again.processes.stopped == 1


def test_processes_on_the_other_socket_are_far_and_those_on_any_cpu_are_not(holder: Holder, children: Children) -> None:
    pid = children.start(SLEEP)
    holder.pids, holder.ranks = [pid], (pid,)
    os.sched_setaffinity(pid, {0})
    holder.cpus = frozenset((1, 2, 3))
    seen = after_work(holder).processes
    assert seen is not None
    assert seen.far == (("GPU-0", "0"),)
    holder.cpus = frozenset((0, 1))
    assert (seen := holder.look().processes) is not None  # type: ignore[union-attr]
    assert seen.far == ()
    holder.cpus = frozenset()  # the driver does not say
    assert holder.look().processes.far == ()  # type: ignore[union-attr]


def test_the_cpus_on_which_loaders_may_run_are_counted_together(holder: Holder, children: Children) -> None:
    rank, *loaders = (children.start(SLEEP, name=name) for name in ("rank", "pt_data_worker", "pt_data_worker"))
    holder.pids, holder.ranks = [rank, *loaders], (rank,)
    wait_for(lambda: {psutil.Process(pid).name() for pid in loaders} == {"pt_data_worker"}, "their names")
    every = len(os.sched_getaffinity(rank))
    seen = after_work(holder).processes
    assert seen is not None
    assert (seen.loaders, seen.loader_cpus, seen.cpus) == (2, every, every)
    for pid in loaders:
        os.sched_setaffinity(pid, {min(os.sched_getaffinity(rank))})
    again = holder.look()
    assert again is not None
    assert again.processes is not None
    assert (again.processes.loader_cpus, again.processes.cpus) == (1, every), "the rank may run everywhere"
    holder.pids = [rank]
    assert holder.look().processes.loader_cpus is None  # type: ignore[union-attr]


def test_the_cpus_of_slurmstepd_are_not_those_of_its_job(holder: Holder, children: Children) -> None:
    """With cgroup/v2 it lies in the job's cgroup, but is not bound when it binds the tasks."""
    rank, launcher = children.start(SLEEP, name="rank"), children.start(SLEEP, name="slurmstepd")
    holder.pids, holder.ranks = [rank, launcher], (rank,)
    wait_for(lambda: psutil.Process(launcher).name() == "slurmstepd", "its name")
    os.sched_setaffinity(rank, {min(os.sched_getaffinity(rank))})
    seen = after_work(holder).processes
    assert seen is not None
    assert seen.cpus == 1


def test_a_fork_bomb_costs_a_bounded_look_that_is_marked_as_partial(holder: Holder, children: Children) -> None:
    real = children.start(SLEEP)
    holder.pids = [real, *range(4_000_000, 4_000_000 + 20_000)]  # above every pid: they have ended already
    # A look that costs more than its share makes the next one wait: on a busy machine, this one may.
    seen = after_work(holder, seconds=20 * INTERVAL_S).processes
    assert seen is not None
    assert (seen.processes, seen.is_all) == (1, False)
    members = Cgroups(holder.root).list_members(PLACE)
    assert members is not None
    assert len(members.pids) == PIDS_MAX
    assert Cgroups(holder.root).list_pids(PLACE) is None


def test_a_list_of_pids_that_is_cut_ends_with_a_whole_pid(holder: Holder) -> None:
    (holder.root / PLACE / "cgroup.procs").write_text("1\n" * 32_767 + "12345\n")  # 64 KiB end within 12345
    members = Cgroups(holder.root).list_members(PLACE)
    assert members == Members(frozenset((1,)), is_all=False)


def test_processes_of_another_pid_namespace_are_unknown(holder: Holder) -> None:
    holder.pids = [0]
    assert after_work(holder).processes is None


def test_more_threads_than_are_read_are_reported_as_such(holder: Holder, children: Children) -> None:
    pid = children.start(THREADS.format(THREADS_MAX + 40))
    holder.pids = [pid]
    seen = after_work(holder).processes
    assert seen is not None
    assert (seen.is_all_threads, seen.runnable) == (False, 0)


def test_nothing_secret_is_opened_or_kept(holder: Holder, children: Children, caplog: pytest.LogCaptureFixture) -> None:
    """The audit hook sees every file that Python opens; it cannot be removed, so it listens only here."""
    opened: list[str] = []
    is_on = threading.Event()

    def listen(event: str, arguments: tuple[object, ...]) -> None:
        if is_on.is_set() and event in ("open", "os.listdir", "os.scandir") and isinstance(arguments[0], str):
            opened.append(arguments[0])

    sys.addaudithook(listen)
    holder.pids = [children.start(BURN), children.start(SLEEP)]
    holder.ranks = (holder.pids[1],)
    is_on.set()
    with caplog.at_level(logging.DEBUG):
        found = [holder.look(), holder.look(), holder.look()]
    is_on.clear()
    of_processes = {
        name.split("/", 3)[3].split("/")[0] for name in opened if name.startswith("/proc/") and name.count("/") > 2
    }
    assert of_processes <= {"stat", "statm", "status", "task", "net", "mountinfo"}, (
        of_processes
    )  # no cmdline, environ, maps, fd
    assert "task" in of_processes
    text = f"{found!r} {json.dumps(found, default=str)} {caplog.text}"
    assert SECRET not in text
    assert not any(str(pid) in text for pid in holder.pids)
    assert "/proc" not in text


def test_a_look_waits_so_long_that_looks_cost_little(holder: Holder, monkeypatch: pytest.MonkeyPatch) -> None:
    spent = iter((0.0, 0.2, 0.2, 0.2))
    monkeypatch.setattr(module.time, "thread_time", lambda: next(spent))
    assert holder.look() is None  # this look cost 0.2 s
    before = holder.reader._due
    assert before == pytest.approx(holder.clock.monotonic() + 0.2 / CPU_SHARE)
    assert holder.look() is None  # not due
    assert holder.look(100.0) is not None


def test_throttling_pressure_memory_and_traffic_are_rates_between_two_looks(holder: Holder) -> None:
    holder.write(
        cpu__stat="usage_usec 0\nnr_periods 100\nnr_throttled 10\n",
        cpu__max="400000 100000\n",
        cpu__pressure="some avg10=0.00 avg60=0.00 avg300=0.00 total=1000000\n",
        memory__pressure="some avg10=0 avg60=0 avg300=0 total=0\nfull avg10=0 avg60=0 avg300=0 total=0\n",
        memory__current="900\n",
        memory__max="1000\n",
        memory__stat="shmem 70\nworkingset_refault_file 10\nactive_file 5\ninactive_file 6\n",
        memory__events="oom 0\noom_kill 2\n",
        io__stat="8:0 rbytes=100 wbytes=50\n",
    )
    assert holder.look() is None
    holder.write(
        cpu__stat="usage_usec 60000000\nnr_periods 250\nnr_throttled 85\n",
        cpu__pressure="some avg10=0.00 avg60=0.00 avg300=0.00 total=7000000\n",
        memory__pressure="some avg10=0 avg60=0 avg300=0 total=3000000\nfull avg10=0 avg60=0 avg300=0 total=1500000\n",
        memory__stat="shmem 70\nworkingset_refault_file 310\nactive_file 5\ninactive_file 6\n",
        memory__events="oom 0\noom_kill 3\n",
        io__stat="8:0 rbytes=1600 wbytes=350\n",
    )
    found = holder.look()
    assert found is not None
    assert (found.cores, found.throttled, found.quota, found.cpus) == (4.0, 0.5, 4.0, 4.0)
    assert found.pressure_cpu == pytest.approx(0.4)
    assert (found.pressure_memory, found.memory_full) == (pytest.approx(0.2), pytest.approx(0.1))
    assert (found.memory_bytes, found.memory_limit, found.shm_bytes) == (900.0, 1000.0, 70.0)
    assert (found.refaults, found.killed, found.memory_cache) == (20.0, 1.0, 11.0)
    assert found.ooms == 0.0, "by the OOM killer of the node"
    assert (found.read, found.written) == (100.0, 20.0)


def test_the_limits_of_a_pod_are_those_of_the_container_that_works(holder: Holder) -> None:
    """A sidecar that fights with its own small quota says nothing about the training."""
    holder.write(memory__max="max\n", cpu__max="max 100000\n", memory__current="1000\n")
    found = None
    for seconds in (0, 15):
        for name, cores, quota, throttled, memory in (("main", 0.5, 50_000, 60, 970), ("sidecar", 0.1, 10_000, 99, 30)):
            inner = holder.root / PLACE / name
            inner.mkdir(exist_ok=True)
            (inner / "cpu.max").write_text(f"{quota} 100000\n")
            (inner / "cpu.stat").write_text(
                f"usage_usec {seconds * cores * 1e6:.0f}\nnr_periods {seconds * 100 / 15:.0f}\n"
                f"nr_throttled {throttled * seconds / 15:.0f}\n"
            )
            (inner / "memory.max").write_text("1000\n" if name == "main" else "31\n")
            (inner / "memory.current").write_text(f"{memory}\n")
            (inner / "cgroup.procs").write_text("")
        holder.write(cpu__stat=f"usage_usec {seconds * 0.6 * 1e6:.0f}\n")
        found = holder.look()
    assert found is not None
    assert (found.quota, found.throttled, found.memory_bytes, found.memory_limit) == (0.5, 0.6, 970.0, 1000.0)


@pytest.mark.parametrize(
    ("groups", "limit"),
    [
        # CPUs used, quota, share of its periods throttled, by place; the holder is job_7.
        ({"job_7": (6.0, None, 0.0), "job_7/main": (3.6, 8, 0.0), "job_7/data": (2.4, 2.5, 0.99)}, (10.5, 0.99)),
        ({"job_7": (8.0, None, 0.0), "job_7/a": (4.0, 4, 0.9), "job_7/b": (4.0, 4, 0.9)}, (8.0, 0.9)),
        ({"job_7": (4.0, 6, 0.0), "job_7/a": (2.0, 4, 0.0), "job_7/b": (2.0, 4, 0.0)}, (6.0, 0.0)),
        ({"job_7": (8.0, None, 0.0), "job_7/a": (4.0, 4, 0.9), "job_7/b": (4.0, None, 0.0)}, (None, 0.9)),
        (
            {"job_7": (0.45, None, 0.0), "job_7/main": (0.3, 4, 0.0), "job_7/proxy": (0.15, 0.2, 0.9)},
            (4.0, 0.0),
        ),  # a sidecar
        ({"job_7": (8.0, 8, 0.4), "job_7/step_0": (8.0, 9, 0.0), "job_7/step_0/task_0": (8.0, None, 0.0)}, (8.0, 0.4)),
        ({"user.slice": (3.0, 4, 0.7), "user.slice/job_7": (2.0, 16, 0.0)}, (4.0, 0.7)),
    ],
)
def test_the_limit_of_a_holder_is_that_of_all_its_working_parts_and_of_the_slices_above(
    tmp_path: Path, groups: Mapping[str, tuple[float, float | None, float]], limit: tuple[float | None, float]
) -> None:
    (tmp_path / "cgroup.controllers").touch()
    place = PurePosixPath("user.slice/job_7" if "user.slice" in groups else "job_7")
    clock, found = ManualClock(), None
    reader = EvidenceReader(Cgroups(tmp_path), clock, 64, None)
    for seconds in (0, 15):
        for name, (cores, quota, throttled) in groups.items():
            folder = tmp_path / name
            folder.mkdir(exist_ok=True, parents=True)
            (folder / "cpu.max").write_text(f"{'max' if quota is None else int(quota * 1e5)} 100000\n")
            (folder / "cpu.stat").write_text(
                f"usage_usec {seconds * cores * 1e6:.0f}\nnr_periods {seconds * 10}\n"
                f"nr_throttled {throttled * seconds * 10:.0f}\n"
            )
            (folder / "cgroup.procs").write_text("")
        found = dict(reader.read([HostSubject(WHO, None)], {WHO: place})).get(WHO)
        clock.advance(15.0)
    assert found is not None
    assert (found.quota, found.throttled) == (limit[0], pytest.approx(limit[1], abs=0.02))


def test_the_quota_of_a_sidecar_is_none_of_a_training_at_rest(holder: Holder) -> None:
    found = None
    for seconds in (0, 15):
        inner = holder.root / PLACE / "sidecar"
        inner.mkdir(exist_ok=True)
        (inner / "cpu.max").write_text("10000 100000\n")
        usage = f"usage_usec {seconds * 0.095 * 1e6:.0f}\n"
        (inner / "cpu.stat").write_text(f"{usage}nr_periods {10 * seconds}\nnr_throttled {7 * seconds}\n")
        holder.write(cpu__stat=usage)
        found = holder.look()
    assert found is not None
    assert (found.quota, found.throttled, found.cpus) == (None, 0.0, None)


def test_the_cpus_of_a_container_are_those_of_its_own_cpuset(holder: Holder) -> None:
    """The static CPU manager of the kubelet sets them for the container, not for the pod."""
    found = None
    holder.write(cpuset__cpus__effective="0-63\n")
    for seconds in (0, 15):
        inner = holder.root / PLACE / "main"
        inner.mkdir(exist_ok=True)
        (inner / "cpuset.cpus.effective").write_text("8-11\n")
        (inner / "cpu.stat").write_text(f"usage_usec {seconds * 3 * 1e6:.0f}\n")
        holder.write(cpu__stat=f"usage_usec {seconds * 3 * 1e6:.0f}\n")
        found = holder.look()
    assert found is not None
    assert found.cpus == 4.0


def test_a_file_of_proc_that_comes_in_parts_is_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel gives about a page of mountinfo for each read."""
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "mountinfo").write_text(
        "".join(f"{n} 1 0:1 / /m{n} rw - tmpfs t rw,size=4k\n" for n in range(500))
    )
    real = os.read
    monkeypatch.setattr(os, "read", lambda descriptor, most: real(descriptor, min(most, 4096)))
    mounts = list_mounts(Procfs(tmp_path), 7)
    assert mounts is not None
    assert (len(mounts), mounts[-1].point) == (500, "/m499")
    assert Procfs(tmp_path).text(7, "mountinfo") is None  # above the limit of other files


def test_what_a_user_calls_a_fuse_file_system_is_not_shown() -> None:
    assert Mount("1", "/x", "fuse./home/ada/secret", "rw").name == "fuse"
    assert Mount("1", "/x", "nfs4", "rw").name == "nfs4"


def test_a_counter_that_falls_is_unknown_for_one_look(holder: Holder) -> None:
    for number in (1000, 5):
        holder.write(
            memory__stat=f"workingset_refault_file {number}\n", io__stat=f"8:0 rbytes={number} wbytes={number}\n"
        )
        found = holder.look()
    assert found is not None
    assert (found.refaults, found.read, found.written) == (None, None, None)


def test_a_cgroup_that_begins_again_gives_no_look(holder: Holder) -> None:
    holder.write(cpu__stat="usage_usec 9000\n")
    assert holder.look() is None
    holder.write(cpu__stat="usage_usec 10\n")
    assert holder.look() is None
    assert holder.look() is not None


def test_version_1_has_the_same_values_without_pressure(tmp_path: Path) -> None:
    for name in ("cpu", "cpuacct", "memory", "blkio"):
        (tmp_path / name / PLACE).mkdir(parents=True)

    def write(seconds: int, throttled: int) -> None:
        (tmp_path / "cpuacct" / PLACE / "cpuacct.usage").write_text(f"{seconds}000000000\n")
        (tmp_path / "cpuacct" / PLACE / "cgroup.procs").write_text("")
        (tmp_path / "cpu" / PLACE / "cpu.cfs_quota_us").write_text("200000\n")
        (tmp_path / "cpu" / PLACE / "cpu.cfs_period_us").write_text("100000\n")
        (tmp_path / "cpu" / PLACE / "cpu.stat").write_text(
            f"nr_periods {10 * seconds}\nnr_throttled {throttled}\nthrottled_time 9\n"
        )
        (tmp_path / "memory" / PLACE / "memory.usage_in_bytes").write_text("50\n")
        (tmp_path / "memory" / PLACE / "memory.limit_in_bytes").write_text("100\n")
        (tmp_path / "memory" / PLACE / "memory.stat").write_text(
            f"shmem 1\ntotal_shmem 7\ntotal_workingset_refault_file {seconds}\n"
        )
        (tmp_path / "memory" / PLACE / "memory.failcnt").write_text(f"{7 * seconds}\n")
        (tmp_path / "memory" / PLACE / "memory.oom_control").write_text(
            f"oom_kill_disable 0\nunder_oom 0\noom_kill {1 + seconds // 15}\n"
        )
        (tmp_path / "blkio" / PLACE / "blkio.throttle.io_service_bytes").write_text("Total 1\n")
        (tmp_path / "blkio" / PLACE / "blkio.throttle.io_service_bytes_recursive").write_text(
            f"8:0 Read {seconds}00\n8:0 Write {seconds}0\nTotal {seconds}10\n"
        )

    clock = ManualClock()
    reader = EvidenceReader(Cgroups(tmp_path), clock, 8, None)
    found = None
    for seconds, throttled in ((0, 0), (30, 75)):
        write(seconds, throttled)
        found = dict(reader.read([HostSubject(WHO, None)], {WHO: PLACE})).get(WHO)
        clock.advance(15.0)
    assert found is not None
    assert (found.cores, found.quota, found.throttled) == (pytest.approx(2.0), 2.0, 0.25)
    assert (found.memory_bytes, found.memory_limit, found.shm_bytes, found.refaults, found.killed) == (50, 100, 7, 2, 2)
    assert found.ooms == 2, "its limit was reached meanwhile"
    assert found.written == 20.0
    assert (found.pressure_cpu, found.pressure_memory, found.processes) == (None, None, None)


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ("rw,size=65536k,inode64", 65536 * 1024.0),
        ("rw,size=1g", 2.0**30),
        ("rw,size=4096", 4096.0),
        ("rw", None),
        ("rw,size=50%", None),
        ("rw,size=", None),
        ("rw,size=9k9", None),
    ],
)
def test_the_size_of_the_shared_memory(options: str, size: float | None) -> None:
    assert _size(options) == size


def test_the_files_of_processes_are_read_only_with_the_right_to_trace(tmp_path: Path, children: Children) -> None:
    data = tmp_path / "data"
    data.write_bytes(bytes(4096))
    code = f"""
    print("ready", flush=True)
    log = open({str(tmp_path / "log")!r}, "w")
    file = open({str(data)!r}, "rb", buffering=0)
    while True:
        file.seek(0)
        file.read(4096)
        file.read(4096)
    """
    root = tmp_path / "cgroup"
    root.mkdir()
    holder = Holder(root, with_files=True)
    holder.pids = [children.start(code)]
    holder.ranks = tuple(holder.pids)
    found = after_work(holder, holder.pids[0])
    assert found.files is not None
    assert found.files.reads > 1.0
    assert 0.0 < found.files.read_bytes / found.files.reads < 4096.0
    assert (found.files.remote_files, found.files.local_files) == (0, 1)  # without the log
    without = tmp_path / "without"
    without.mkdir()
    quiet = Holder(without)
    quiet.pids, quiet.ranks = holder.pids, holder.ranks
    assert after_work(quiet).files is None


TABLE = "h\nh\n    lo: 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0\n  eth0: {0} 1 0 0 0 0 0 0 {0} 1 0 0 0 0 0 0\n"
ROOT_MOUNT = "1 0 0:1 / / rw - overlay overlay rw\n"
NFS_MOUNT = "2 1 0:9 / /data rw - nfs4 server:/data rw\n"


class PodProcfs:
    """A /proc with the host's first process, and a pod whose pause process has the lowest pid."""

    def __init__(self, path: Path) -> None:
        self.proc, self.cgroups = path / "proc", path / "cgroup"
        (self.cgroups / PLACE).mkdir(parents=True)
        (self.cgroups / "cgroup.controllers").touch()
        (self.cgroups / PLACE / "cpu.stat").write_text("usage_usec 0\n")
        (self.cgroups / PLACE / "cgroup.procs").write_text("11\n12\n")
        self.add(1, ROOT_MOUNT, 10**9)
        (self.proc / "stat").write_text("cpu  1 1 1 1 1 1 1 1 1 1\nbtime 100\n")
        self.add(11, ROOT_MOUNT)
        self.add(12, ROOT_MOUNT + NFS_MOUNT)

    def add(self, pid: int, mounts: str, moved: int = 5000) -> None:
        folder = self.proc / str(pid)
        for inner in ("net", f"task/{pid}"):
            (folder / inner).mkdir(parents=True)
        stat = f"{pid} (x) S 1 1 1 0 -1 0 0 0 0 0 {pid} 0 0 0 20 0 1 0 100 {'0 ' * 30}\n"
        for name in ("stat", f"task/{pid}/stat"):
            (folder / name).write_text(stat)
        (folder / "statm").write_text("1 1 1 1 1 1 1\n")
        (folder / "status").write_text("Name:\tx\n")  # without the numbers of context switches
        (folder / "mountinfo").write_text(mounts)
        (folder / "net/dev").write_text(TABLE.format(moved))

    def look(self, *gpus: RankedGpu, is_known: bool = True) -> HostEvidence:
        clock = ManualClock()
        reader = EvidenceReader(Cgroups(self.cgroups), clock, 64, self.proc)
        for _ in range(2):
            clock.advance(INTERVAL_S)
            found = dict(reader.read([HostSubject(WHO, gpus if is_known else None)], {WHO: PLACE}))
        return found[WHO]


def test_the_mounts_of_a_pod_are_not_those_of_its_pause_process(tmp_path: Path) -> None:
    """Its network file system is seen, and its network bytes are unknown, also where no process is listed on the GPU."""
    pod = PodProcfs(tmp_path)
    rank, nothing = (RankedGpu("GPU-1", frozenset(), pids) for pids in ((12,), ()))
    for found in (pod.look(rank), pod.look(nothing), pod.look(is_known=False)):
        assert (found.network_files, found.received) == (("nfs4",), None)
    (pod.proc / "12" / "mountinfo").write_text(ROOT_MOUNT)
    assert (pod.look(nothing).network_files, pod.look(nothing).received) == ((), 0.0)
    (pod.proc / "12" / "mountinfo").unlink()
    assert (pod.look(nothing).network_files, pod.look(nothing).received) == (None, None)


def test_mounts_are_unknown_where_only_some_of_many_processes_are_asked(tmp_path: Path) -> None:
    """Another container of the pod may have mounted a network file system."""
    pod = PodProcfs(tmp_path)
    (pod.proc / "12" / "mountinfo").write_text(ROOT_MOUNT)
    for pid in range(13, 23):
        pod.add(pid, ROOT_MOUNT)
    (pod.cgroups / PLACE / "cgroup.procs").write_text("".join(f"{pid}\n" for pid in range(11, 23)))
    nothing, rank = (RankedGpu("GPU-1", frozenset(), pids) for pids in ((), (12,)))
    assert (pod.look(nothing).network_files, pod.look(nothing).received) == (None, None)
    assert (pod.look(rank).network_files, pod.look(rank).received) == ((), 0.0)


def test_a_status_file_of_another_kernel_costs_only_its_own_numbers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = PodProcfs(tmp_path).look(RankedGpu("GPU-1", frozenset(), (12,)))
    assert found.processes is not None
    assert caplog.text == ""
