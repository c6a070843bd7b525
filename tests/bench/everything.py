"""Memory and CPU with everything on: causes, stalls, open files, training. Compared, in one run, with all of it off.

    python -m tests.bench.everything [--rounds 3] [--soak 90]

Eight H100, each with a job: a real process in a cgroup made of files, which the driver lists, and a report of a training
that changes every ten seconds. The exporters take turns. The jobs are healthy, or (`unwell`) wait most of the time, so that
each look finds evidence. Needs root and the right to trace processes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpu_exporter.agent.devices.scenario import parse_scenario
from tests.bench.peers import GPUS, rss_mib
from tests.testbed.nvml.build import build_library
from tests.testbed.nvml.feeder import NvmlTable, ScenarioFeeder
from tests.testbed.processes import GPU_EXPORTER, Processes, cpu_s, fetch, free_port, wait_for

LOADS: Mapping[str, Mapping[str, Any]] = {
    "healthy": {"kind": "constant", "value": 0.9},
    "unwell": {"kind": "square", "low": 0.0, "high": 0.9, "period": 20},
}
ON = "training: {files: read}\ncauses: {files: trace}\n"
WRITTEN_S = 10.0


class Jobs:
    """One job for each GPU. Their cgroups and reports are files, their processes are real and sleep."""

    def __init__(self, path: Path, count: int = GPUS) -> None:
        self.cgroups, self.run = path / "cgroup", path / "run"
        self.numbers = list(range(100, 100 + count))
        self._sleepers: dict[int, subprocess.Popen[bytes]] = {}
        self._began = time.monotonic()
        self._stop = threading.Event()
        self._changing = threading.Lock()
        (self.run / "jobs").mkdir(parents=True, mode=0o755)
        self.cgroups.mkdir()
        (self.cgroups / "cgroup.controllers").touch()
        for number in self.numbers:
            self._begin(number)
        self._write()
        self._thread = threading.Thread(target=self._keep_writing, daemon=True)
        self._thread.start()

    @property
    def pids(self) -> list[int]:
        return [self._sleepers[number].pid for number in self.numbers]

    def _begin(self, number: int) -> None:
        (self.cgroups / "slurm" / f"job_{number}").mkdir(parents=True)
        (self.run / "training" / str(number)).mkdir(parents=True)
        self._sleepers[number] = subprocess.Popen(["sleep", "infinity"])

    def _end(self, number: int) -> None:
        sleeper = self._sleepers.pop(number)
        sleeper.kill()
        sleeper.wait()

    def renew(self, position: int) -> None:
        """End a job, and begin another one with a new number in its place."""
        with self._changing:
            old, new = self.numbers[position], max(self.numbers) + 1
            self._begin(new)
            self.numbers[position] = new
            self._end(old)
            for folder in (self.cgroups / "slurm" / f"job_{old}", self.run / "training" / str(old)):
                shutil.rmtree(folder)
        self._write()

    def _keep_writing(self) -> None:
        while not self._stop.wait(WRITTEN_S):
            self._write()

    def _write(self) -> None:
        with self._changing:
            self._write_files(time.monotonic() - self._began)

    def _write_files(self, spent: float) -> None:
        for number, pid in zip(self.numbers, self.pids, strict=True):
            cgroup = self.cgroups / "slurm" / f"job_{number}"
            (cgroup / "cgroup.procs").write_text(f"{pid}\n")
            (cgroup / "cpu.stat").write_text(f"usage_usec {spent * 2e6:.0f}\n")
            steps = int(spent * 10)
            report = {
                "format": "gpu-exporter-training/1",
                "run": f"{number:016x}",
                "state": "running",
                "rank": 0,
                "world_size": 1,
                "steps": steps,
                "measured_steps": steps,
                "step_seconds": spent,
                "wait_seconds": spent / 2,
                "phases": {name: {"seconds": spent / 4} for name in ("forward", "backward", "optimizer")},
                "facts": {"num_workers": 2, "batch_size": 16, "cpus": 8.0},
            }
            path = self.run / "training" / str(number) / f"run-{number:016x}.json"
            path.with_suffix(".new").write_text(json.dumps(report))
            path.with_suffix(".new").rename(path)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        for number in self.numbers:
            self._end(number)


@contextmanager
def stage(load: Mapping[str, Any]) -> Iterator[tuple[dict[str, str], Path, Jobs]]:
    """The environment of an exporter, its file of holders, and the jobs."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name)
        jobs = Jobs(path)
        table = NvmlTable(path / "table")
        feeder = ScenarioFeeder(parse_scenario({"gpus": [{"model": "H100", "load": load}] * GPUS}), table)
        for gpu, pid in enumerate(jobs.pids):
            feeder.pids[gpu] = ((pid, ""),)
        held = [{"uuid": gpu.uuid, "job": str(100 + i)} for i, gpu in enumerate(feeder.stage.scenario.gpus)]
        (path / "holders.json").write_text(json.dumps(held), encoding="utf-8")
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
        environment |= {"LD_LIBRARY_PATH": str(build_library()), "GPU_EXPORTER_NVML_TABLE": str(table.path)}
        feeder.start()
        try:
            yield environment, path, jobs
        finally:
            feeder.stop()
            jobs.close()


