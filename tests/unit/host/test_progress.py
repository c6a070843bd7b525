"""What a holder does beside its GPUs, from one look to the next, on a /proc and cgroups made of files."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_exporter.common.clock import ManualClock
from gpu_exporter.common.model.holders import Who
from gpu_exporter.common.model.readings import HostProgress
from gpu_exporter.common.procfs import TICKS_PER_S, Procfs
from gpu_exporter.diagnosis.host.cgroups import PIDS_MAX, Cgroups
from gpu_exporter.diagnosis.host.network import _parse_interfaces
from gpu_exporter.diagnosis.host.progress import ProgressReader, Suspect

POD: Who = ("pod", "1")
PLACE = PurePosixPath("pod1")
HEAD = "Inter-|   Receive                                                |  Transmit\n face |bytes    packets errs\n"


class Machine:
    """A pod with two processes on GPUs, 10 and 11, and a loader, 20. Processes 10 and 11 spin."""

    def __init__(self, root: Path) -> None:
        self.root, self.clock = root, ManualClock()
        (root / "cgroup").mkdir()
        (root / "cgroup" / "cgroup.controllers").touch()
        self.cpu = {10: 0.0, 11: 0.0, 20: 0.0}
        self.starts = dict.fromkeys(self.cpu, 5.0)
        self.ended_s = 0.0
        self.disk = 0
        self.mount: str | None = "30 22 8:1 /x /data rw shared:1 - ext4 /dev/sda1 rw"
        self.network: dict[int, dict[str, tuple[int, int]]] = {
            1: {"lo": (5, 5), "eth0": (9000, 9000)},
            10: {"lo": (0, 0), "eth0": (70, 7)},
        }
        self.spinning: tuple[int, ...] | None = (10, 11)
        self.others: tuple[int, ...] | None = None
        self.states: dict[int, str] = {}
        self.procfs: Procfs | None = Procfs(root / "proc")
        self.reader = ProgressReader(Cgroups(root / "cgroup"), self.clock, self.procfs)

    def look(self, seconds: float = 0.0) -> HostProgress | None:
        """Write everything, and look `seconds` later."""
        self.clock.advance(seconds)
        folder = self.root / "cgroup" / PLACE / "container"
        folder.mkdir(parents=True, exist_ok=True)
        (folder.parent / "cgroup.procs").write_text("")
        (folder / "cgroup.procs").write_text("".join(f"{pid}\n" for pid in self.cpu))
        usage = sum(self.cpu.values()) + self.ended_s
        (folder.parent / "cpu.stat").write_text(f"usage_usec {usage * 1e6:.0f}\n")
        (folder.parent / "io.stat").write_text(f"8:0 rbytes={self.disk} wbytes=0\n")
        for pid, cpu_s in self.cpu.items():
            self._write(
                pid,
                "stat",
                f"{pid} (x) {self.states.get(pid, 'R')} 1 1 1 0 -1 64 0 0 0 0 {cpu_s * TICKS_PER_S:.0f} 0 0 0 0 0 0 0 {self.starts[pid] * TICKS_PER_S:.0f} 0 0",
            )
        if self.mount is not None:
            self._write(10, "mountinfo", f"22 1 0:20 / / rw - overlay overlay rw\n{self.mount}\n")
        for pid, interfaces in self.network.items():
            rows = (f"  {name}: {rx} 1 0 0 0 0 0 0 {tx} 1 0 0 0 0 0 0\n" for name, (rx, tx) in interfaces.items())
            self._write(pid, "net/dev", HEAD + "".join(rows))
        found = dict(self.reader.read([Suspect(POD, self.spinning, 2, self.others)], {POD: PLACE}))
        return found.get(POD)

    def _write(self, pid: int, name: str, text: str) -> None:
        path = self.root / "proc" / str(pid) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def spin(self, seconds: float, loader: float = 0.0) -> HostProgress | None:
        self.cpu[10] += seconds
        self.cpu[11] += seconds
        self.cpu[20] += seconds * loader
        return self.look(seconds)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_spinning_processes_are_no_progress(machine: Machine) -> None:
    assert machine.look() is None, "there is nothing to compare with"
    seen = machine.spin(30.0)
    nothing = pytest.approx(0.0, abs=1e-6)
    assert seen == HostProgress(1000.0, 1030.0, nothing, False, 0.0, 0.0, cores=pytest.approx(2.0), spinning=2)


def test_loaders_are_progress_even_if_they_have_ended(machine: Machine) -> None:
    machine.look()
    seen = machine.spin(30.0, loader=0.5)
    assert seen is not None and seen.loaders_cores == pytest.approx(0.5, abs=0.01)
    machine.ended_s = machine.cpu.pop(20) + 30.0
    machine.cpu[10] += 30.0
    machine.cpu[11] += 30.0
    seen = machine.look(30.0)
    assert seen is not None and seen.loaders_cores == pytest.approx(1.0, abs=0.01)


def test_a_rank_whose_gpu_is_at_rest_counts_as_a_loader(machine: Machine) -> None:
    machine.spinning = (10,)
    machine.look()
    seen = machine.spin(30.0)
    assert seen is not None and seen.loaders_cores == pytest.approx(1.0, abs=0.01)


def test_a_process_that_began_to_spin_since_the_last_look_makes_the_loaders_unknown(machine: Machine) -> None:
    machine.spinning = (10,)
    machine.look()
    machine.spinning = (10, 11)
    seen = machine.spin(30.0)
    assert seen is not None and (seen.loaders_cores, seen.new_process) == (None, False)
    seen = machine.spin(30.0)
    assert seen is not None and seen.loaders_cores == pytest.approx(0.0, abs=0.01)


def test_a_pid_that_is_used_again_is_another_process(machine: Machine) -> None:
    machine.look()
    machine.starts[11] = 900.0
    seen = machine.spin(30.0)
    assert seen is not None and seen.loaders_cores is None


def test_new_processes_disk_and_network_are_seen(machine: Machine) -> None:
    machine.look()
    machine.cpu[21], machine.starts[21] = 0.0, 990.0
    machine.disk += 3_000_000
    machine.network[10]["eth0"] = (70 + 6_000_000, 7)
    seen = machine.spin(30.0)
    assert seen is not None
    assert (seen.new_process, seen.disk, seen.network) == (True, 100_000.0, 200_000.0)


def test_the_network_of_the_host_is_unknown(machine: Machine) -> None:
    machine.network[10] = machine.network[1]
    machine.look()
    machine.network[1] = machine.network[10] = {"lo": (5, 5), "eth0": (9_000_000, 9000)}
    seen = machine.spin(30.0)
    assert seen is not None and seen.network is None


@pytest.mark.parametrize("kind", ["nfs4", "lustre", "fuse.s3fs", "ceph"])
def test_the_network_of_a_pod_with_network_files_is_unknown(machine: Machine, kind: str) -> None:
    """The host moves their data, in its own namespace."""
    machine.mount = f"30 22 0:99 / /data rw - {kind} server:/export rw"
    machine.look()
    seen = machine.spin(30.0)
    assert seen is not None and seen.network is None


def test_the_network_of_a_pod_whose_mounts_cannot_be_read_is_unknown(machine: Machine) -> None:
    """It may have network files."""
    machine.mount = None
    machine.look()
    seen = machine.spin(30.0)
    assert seen is not None and (seen.loaders_cores, seen.network) == (pytest.approx(0.0, abs=1e-6), None)


@pytest.mark.parametrize("pids", [None, (), tuple(range(10, 10 + PIDS_MAX + 1))])
def test_without_known_processes_only_cgroups_are_known(machine: Machine, pids: tuple[int, ...] | None) -> None:
    machine.spinning = pids
    machine.look()
    seen = machine.spin(30.0)
    assert seen == HostProgress(1000.0, 1030.0, None, False, 0.0, None, cores=pytest.approx(2.0), spinning=2)


def test_too_many_processes_make_new_ones_unknown(machine: Machine) -> None:
    machine.look()
    machine.cpu |= dict.fromkeys(range(100, 100 + PIDS_MAX), 0.0)
    machine.starts |= dict.fromkeys(machine.cpu, 5.0)
    seen = machine.spin(30.0)
    assert seen is not None and seen.new_process is None


def test_processes_that_the_pid_namespace_hides_are_unknown(machine: Machine) -> None:
    machine.look()
    machine.cpu[0] = machine.starts[0] = 0.0
    machine.look(30.0)
    seen = machine.spin(30.0)
    assert seen is not None and seen.new_process is None


def test_a_holder_without_a_cgroup_and_one_that_was_not_a_suspect_have_no_values(machine: Machine) -> None:
    machine.look()
    assert list(machine.reader.read([Suspect(POD, (10,))], {})) == []
    machine.look(30.0)
    assert list(machine.reader.read([], {POD: PLACE})) == []
    assert machine.look(30.0) is None


@given(st.text(max_size=200))
def test_any_text_is_a_table_or_unknown(text: str) -> None:
    found = _parse_interfaces(HEAD + text)
    assert found is None or all(rx >= 0 and tx >= 0 for rx, tx in found.values())


def test_processes_on_gpus_that_end_or_are_stopped_are_counted(machine: Machine) -> None:
    machine.others = (20,)
    machine.look()
    seen = machine.spin(30.0)
    assert seen is not None and (seen.ended, seen.stopped) == (0, 0)
    machine.states[20] = "T"
    machine.spin(30.0)
    seen = machine.spin(30.0)
    assert seen is not None and (seen.ended, seen.stopped) == (0, 1), "stopped at two looks"
    machine.states[10] = "T"
    machine.spin(30.0)
    seen = machine.spin(30.0)
    assert seen is not None and seen.stopped == 1, "one that is suspended on a GPU that spins is no late rank"
    machine.starts[20] += 90.0  # the number of the process that has ended is that of another one now
    seen = machine.spin(30.0)
    assert seen is not None and (seen.ended, seen.stopped) == (1, 0)
    machine.others = None
    seen = machine.spin(30.0)
    assert seen is not None and (seen.ended, seen.stopped) == (None, None)


def test_a_suspect_does_not_print_pids() -> None:
    assert "4242" not in repr(Suspect(POD, (4242,)))
