"""A node with an exporter, whose GPUs have processes of pods and jobs, in real cgroups or a /proc made of files."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from gpu_exporter.agent.devices.loads import Load
from gpu_exporter.agent.devices.scenario import parse_scenario
from tests.testbed.cgroups import Places
from tests.testbed.nvml.feeder import NvmlTable, ScenarioFeeder
from tests.testbed.processes import Processes, Running, fetch, run_exporter

QUIET = ("--no-attribution.slurm", "--no-attribution.kubelet")
FAST = "sampling: {interval: 200ms, deadline: 500ms, withhold_min: 1s}\nattribution: {interval: 200ms}\n"
MIG = [{"profile": "1g.10gb", "gi": 7}, {"profile": "1g.10gb", "gi": 8}]
IDLE: Sequence[Mapping[str, Any]] = ({"model": "H100"}, {"model": "H100"}, {"model": "H100", "mig": MIG})


def job(number: int | str) -> str:
    """The cgroup of a step of a Slurm job."""
    return f"slurm/uid_0/job_{number}/step_0"


class Node:
    """GPUs with processes, and an exporter with a file of holders."""

    def __init__(
        self,
        processes: Processes,
        environment: dict[str, str],
        table: NvmlTable,
        places: Places,
        children: Processes,
        path: Path,
        gpus: Sequence[Mapping[str, Any]] = IDLE,
        settings: str = FAST,
    ) -> None:
        self._processes, self._environment, self._places, self._children = processes, environment, places, children
        scenario = parse_scenario({"gpus": list(gpus)})
        self.uuids = [gpu.uuid for gpu in scenario.gpus]
        self.instances = [instance.uuid for gpu in scenario.gpus for instance in gpu.instances]
        self._table = table
        self._feeder = ScenarioFeeder(scenario, table)
        self._feeder.start()
        self._config, self._holders = path / "fast.yaml", path / "holders.json"
        self._config.write_text(settings, encoding="utf-8")
        self.running: Running | None = None

    def close(self) -> None:
        self._feeder.stop()

    def start_process(
        self, path: str, command: Sequence[str] = ("sleep", "600"), environment: Mapping[str, str] | None = None
    ) -> int:
        """Start a process in that cgroup, by default one that sleeps; returns its pid."""
        pid = self._children.start(command, environment).process.pid
        self._places.put(pid, path)
        return pid

    def list_on(self, gpu: int, *pids: int | tuple[int, str]) -> None:
        """Make the driver list these processes on a GPU, each with its MIG instance if it has one."""
        self._feeder.pids[gpu] = tuple((pid, "") if isinstance(pid, int) else pid for pid in pids)

    def list_with_memory(self, gpu: int, **memory_gib: tuple[str, int]) -> None:
        """Make the driver list a new process for each (cgroup, GiB of memory)."""
        pids = {self.start_process(path): gib for path, gib in memory_gib.values()}
        self._feeder.memory |= {pid: gib * 2**30 for pid, gib in pids.items()}
        self.list_on(gpu, *pids)

    def work(self, pid: int, load: Load) -> None:
        """Make the driver report this work of a listed process on its GPU."""
        self._feeder.work[pid] = load

    def add_zombies(self, gpu: int, number: int) -> None:
        """Make the driver's process utilization contain entries without a process."""
        self._table.table.devices[gpu].zombies = number

    def refuse(self, gpu: int, call: str, error: str) -> None:
        """Make this call fail."""
        self._table.set_call(gpu, call, error)

    def hold(self, *entries: dict[str, Any]) -> None:
        self._holders.write_text(json.dumps(list(entries)), encoding="utf-8")

    def flags(self) -> tuple[str | Path, ...]:
        return (
            *QUIET,
            f"--config.file={self._config}",
            f"--attribution.static={self._holders}",
            f"--path.procfs={self._places.procfs}",
        )

    def start(self, *flags: str) -> str:
        self.running, url = self._processes.start_exporter(*self.flags(), *flags, environment=self._environment)
        return url

    def once(self, *flags: str | Path) -> subprocess.CompletedProcess[str]:
        return self.run("--once", "--state.directory=", *flags)

    def run(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        return run_exporter(*arguments, environment=self._environment)

    def log(self) -> str:
        assert self.running is not None
        return self.running.log()


def read(url: str, family: str, **labels: str) -> float | None:
    """The value of the only series of a family with these labels."""
    found = [
        sample.value
        for metric in text_string_to_metric_families(fetch(f"{url}/metrics") or "")
        for sample in metric.samples
        if sample.name == family and labels.items() <= sample.labels.items()
    ]
    assert len(found) < 2, found
    return found[0] if found else None


def states(url: str, key: str = "job_id") -> dict[str, tuple[str, str]]:
    """State and evidence, by job or pod."""
    status = json.loads(fetch(f"{url}/api/v1/status") or "{}")
    return {a[key]: (a["state"], a["evidence"]) for a in status.get("allocations", [])}
