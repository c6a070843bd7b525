"""gpu-exporter beside its peers, in one run, on the same C library that answers in microseconds.

So every figure is each exporter's own cost. The peers take turns round by round, since the machine's speed drifts:
quote the ratios. Peer: nvitop-exporter (PyPI), installed into a virtual environment of its own.

    python -m tests.bench.peers [--rounds 3] [--soak 20] [--before CHECKOUT]
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from gpu_exporter.devices.scenario import parse_scenario
from tests.testbed.nvml.build import build_library
from tests.testbed.nvml.feeder import NvmlTable, ScenarioFeeder
from tests.testbed.processes import GPU_EXPORTER, Processes, Running, fetch, free_port, wait_for
from tests.testbed.programs import cache_root

NVITOP = "nvitop-exporter==1.7.2"
GPUS = 8
SCRAPES = 300
TICK = os.sysconf("SC_CLK_TCK")


class Figures(NamedTuple):
    """One round of one exporter."""

    start_s: float
    rss_mib: float
    cpu_percent: float
    cached_p50_ms: float
    cached_p99_ms: float
    series: float
    bytes: float


def install_nvitop() -> Path:
    """A virtual environment with the peer, outside the checkout."""
    target = cache_root() / "nvitop-exporter-1.7.2"
    program = target / "bin" / "nvitop-exporter"
    if not program.exists():
        subprocess.run([sys.executable, "-m", "venv", str(target)], check=True)
        subprocess.run([target / "bin" / "pip", "install", "--quiet", NVITOP], check=True)
    return program


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def rss_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text("ascii").splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) / 1024


def measure(command: Sequence[str | Path], port: int, environment: dict[str, str], soak_s: float) -> Figures:
    """Start, wait for the first GPU series, soak at one scrape each 15 s, then scrape kept-alive."""
    with tempfile.TemporaryDirectory() as name, Processes(Path(name)) as processes:
        began = time.perf_counter()
        running: Running = processes.start(command, environment)
        url = f"http://127.0.0.1:{port}/metrics"
        wait_for(lambda: "gpu_power" in (fetch(url) or "") or None, f"{command[0]} to publish GPUs", 30, 0.005)
        start = time.perf_counter() - began
        time.sleep(3)
        pid = running.process.pid
        before, at = cpu_seconds(pid), time.perf_counter()
        body = ""
        while time.perf_counter() - at < soak_s:
            body = fetch(url) or ""
            time.sleep(min(15.0, soak_s / 2))
        percent = 100 * (cpu_seconds(pid) - before) / (time.perf_counter() - at)
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        times = []
        for _ in range(SCRAPES):
            begin = time.perf_counter()
            connection.request("GET", "/metrics")
            connection.getresponse().read()
            times.append((time.perf_counter() - begin) * 1000)
            time.sleep(0.01)
        connection.close()
        times.sort()
        return Figures(
            start,
            rss_mib(pid),
            percent,
            times[len(times) // 2],
            times[int(len(times) * 0.99)],
            sum(not line.startswith("#") for line in body.splitlines()),
            len(body),
        )


def measure_once(environment: dict[str, str], flags: Sequence[str]) -> list[float]:
    """Wall seconds of `--once`, twenty times."""
    times = []
    for _ in range(20):
        begin = time.perf_counter()
        subprocess.run([*GPU_EXPORTER, "--once", *flags], env=environment, check=True, capture_output=True)
        times.append(time.perf_counter() - begin)
    return sorted(times)


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--soak", type=float, default=20.0, help="seconds of quiet running per round")
    parser.add_argument("--before", type=Path, help="another checkout of gpu-exporter, measured in the same run")
    options = parser.parse_args()
    nvitop = install_nvitop()
    with tempfile.TemporaryDirectory() as name:
        table = NvmlTable(Path(name) / "table")
        load = {"kind": "square", "low": 0.1, "high": 0.9, "period": 30}
        holders = [{"gpu": i, "kind": "job", "name": str(100 + i)} for i in range(GPUS)]
        feeder = ScenarioFeeder(
            parse_scenario({"gpus": [{"model": "H100", "load": load}] * GPUS, "holders": holders}), table
        )
        feeder.start()
        environment = {
            # As installed: programs whose sources are compiled at each start measure the compiler.
            **{name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
            "LD_LIBRARY_PATH": str(build_library()),
            "GPU_EXPORTER_NVML_TABLE": str(table.path),
        }
        static = Path(name) / "holders.yaml"
        uuids = [gpu.uuid for gpu in feeder.stage.scenario.gpus]
        static.write_text(json.dumps([{"uuid": u, "job": str(100 + i)} for i, u in enumerate(uuids)]), "utf-8")
        checkouts = {"gpu-exporter": environment}
        if options.before:
            checkouts["before"] = {**environment, "PYTHONPATH": str(options.before.resolve() / "exporter")}
        rounds: dict[str, list[Figures]] = {checkout: [] for checkout in checkouts} | {"nvitop": []}
        for _ in range(options.rounds):
            for checkout, where in checkouts.items():
                port = free_port()
                flags = ["--no-attribution.slurm", f"--attribution.static={static}", f"--state.directory={name}/state"]
                ours = [*GPU_EXPORTER, f"--web.listen-address=127.0.0.1:{port}", *flags]
                rounds[checkout].append(measure(ours, port, where, options.soak))
            port = free_port()
            theirs = [nvitop, "--bind-address", "127.0.0.1", "--port", str(port), "--interval", "1"]
            rounds["nvitop"].append(measure(theirs, port, environment, options.soak))
        once = {
            checkout: measure_once(where, ["--no-attribution.slurm", "--state.directory="])
            for checkout, where in checkouts.items()
        }
        feeder.stop()
    print(
        f"{GPUS} GPUs with a holder each, {options.rounds} rounds in turn, medians; {os.cpu_count()} cores, "
        f"Python {sys.version.split()[0]}"
    )
    print(f"{'figure':16}", *(f"{exporter:>14}" for exporter in rounds), "ours by each")
    for field in Figures._fields:
        values = [statistics.median(getattr(figures, field) for figures in each) for each in rounds.values()]
        ratios = [f"{values[0] / value:.2f}" for value in values[1:]]
        print(f"{field:16}", *(f"{value:14.3f}" for value in values), *ratios)
    for checkout, times in once.items():
        print(
            f"{checkout} --once: p50 {times[10] * 1000:.0f} ms, p95 {times[18] * 1000:.0f} ms (nvitop-exporter has none)"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
