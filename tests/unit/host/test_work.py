"""Work of holders on their host: ten-minute means, relative to the holder's CPUs."""

from __future__ import annotations

import threading
from collections.abc import Collection
from pathlib import Path, PurePosixPath

import pytest
from tests.testbed.processes import wait_for
from tests.testbed.simulated_node import SimulatedNode

from gpu_exporter.agent.devices.scenario import parse_scenario
from gpu_exporter.agent.exposition.series import list_series
from gpu_exporter.agent.runtime.agent import Agent
from gpu_exporter.agent.runtime.simulation import build_simulation
from gpu_exporter.agent.runtime.surroundings import Host
from gpu_exporter.common.clock import SYSTEM_CLOCK, ManualClock
from gpu_exporter.common.config.defaults import Settings
from gpu_exporter.common.model.holders import Allocation, Holder, HolderKey, Who
from gpu_exporter.common.model.units import UnitId
from gpu_exporter.common.model.views import HostWork
from gpu_exporter.diagnosis.host.cgroups import Cgroups
from gpu_exporter.diagnosis.host.evidence import EvidenceReader
from gpu_exporter.diagnosis.host.loop import HostLoop, HostNode
from gpu_exporter.diagnosis.host.progress import ProgressReader
from gpu_exporter.diagnosis.host.work import HostWorks

JOB: Who = ("job", "42")
HOLDER = Holder(HolderKey("slurm", "42"), job_id="42")
HELD = [Allocation(UnitId("GPU-0"), HOLDER), Allocation(UnitId("GPU-1"), HOLDER)]
PLACE = "slurm/uid_0/job_42"


