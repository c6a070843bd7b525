"""Looking up owners in a /proc: an ended or hidden process, or another process with the pid, has no owner."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_exporter.agent.attribution.processes import UNIT_MAX, OwnedPeriod, ProcessOwners, without_owners
from gpu_exporter.common.cgroup import ProcessOwner
from gpu_exporter.common.clock import ManualClock, SystemClock
from gpu_exporter.common.model.readings import (
    DeviceSnapshot,
    GpuProcess,
    InstanceReading,
    ProcessList,
    ProcessPeriod,
    ProcessShare,
)
from gpu_exporter.common.model.units import DeviceIdentity, UnitId
from gpu_exporter.common.procfs import READ_MAX, TICKS_PER_S, parse_stat

UNIT = UnitId("GPU-a")
JOB = ProcessOwner(slurm=True, job="42", step="0")
KTHREADD = "2 (kthreadd) S 0 0 0 0 -1 2129984 " + "0 " * 40
BOOT_S = 1000.0  # time of the fake clock since boot while ManualClock shows `now`


def snapshot(
    *processes: GpuProcess, at: float, mig: str = "disabled", instances: tuple[str, ...] = ()
) -> DeviceSnapshot:
    return DeviceSnapshot(
        DeviceIdentity(0, "GPU-a", "NVIDIA H100", "580", "0000:10:00.0", 0, mig),
        at,
        at,
        up=True,
        instances=tuple(InstanceReading(f"MIG-{ids}", ids, "1g.10gb", 1, (), None) for ids in instances),
        processes=ProcessList(at, processes),
    )


class Proc:
    """A /proc made of files."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def add(self, pid: int, cgroup: str, start_s: float = 1.0, name: str = "python", flags: int = 0) -> None:
        folder = self.root / str(pid)
        folder.mkdir(exist_ok=True)
        fields = ["S", "1", "1", "1", "0", "-1", str(flags), *["0"] * 12, str(round(start_s * TICKS_PER_S)), "0", "0"]
        (folder / "stat").write_text(f"{pid} ({name}) {' '.join(fields)}\n", encoding="utf-8")
        (folder / "cgroup").write_text(cgroup, encoding="utf-8")


@pytest.fixture
def proc(tmp_path: Path) -> Proc:
    return Proc(tmp_path)


class SlurmSnapshot(ProcessOwners):
    """`names`: only the owners, for units with at least one owner."""

    def names(self, snapshots: list[DeviceSnapshot]) -> dict[UnitId, tuple[ProcessOwner, ...]]:
        return {unit: tuple(found.uses) for unit, found in self.read(snapshots).items() if found.uses}


def owners(proc: Proc, clock: ManualClock) -> SlurmSnapshot:
    return SlurmSnapshot(proc.root, clock, lambda: BOOT_S)


def test_each_owner_of_a_gpus_processes_is_listed_once(proc: Proc) -> None:
    clock = ManualClock()
    for pid in (101, 102):
        proc.add(pid, "0::/system.slice/slurmstepd.scope/job_42/step_0/user/task_0")
    proc.add(103, "0::/user.slice")
    seen = snapshot(*map(GpuProcess, (101, 102, 103)), at=clock.monotonic())
    assert owners(proc, clock).names([seen]) == {UNIT: (JOB, ProcessOwner())}


def test_processes_of_a_mig_instance_count_only_for_it(proc: Proc) -> None:
    clock = ManualClock()
    proc.add(101, "0::/slurm/job_42/step_0")
    proc.add(102, "0::/slurm/job_43/step_0")
    listed = (GpuProcess(101, "7/0"), GpuProcess(102, "8/0"), GpuProcess(102, "9/0"), GpuProcess(102))
    seen = snapshot(*listed, at=clock.monotonic(), mig="enabled", instances=("7/0", "8/0"))
    assert owners(proc, clock).names([seen]) == {
        UnitId("GPU-a", "MIG-7/0"): (JOB,),
        UnitId("GPU-a", "MIG-8/0"): (JOB._replace(job="43"),),
    }


def test_an_ended_or_hidden_process_has_no_owner(proc: Proc) -> None:
    """hidepid=2 hides the folder, hidepid=1 hides its content."""
    clock = ManualClock()
    (proc.root / "102").mkdir()
    proc.add(103, "0::/slurm/job_42/step_0")
    (proc.root / "103" / "cgroup").unlink()
    proc.add(104, "0::/slurm/job_42/step_0")
    (proc.root / "104" / "stat").write_text("nonsense")
    assert owners(proc, clock).names([snapshot(*map(GpuProcess, (101, 102, 103, 104)), at=clock.monotonic())]) == {}


