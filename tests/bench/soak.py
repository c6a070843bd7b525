"""Measures whether exporter and reconciler grow over a day, played sixty times as fast: `make soak HOURS=24`.

Pods, jobs, trainings and MIG instances come and go, and kubelet, driver, GPUs, clients and Prometheus fail in between. The
numbers of events are those of a day, and what the exporter does by a timer is sped up as far as its settings allow. The
first 16 real minutes do not count: the exporter keeps a holder that is gone for 15 minutes of its own clock. From then on,
a line is fitted to each figure. Needs root, because the exporter traces processes.

Exits with 1 if the upper end of a slope's 95 % interval reaches 1 MiB, one descriptor or one thread per day.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import grpc

from gpu_exporter.agent.devices.scenario import Scenario, parse_scenario
from tests.bench.everything import Jobs
from tests.bench.peers import rss_mib
from tests.testbed.nvml.build import build_library
from tests.testbed.nvml.feeder import NvmlTable, ScenarioFeeder
from tests.testbed.podresources import Kubelet, begin_container
from tests.testbed.processes import GPU_EXPORTER, Processes, fetch, free_port
from tests.testbed.servers import Prometheus

SPEED = 60
SCRAPE_S = 15.0  # simulated; the step of the loop
DAY_STEPS = 86400 / SCRAPE_S
HOUR_STEPS = round(3600 / SCRAPE_S)
SETTLE_S = 960.0  # KEEP_ABSENT_S of the ledger, and a minute
WHOLE, BOARDS, INSTANCES = 4, 4, 7  # GPUs with a job each; boards in MIG mode, and their instances
LIMITS = {"memory, MiB": 1.0, "descriptors": 1.0, "threads": 1.0}  # of the slope's upper end, per day
BATCHES = 40
# Sped up less than sixty times: a GPU is read every 200 ms (25 times), and the state written every 200 ms (5 times).
SETTINGS = """\
sampling: {interval: 200ms, interval_max: 200ms}
attribution: {interval: 100ms}
diagnosis: {interval: 250ms}
state: {write_interval: 200ms}
training: {files: read}
causes: {files: trace}
"""
POLICY = "policy: {candidate_after: 1m, underused_after: 2m, startup_grace: 10s}\n"


class Slope(NamedTuple):
    """A fitted line: change per day, and the ends of its 95 % interval."""

    per_day: float
    low: float
    high: float


def student(degrees: float) -> float:
    """The 97.5 % quantile of Student's t distribution, within 1 % from 4 degrees of freedom on (Abramowitz 26.7.5)."""
    z = statistics.NormalDist().inv_cdf(0.975)
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / degrees + second / degrees**2 + third / degrees**3