def measure(flags: Sequence[str], environment: dict[str, str], path: Path, soak_s: float) -> tuple[float, float, float]:
    """MiB of memory, % of a core, and the number of causes and trainings that are shown at the end."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    base = [f"--web.listen-address=127.0.0.1:{port}", "--no-attribution.slurm", "--no-attribution.kubelet"]
    base += [f"--attribution.static={path / 'holders.json'}", "--state.directory="]
    with tempfile.TemporaryDirectory() as name, Processes(Path(name)) as processes:
        running = processes.start([*GPU_EXPORTER, *base, *flags], environment)
        wait_for(lambda: "gpu_power" in (fetch(f"{url}/metrics") or "") or None, "GPUs", 30)
        time.sleep(20)  # the first looks
        pid = running.process.pid
        before, at = cpu_s(pid), time.monotonic()
        while time.monotonic() - at < soak_s:
            fetch(f"{url}/metrics")
            time.sleep(15)
        percent = 100 * (cpu_s(pid) - before) / (time.monotonic() - at)
        status = json.loads(fetch(f"{url}/api/v1/status") or "{}")
        shown = sum(bool(each.get("causes")) + bool(each.get("training")) for each in status.get("allocations", []))
        return rss_mib(pid), percent, float(shown)


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--soak", type=float, default=90.0)
    options = parser.parse_args()
    for title, load in LOADS.items():
        found: dict[str, list[tuple[float, float, float]]] = {"all off": [], "all on": []}
        with stage(load) as (environment, path, jobs):
            (path / "on.yaml").write_text(ON, encoding="utf-8")
            flags = {
                "all off": [f"--path.cgroup={path / 'none'}", "--no-attribution.process"],
                "all on": [
                    f"--config.file={path / 'on.yaml'}",
                    f"--path.cgroup={jobs.cgroups}",
                    f"--attribution.slurm.job-files={jobs.run / 'jobs'}",
                ],
            }
            for _ in range(options.rounds):
                for name, own in flags.items():
                    found[name].append(measure(own, environment, path, options.soak))
        print(f"{GPUS} H100, {title}, {options.rounds} rounds in turn of {options.soak:.0f} s, medians")
        for name, rounds in found.items():
            rss, percent, shown = (statistics.median(each) for each in zip(*rounds, strict=True))
            print(f"  {name:8} {rss:6.1f} MiB  {percent:5.2f} % of a core  {shown:.0f} causes and trainings shown")
    return 0


if __name__ == "__main__":
    sys.exit(main())