class Machine:
    """A host of 64 CPUs and 8 GPUs, on which job 42 holds two."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.clock = ManualClock()
        self.cpu_s = 0.0
        self.io_bytes = 0
        (root / "cgroup.controllers").touch()
        self.works = HostWorks(Cgroups(root), self.clock, 64)
        self.begin()

    def loop(self) -> HostLoop:
        cgroups = Cgroups(self.root)
        looks = EvidenceReader(cgroups, self.clock, 64, None)
        return HostLoop(self.works, ProgressReader(cgroups, self.clock, None), looks, self.clock)

    def begin(self) -> None:
        (self.root / PLACE).mkdir(parents=True)
        self.write()

    def write(self, **files: str) -> None:
        (self.root / PLACE / "cpu.stat").write_text(f"usage_usec {self.cpu_s * 1e6:.0f}\n")
        (self.root / PLACE / "io.stat").write_text(f"8:0 rbytes={self.io_bytes} wbytes=0\n")
        for name, text in files.items():
            (self.root / PLACE / name.replace("__", ".")).write_text(text)

    def spend(self, seconds: int, cpus: float, bytes_per_s: int = 0) -> HostWork | None:
        """Read every half minute while the job uses `cpus` CPUs."""
        for _ in range(seconds // 30):
            self.clock.advance(30.0)
            self.cpu_s += 30.0 * cpus
            self.io_bytes += 30 * bytes_per_s
            self.write()
            self.works.read(HELD, 8)
        return self.works.works.get(JOB)


def quiet_node() -> HostNode:
    """A node whose holders are all well."""
    return HostNode(
        lambda: (HELD, 8),
        lambda: (),
        lambda who, progress: None,
        lambda: (),
        lambda who, evidence: None,
        lambda who, files: None,
    )


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_without_a_limit_a_holders_cpus_are_its_share_by_gpus(machine: Machine) -> None:
    assert machine.spend(60, 8.0) is None  # the first read is after 30 s
    assert machine.spend(30, 8.0, 1000) == HostWork(0.5, 500.0, 16.0)  # two of eight GPUs: 16 of 64 CPUs
    assert machine.spend(600, 40.0) == HostWork(1.0, 0.0, 16.0)  # no limit keeps it to these CPUs
    machine.write(cpu__max="400000 100000\n")
    assert machine.spend(600, 1.0) == HostWork(0.25, 0.0, 4.0)


def test_host_work_is_forgotten_after_ten_minutes(machine: Machine) -> None:
    machine.spend(1200, 16.0)
    half = machine.spend(300, 0.0)
    assert half is not None
    assert half.cpu_ratio == pytest.approx(0.5)
    assert machine.spend(300, 0.0) == HostWork(0.0, 0.0, 16.0)


def test_a_recreated_cgroup_starts_a_new_mean(machine: Machine) -> None:
    machine.spend(600, 16.0)
    machine.cpu_s = 1.0
    assert machine.spend(30, 0.0) is None
    assert machine.spend(60, 0.0) == HostWork(0.0, 0.0, 16.0)


def test_a_holder_whose_cgroup_ended_has_no_value_and_is_searched_again(machine: Machine) -> None:
    machine.spend(120, 16.0)
    folder = machine.root / PLACE
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    machine.works.read(HELD, 8)
    assert machine.works.works == {}
    machine.begin()
    assert machine.spend(150, 16.0) == HostWork(1.0, 0.0, 16.0)


def test_holders_without_a_cgroup_are_searched_at_growing_intervals(machine: Machine) -> None:
    """As if Slurm does not use cgroups; a new holder is still found within a minute."""
    other = Allocation(UnitId("GPU-2"), HOLDER._replace(key=HolderKey("slurm", "43"), job_id="43"))
    searches: list[float] = []
    find = machine.works._cgroups.find

    def count(wanted: Collection[Who]) -> dict[Who, PurePosixPath]:
        searches.append(machine.clock.monotonic())
        return find(wanted)

    machine.works._cgroups.find = count  # type: ignore[method-assign]
    begun = machine.clock.monotonic()
    for _ in range(120):  # an hour
        machine.works.read([other], 8)
        machine.clock.advance(30.0)
    assert [round(at - begun) for at in searches] == [0, 120, 360, 840, 1800, 2760]
    machine.works.read([*HELD, other], 8)
    machine.spend(120, 16.0)
    assert machine.works.works == {JOB: HostWork(1.0, 0.0, 16.0)}


def test_the_work_of_ended_holders_is_forgotten(machine: Machine) -> None:
    machine.spend(120, 16.0)
    machine.works.read([], 8)
    assert machine.works.works == {}
    assert machine.works._samples == {}


def test_after_an_exception_no_old_host_work_remains(machine: Machine) -> None:
    machine.spend(120, 16.0)
    stop = threading.Event()

    def fail() -> tuple[list[Allocation], int]:
        stop.set()
        raise OSError("no")

    machine.loop().run(stop, quiet_node()._replace(list_held=fail))
    assert machine.works.works == {}


def test_a_fault_in_the_search_for_progress_keeps_the_values(machine: Machine) -> None:
    """The values delay decisions: without them a holder that works on its host would be marked."""
    machine.spend(120, 16.0)
    stop = threading.Event()

    def fail() -> tuple[()]:
        stop.set()
        raise KeyError("a bug")

    machine.loop().run(stop, quiet_node()._replace(list_suspects=fail))
    assert machine.works.works == {JOB: HostWork(1.0, 0.0, 16.0)}


def test_a_node_publishes_host_work_on_each_gpu_of_the_holder(tmp_path: Path) -> None:
    """Uses the real node state: a job with two GPUs, whose cgroup shows its work."""
    jobs = [{"gpu": gpu, "kind": "job", "name": "42"} for gpu in (0, 1)]
    scenario = {"gpus": [{"model": "H100"}] * 2, "holders": jobs}
    machine = Machine(tmp_path)
    node = SimulatedNode(parse_scenario(scenario), host=machine.works)
    node.run(60)
    allocations, gpus = node.diagnosis.host_node().list_held()
    assert ([each.holder.job_id for each in allocations], gpus) == (["42", "42"], 2)
    for seconds in (0.0, 90.0):
        machine.clock.advance(seconds)
        machine.cpu_s += seconds * 32
        machine.write()
        machine.works.read(allocations, gpus)
    view = node.run(10)
    rows = {s.family.name: [value for _, value in s.rows] for s in list_series(view) if "_host_" in s.family.name}
    assert rows == {
        "gpu_allocation_host_activity_ratio": [0.5, 0.5],
        "gpu_allocation_host_cpus": [64.0, 64.0],
        "gpu_allocation_host_io_bytes_per_second": [0.0, 0.0],
    }
    node.clock.advance(30.0)  # no source confirms the job any more
    assert {allocation.host for allocation in node.view().allocations} == {None}


def test_a_running_agent_reads_host_work(tmp_path: Path) -> None:
    """The work of a holder that has ended is forgotten."""
    machine = Machine(tmp_path)
    machine.spend(120, 32.0)
    backend, source, _ = build_simulation(parse_scenario({"gpus": [{"model": "H100"}]}), SYSTEM_CLOCK, 0.2)
    agent = Agent(Settings(), backend, [source], SYSTEM_CLOCK, host=Host(reader=machine.loop()))
    agent.start()
    try:
        wait_for(lambda: not machine.works.works, "the agent to read the cgroups")
    finally:
        agent.stop()