def test_owners_are_unknown_without_a_list_or_an_answer(proc: Proc) -> None:
    clock = ManualClock()
    proc.add(101, "0::/slurm/job_42/step_0")
    seen = snapshot(GpuProcess(101), at=clock.monotonic())
    look = owners(proc, clock)
    assert look.names([seen]) == {UNIT: (JOB,)}
    assert look.names([seen._replace(processes=None)]) == {}
    assert look.names([seen._replace(up=False)]) == {}


def test_a_gpu_without_a_list_of_processes_does_not_affect_other_gpus(proc: Proc) -> None:
    clock = ManualClock()
    proc.add(101, "0::/slurm/job_42/step_0")
    seen = snapshot(GpuProcess(101), at=clock.monotonic())
    assert owners(proc, clock).names([seen._replace(up=False), seen]) == {UNIT: (JOB,)}


def test_a_path_that_is_not_utf_8_still_shows_its_owner(proc: Proc) -> None:
    clock = ManualClock()
    proc.add(101, "")
    (proc.root / "101" / "cgroup").write_bytes(b"0::/slurm/job_42/step_0/\xff")
    assert owners(proc, clock).names([snapshot(GpuProcess(101), at=clock.monotonic())]) == {UNIT: (JOB,)}


@pytest.mark.parametrize(("start_s", "owner"), [(BOOT_S - 5.0, (JOB,)), (BOOT_S - 4.9, None)])
def test_a_process_that_started_after_the_list_has_the_pid_of_another(
    proc: Proc, start_s: float, owner: tuple[ProcessOwner, ...] | None
) -> None:
    clock = ManualClock()
    seen = snapshot(GpuProcess(101), at=clock.monotonic())
    clock.advance(5.0)
    proc.add(101, "0::/slurm/job_42/step_0", start_s=start_s)
    assert owners(proc, clock).names([seen]).get(UNIT) == owner