def fit(days: Sequence[float], values: Sequence[float]) -> Slope:
    """Least squares over the means of batches.

    Neighbouring batches resemble each other, so the interval counts fewer of them (by their correlation at lag one).
    """
    size = max(1, len(days) // BATCHES)
    starts = range(0, len(days) - size + 1, size)
    x = [statistics.fmean(days[at : at + size]) for at in starts]
    y = [statistics.fmean(values[at : at + size]) for at in starts]
    slope, offset = statistics.linear_regression(x, y)
    rest = [b - offset - slope * a for a, b in zip(x, y, strict=True)]
    squares = sum(each * each for each in rest)
    if squares < 1e-12:
        return Slope(slope, slope, slope)
    alike = max(0.0, sum(a * b for a, b in pairwise(rest)) / squares)
    degrees = max(4.0, len(x) * (1 - alike) / (1 + alike) - 2)
    middle = statistics.fmean(x)
    error = math.sqrt(squares / degrees / sum((each - middle) ** 2 for each in x))
    half = student(degrees) * error
    return Slope(slope, slope - half, slope + half)


def scenario(hours: int) -> Scenario:
    """Jobs that wait often; each board in MIG mode gets other instances every four hours."""
    load = {"kind": "square", "low": 0.0, "high": 0.9, "period": 20}
    real_s = 3600 / SPEED
    boards = []
    for board in range(BOARDS):
        edges = [0, *range(board + 1, hours, BOARDS), 10 * hours]
        instances = [
            {"profile": "1g.10gb", "gi": 7 + slot, "load": load, "from": start * real_s, "to": end * real_s}
            for start, end in pairwise(edges)
            for slot in range(INSTANCES)
        ]
        boards.append({"model": "H100", "mig": instances})
    return parse_scenario({"gpus": [{"model": "H100", "load": load}] * WHOLE + boards})


class Node:
    """A node's driver, kubelet and jobs, and all that goes wrong with them. Times are simulated minutes."""

    def __init__(self, path: Path, processes: Processes, hours: int) -> None:
        self.path, self.logs, self.state = path, path / "pods", path / "state"
        self.counts: Counter[str] = Counter()
        self.series = 0
        self._begun = 0
        self._pods: dict[str, tuple[str, str]] = {}
        self._idle: list[socket.socket] = []
        self.table = NvmlTable(path / "table")
        self.feeder = ScenarioFeeder(scenario(hours), self.table)
        self.jobs = Jobs(path, WHOLE)
        self.kubelet = Kubelet(path / "kubelet.sock")
        self.logs.mkdir()
        self._list_jobs()
        self.change_pods(0)
        self.kubelet.start()
        (path / "settings.yaml").write_text(SETTINGS, encoding="utf-8")
        (path / "policy.yaml").write_text(POLICY, encoding="utf-8")
        environment = {**os.environ, "LD_LIBRARY_PATH": str(build_library())}
        self.exporter, self.url = processes.start_exporter(
            *self.kubelet.flags(self.logs),
            *(f"--config.file={path / 'settings.yaml'}", f"--attribution.static={path / 'holders.json'}"),
            *(f"--path.cgroup={self.jobs.cgroups}", f"--attribution.slurm.job-files={self.jobs.run / 'jobs'}"),
            f"--state.directory={self.state}",
            environment=environment | {"GPU_EXPORTER_NVML_TABLE": str(self.table.path)},
        )
        self.prometheus = Prometheus(processes, path / "prometheus", {"n1": self.url.removeprefix("http://")})
        self.reconciler = processes.start(
            [
                *(*GPU_EXPORTER, "reconcile", "--no-kubernetes", "--no-slurm", "--interval=1s"),
                *(f"--source.prometheus={self.prometheus.url}", f"--config.file={path / 'policy.yaml'}"),
                f"--web.listen-address=127.0.0.1:{free_port()}",
            ],
            name="reconciler",
        )

    def close(self) -> None:
        self.release_clients()
        self.kubelet.stop()
        self.jobs.close()

    def _list_jobs(self) -> None:
        held = [
            f'{{"uuid": "{gpu.uuid}", "job": "{number}"}}'
            for gpu, number in zip(self.feeder.stage.scenario.gpus, self.jobs.numbers, strict=False)
        ]
        new = self.path / "holders.new"
        new.write_text(f"[{', '.join(held)}]", encoding="utf-8")
        new.rename(self.path / "holders.json")
        for gpu, pid in enumerate(self.jobs.pids):
            self.feeder.pids[gpu] = ((pid, ""),)

    def change_jobs(self, step: int) -> None:
        self.jobs.renew(step % WHOLE)
        self._list_jobs()
        self.counts["jobs begun"] += 1

    def change_pods(self, step: int) -> None:
        """End one pod, and start one on each free instance."""
        now = self.feeder.stage.now()
        units = [each.uuid for gpu in self.feeder.stage.scenario.gpus for each in gpu.instances_at(now)]
        self.counts["instances made"] += len(set(units) - self._pods.keys()) if self._pods else 0
        for unit in {*(self._pods.keys() - set(units)), units[step % len(units)]} & self._pods.keys():
            namespace, name = self._pods.pop(unit)
            shutil.rmtree(self.logs / f"{namespace}_{name}_uid-{name}", ignore_errors=True)
        for unit in units:
            if unit not in self._pods:
                self._begun += 1
                namespace, name = f"team-{self._begun % 40}", f"pod-{self._begun}"
                begin_container(self.logs, f"{namespace}_{name}_uid-{name}")
                self._pods[unit] = namespace, name
                self.counts["pods begun"] += 1
        self.kubelet.allocatable = units
        self.kubelet.pods = {name: {"main": {"nvidia.com/gpu": [unit]}} for unit, name in self._pods.items()}

    def scrape(self) -> None:
        text = fetch(f"{self.url}/metrics")
        self.counts["scrapes" if text else "scrapes without an answer"] += 1
        self.series = sum(not line.startswith("#") for line in (text or "").splitlines()) or self.series

    def ask(self, step: int) -> None:
        """Ask for all pages, and for one that is not there; a client connects and sends nothing."""
        for page in ("/api/v1/status", "/", "/-/ready", "/nothing"):
            fetch(f"{self.url}{page}")
        host, port = self.url.removeprefix("http://").split(":")
        self._idle.append(socket.create_connection((host, int(port))))
        self.counts["pages and bad requests"] += 5

    def release_clients(self, step: int = 0) -> None:
        for each in self._idle:
            each.close()
        self._idle.clear()

    def stop_kubelet(self, step: int) -> None:
        self.kubelet.stop()
        self.counts["kubelet restarts"] += 1

    def start_kubelet(self, step: int) -> None:
        self.kubelet.start()

    def refuse_lists(self, step: int) -> None:
        self.kubelet.status = grpc.StatusCode.RESOURCE_EXHAUSTED
        self.counts["times of kubelet errors"] += 1

    def allow_lists(self, step: int) -> None:
        self.kubelet.status = None

    def release_driver(self, step: int) -> None:
        self.exporter.process.send_signal(signal.SIGUSR1)
        self.counts["driver restarts"] += 1

    def open_driver(self, step: int) -> None:
        self.exporter.process.send_signal(signal.SIGHUP)

    def lose_gpu(self, step: int) -> None:
        gpu = step // HOUR_STEPS % (WHOLE + BOARDS)
        self.table.push_event(gpu, 79)
        self.table.set_call(gpu, "*", "NVML_ERROR_GPU_IS_LOST")
        self.counts["lost GPUs"] += 1

    def hang_gpu(self, step: int) -> None:
        self.table.set_call(step // HOUR_STEPS % (WHOLE + BOARDS), "nvmlDeviceGetPowerUsage", delay_s=4.0)
        self.counts["hanging GPUs"] += 1

    def heal(self, step: int) -> None:
        for gpu in range(WHOLE + BOARDS):
            self.table.set_call(gpu, "*")

    def freeze_prometheus(self, step: int) -> None:
        self.prometheus.running.process.send_signal(signal.SIGSTOP)
        self.counts["times without Prometheus"] += 1

    def thaw_prometheus(self, step: int) -> None:
        self.prometheus.running.process.send_signal(signal.SIGCONT)

    def figures(self, pid: int) -> dict[str, float]:
        proc = Path(f"/proc/{pid}")
        counted = {"descriptors": len(os.listdir(proc / "fd")), "threads": len(os.listdir(proc / "task"))}
        return {"memory, MiB": rss_mib(pid), **counted}

    def look(self) -> dict[str, dict[str, float]]:
        files = sum(each.stat().st_size for each in self.state.iterdir() if not each.name.endswith(".new"))
        exporter = {**self.figures(self.exporter.process.pid), "series": self.series, "state file, KiB": files / 1024}
        return {"exporter": exporter, "reconciler": self.figures(self.reconciler.process.pid)}

    def plan(self) -> list[tuple[float, float, Callable[[int], None], Callable[[int], None] | None]]:
        """(every so many hours, lasts so many minutes, what begins, what ends it)."""
        minute = 1 / 60
        return [
            (minute, 0, self.change_pods, None),
            (0.5, 0, self.change_jobs, None),
            (0.25, 5, self.ask, self.release_clients),
            (4, 5, self.stop_kubelet, self.start_kubelet),
            (3, 3, self.refuse_lists, self.allow_lists),
            (6, 5, self.release_driver, self.open_driver),
            (5, 10, self.lose_gpu, self.heal),
            (7, 10, self.hang_gpu, self.heal),
            (8, 4, self.freeze_prometheus, self.thaw_prometheus),
        ]


def play(node: Node, steps: int, settle: int) -> list[dict[str, dict[str, float]]]:
    """Play all steps; returns what was seen in each second after the first `settle` steps."""
    seen = []
    due: dict[int, list[Callable[[int], None]]] = {}
    second, next_at = round(SPEED / SCRAPE_S), time.monotonic()
    for step in range(1, settle + steps + 1):
        node.feeder.feed()
        for each in due.pop(step, ()):
            each(step)
        for hours, minutes, begin, end in node.plan():
            if step % round(hours * HOUR_STEPS) == 0:
                begin(step)
                if end is not None:
                    due.setdefault(step + round(minutes * 60 / SCRAPE_S), []).append(end)
        node.scrape()
        for running in (node.exporter, node.reconciler):
            assert running.process.poll() is None, running.log()[-3000:]
        if step % second == 0:
            look = node.look()
            if step > settle:
                seen.append(look)
            if step % HOUR_STEPS == 0:
                print(f"hour {(step - settle) / HOUR_STEPS:5.1f}: {look}", flush=True)
        if step == settle:
            node.counts.clear()
        next_at = max(next_at + SCRAPE_S / SPEED, time.monotonic() - 1)
        time.sleep(max(0.0, next_at - time.monotonic()))
    return seen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=24.0, help="simulated hours that count (default %(default)s)")
    parser.add_argument("--settle", type=float, default=SETTLE_S, help="real seconds before (default %(default)s)")
    options = parser.parse_args()
    settle, steps = round(options.settle * SPEED / SCRAPE_S), round(options.hours * HOUR_STEPS)
    began, passed = time.monotonic(), True
    with tempfile.TemporaryDirectory() as name, Processes(Path(name)) as processes:
        node = Node(Path(name), processes, math.ceil((settle + steps) / HOUR_STEPS) + 1)
        try:
            seen = play(node, steps, settle)
        finally:
            node.close()
        lists = node.kubelet.listed
    print(f"{options.hours:g} h in {(time.monotonic() - began - options.settle) / 60:.0f} min; {dict(node.counts)}")
    print(f"{lists} lists of pods in the whole run")
    print(f"{'':28} {'first':>9} {'last':>9} {'per day':>9}   95 % interval")
    for program in seen[0]:
        for figure in seen[0][program]:
            values = [each[program][figure] for each in seen]
            line = fit([at * SPEED / SCRAPE_S / DAY_STEPS for at in range(len(values))], values)
            passed = passed and (figure not in LIMITS or line.high < LIMITS[figure])
            numbers = f"{values[0]:9.1f} {values[-1]:9.1f} {line.per_day:9.2f}"
            print(f"{program + ' ' + figure:28} {numbers}   {line.low:.2f} to {line.high:.2f}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