def test_a_pid_that_is_reused_while_it_is_read_has_no_owner(proc: Proc, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    proc.add(101, "0::/slurm/job_42/step_0", start_s=1.0)
    look = owners(proc, clock)
    read = look._procfs.text

    def reading(pid: int, name: str) -> str | None:
        text = read(pid, name)
        if name == "cgroup":
            proc.add(101, "0::/slurm/job_43/step_0", start_s=2.0)
        return text

    monkeypatch.setattr(look._procfs, "text", reading)
    assert look.names([snapshot(GpuProcess(101), at=clock.monotonic())]) == {}


def test_the_mps_server_has_no_single_owner(proc: Proc) -> None:
    clock = ManualClock()
    pod = f"0::/kubepods/pod12345678-0000-4000-8000-000000000000/{'f' * 64}"
    proc.add(101, pod, name="nvidia-cuda-mps")
    proc.add(102, pod, name="python")
    look = owners(proc, clock)
    assert look.names([snapshot(GpuProcess(101), at=clock.monotonic())]) == {}
    assert UNIT in look.names([snapshot(GpuProcess(102), at=clock.monotonic())])


def test_a_truncated_file_shows_no_owner(proc: Proc) -> None:
    clock = ManualClock()
    line = "0::/slurm/job_42/step_0"
    proc.add(101, "0::/\n" * ((READ_MAX - len(line)) // 5 + 1) + line)
    assert owners(proc, clock).names([snapshot(GpuProcess(101), at=clock.monotonic())]) == {}


def test_the_number_of_processes_read_for_a_gpu_is_limited(proc: Proc) -> None:
    clock = ManualClock()
    proc.add(UNIT_MAX + 1, "0::/slurm/job_42/step_0")
    listed = tuple(map(GpuProcess, range(1, UNIT_MAX + 2)))
    assert owners(proc, clock).names([snapshot(*listed, at=clock.monotonic())]) == {}
    assert owners(proc, clock).names([snapshot(*listed[1:], at=clock.monotonic())]) == {UNIT: (JOB,)}


def test_procfs_is_the_hosts_if_the_kernel_started_pid_2(proc: Proc) -> None:
    look = owners(proc, ManualClock())
    assert not look.is_host()
    proc.add(2, "0::/", name="kthreadd")
    assert not look.is_host()  # any process may have this name
    proc.add(2, "0::/", name="bash", flags=0x00200040)
    assert not look.is_host()
    (proc.root / "2" / "stat").write_text(KTHREADD)
    assert look.is_host()


def test_a_running_child_is_found_in_the_real_proc_and_an_ended_child_is_not() -> None:
    """The child's start is not later than now, by the kernel's own clock."""
    clock = SystemClock()
    look = SlurmSnapshot(Path("/proc"), clock)
    child = subprocess.Popen(["sleep", "60"])
    try:
        seen = snapshot(GpuProcess(child.pid), at=clock.monotonic())
        assert UNIT in look.names([seen])
        before = snapshot(GpuProcess(child.pid), at=clock.monotonic() - 60.0)
        assert look.names([before]) == {}  # a minute ago this pid belonged to another process
    finally:
        child.kill()
        child.wait()
    assert look.names([seen]) == {}


@pytest.mark.parametrize(("name", "parsed"), [("sh", "sh"), ("a b", "a b"), (") S 1 (", ") S 1 ("), ("((", "((")])
def test_a_process_name_may_contain_any_character(name: str, parsed: str) -> None:
    stat = parse_stat(
        f"7 ({name}) R 1 1 1 0 -1 64 "
        + "0 " * 4
        + f"{2 * TICKS_PER_S} {TICKS_PER_S} "
        + "0 " * 6
        + f"{5 * TICKS_PER_S} 0 0"
    )
    assert stat == (parsed, "R", 64, 5.0, 3.0, False)


@pytest.mark.parametrize(
    ("rest", "is_stat"),
    [
        ("R 1 1 1 0 -1 64 " + "0 " * 12 + "500", True),
        ("R 1 1 1 0 -1 64 " + "0 " * 12, False),
        ("R 1 1 1 0 -1 64 " + "0 " * 12 + "x 0 0", False),
        ("R 1 1 1 0 -1 x 0 " + "0 " * 11 + "500 0 0", False),
    ],
    ids=["ends-with-the-start", "ends-before-it", "start-is-no-number", "flags-are-no-number"],
)
def test_flags_and_start_must_be_numbers(rest: str, is_stat: bool) -> None:
    assert (parse_stat(f"7 (sh) {rest}") is not None) == is_stat


@given(st.text())
def test_any_text_gives_a_stat_or_nothing(text: str) -> None:
    stat = parse_stat(text)
    assert stat is None or stat.start_s >= 0


def test_the_real_stat_of_this_process_is_understood() -> None:
    stat = parse_stat(Path("/proc/self/stat").read_text())
    assert stat is not None
    assert stat.start_s > 0


def test_the_owners_of_working_processes_are_found(proc: Proc) -> None:
    """A process that started after the work was seen is another process with the same pid."""
    clock = ManualClock()
    now = clock.monotonic()
    proc.add(101, "0::/slurm/job_42/step_0", start_s=BOOT_S - 8.0)
    proc.add(102, "0::/slurm/job_43/step_0", start_s=BOOT_S - 4.0)
    proc.add(103, "0::/slurm/job_43/step_0", name="nvidia-cuda-mps-server"[:15])
    shares = (ProcessShare(101, 0.25, now - 5.0), ProcessShare(102, 0.5, now - 5.0), ProcessShare(103, 0.1, now))
    period = ProcessPeriod(now - 6.0, now - 1.0, (*shares, ProcessShare(104, 0.01, now)))
    found = owners(proc, clock).own(period)
    assert found == OwnedPeriod(period.start, period.end, ((JOB, 0.25), (None, 0.5), (None, 0.1), (None, 0.01)), "")
    assert without_owners(period).shares == ((None, 0.25), (None, 0.5), (None, 0.1), (None, 0.01))


def test_the_work_of_processes_beyond_the_limit_belongs_to_no_owner(proc: Proc) -> None:
    clock = ManualClock()
    proc.add(101, "0::/slurm/job_42/step_0")
    shares = [ProcessShare(101, 0.001, clock.monotonic())] * (UNIT_MAX + 100)
    found = owners(proc, clock).own(ProcessPeriod(0.0, 5.0, tuple(shares), ""))
    assert len(found.shares) == UNIT_MAX + 1
    assert found.shares[-1] == (None, pytest.approx(0.1))
