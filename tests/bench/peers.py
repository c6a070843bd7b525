"""gpu-exporter compared with its peers in one run, on the same C library, which answers in microseconds.

So every figure is the exporter's own cost. The peers take turns round by round, since the machine's speed drifts: quote
only the ratios. Peer: nvitop-exporter (PyPI), installed into a separate virtual environment. The floor is
tests/bench/floor.py. The number of series and the age of values are measured too, so that less work is seen.

    python -m tests.bench.peers [--rounds 3] [--soak 20] [--before CHECKOUT]
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from gpu_exporter.agent.devices.scenario import parse_scenario
from tests.testbed.nvml.build import build_library
from tests.testbed.nvml.feeder import NvmlTable, ScenarioFeeder
from tests.testbed.processes import GPU_EXPORTER, Processes, Running, cpu_s, fetch, free_port, wait_for
from tests.testbed.programs import cache_root

NVITOP = "nvitop-exporter==1.7.2"
GPUS, INSTANCES = 8, 7
SCRAPES = 300
EDGE_S = 15.0  # between two changes of the load


class Figures(NamedTuple):
    """The figures of one round of one exporter."""

    start_s: float
    rss_mib: float
    cpu_percent: float
    cached_p50_ms: float
    cached_p99_ms: float
    fresh_s: float
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


def rss_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text("ascii").splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) / 1024


def powers(text: str) -> dict[str, float]:
    """The values of all series of power, by name and labels."""
    lines = [line.rpartition(" ") for line in text.splitlines() if "gpu_power" in line and not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


def fresh_s(feeder: ScenarioFeeder, url: str) -> float:
    """Seconds from the next edge of the load until a page shows a power that changed by a fifth."""
    time.sleep((EDGE_S - 0.1 - feeder.stage.now()) % EDGE_S)  # just before an edge
    before = powers(fetch(url) or "")
    time.sleep(-feeder.stage.now() % EDGE_S)
    began = time.perf_counter()

    def has_changed() -> bool:
        now = powers(fetch(url) or "")
        return any(abs(value - before[name]) > 0.2 * before[name] for name, value in now.items() if name in before)

    wait_for(has_changed, "another power", 14, 0.05)
    return time.perf_counter() - began


def measure(
    command: Sequence[str | Path], port: int, environment: dict[str, str], soak_s: float, feeder: ScenarioFeeder
) -> Figures:
    """Start, wait for the first GPU series, run with one scrape every 15 s, then scrape on a kept-alive connection."""
    with tempfile.TemporaryDirectory() as name, Processes(Path(name)) as processes:
        began = time.perf_counter()
        running: Running = processes.start(command, environment)
        url = f"http://127.0.0.1:{port}/metrics"
        wait_for(lambda: "gpu_power" in (fetch(url) or "") or None, f"{command[0]} to publish GPUs", 30, 0.005)
        start = time.perf_counter() - began
        time.sleep(3)
        pid = running.process.pid
        before, at = cpu_s(pid), time.perf_counter()
        body = ""
        while time.perf_counter() - at < soak_s:
            body = fetch(url) or ""
            time.sleep(min(15.0, soak_s / 2))
        percent = 100 * (cpu_s(pid) - before) / (time.perf_counter() - at)
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
        memory = rss_mib(pid)
        return Figures(
            start,
            memory,
            percent,
            times[len(times) // 2],
            times[int(len(times) * 0.99)],
            fresh_s(feeder, url),
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


@contextlib.contextmanager
def play(gpus: Sequence[Mapping[str, object]]) -> Iterator[tuple[dict[str, str], Path, ScenarioFeeder]]:
    """Show these GPUs in the C library: yields its environment, a file in which a job holds each unit, and what feeds it."""
    with tempfile.TemporaryDirectory() as name:
        table, static = NvmlTable(Path(name) / "table"), Path(name) / "holders.yaml"
        # A job on a whole GPU has a process on it, which nvitop-exporter reports too.
        holders = [{"gpu": i, "kind": "job", "name": str(100 + i)} for i, gpu in enumerate(gpus) if "mig" not in gpu]
        feeder = ScenarioFeeder(parse_scenario({"gpus": list(gpus), "holders": holders}), table)
        units = [unit.uuid for gpu in feeder.stage.scenario.gpus for unit in (gpu.instances or (gpu,))]
        static.write_text(json.dumps([{"uuid": u, "job": str(100 + i)} for i, u in enumerate(units)]), "utf-8")
        feeder.start()
        try:
            yield (
                {
                    # As installed: if sources were compiled at each start, the compiler would be measured.
                    **{name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
                    "LD_LIBRARY_PATH": str(build_library()),
                    "GPU_EXPORTER_NVML_TABLE": str(table.path),
                },
                static,
                feeder,
            )
        finally:
            feeder.stop()


def measure_ours(
    checkouts: Mapping[str, Mapping[str, str]],
    environment: dict[str, str],
    static: Path,
    soak_s: float,
    feeder: ScenarioFeeder,
) -> dict[str, Figures]:
    """One round of each checkout of gpu-exporter."""
    found = {}
    for checkout, path in checkouts.items():
        port = free_port()
        flags = ["--no-attribution.slurm", f"--attribution.static={static}", f"--state.directory={static.parent}/state"]
        ours = [*GPU_EXPORTER, f"--web.listen-address=127.0.0.1:{port}", *flags]
        found[checkout] = measure(ours, port, {**environment, **path}, soak_s, feeder)
    return found


def show(title: str, rounds: Mapping[str, Sequence[Figures]]) -> None:
    """Print the medians of the rounds, and gpu-exporter's ratio to each other exporter."""
    print(title)
    print(f"{'figure':16}", *(f"{exporter:>14}" for exporter in rounds), "gpu-exporter / other")
    for field in Figures._fields:
        values = [statistics.median(getattr(figures, field) for figures in each) for each in rounds.values()]
        ratios = [f"{values[0] / value:.2f}" if value else "-" for value in values[1:]]
        print(f"{field:16}", *(f"{value:14.3f}" for value in values), *ratios)


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--soak", type=float, default=20.0, help="seconds of quiet running per round")
    parser.add_argument("--before", type=Path, help="another checkout of gpu-exporter, measured in the same run")
    options = parser.parse_args()
    nvitop = str(install_nvitop())
    peers: dict[str, Callable[[int], list[str]]] = {
        "nvitop": lambda port: [nvitop, "--bind-address", "127.0.0.1", "--port", str(port), "--interval", "1"],
        "floor": lambda port: [sys.executable, "-m", "tests.bench.floor", str(port)],
    }
    checkouts: dict[str, dict[str, str]] = {"gpu-exporter": {}}
    if options.before:
        checkouts["before"] = {"PYTHONPATH": str(options.before.resolve() / "exporter")}
    load = {"kind": "square", "low": 0.1, "high": 0.9, "period": 2 * EDGE_S}
    rounds: dict[str, list[Figures]] = {each: [] for each in (*checkouts, *peers)}
    with play([{"model": "H100", "load": load}] * GPUS) as (environment, static, feeder):
        for _ in range(options.rounds):
            for checkout, figures in measure_ours(checkouts, environment, static, options.soak, feeder).items():
                rounds[checkout].append(figures)
            for peer, command in peers.items():
                port = free_port()
                rounds[peer].append(measure(command(port), port, environment, options.soak, feeder))
        once = {
            checkout: measure_once({**environment, **path}, ["--no-attribution.slurm", "--state.directory="])
            for checkout, path in checkouts.items()
        }
    print(f"{options.rounds} rounds in turn, medians; {os.cpu_count()} cores, Python {sys.version.split()[0]}")
    show(f"{GPUS} H100 with a holder each", rounds)
    for checkout, times in once.items():
        print(
            f"{checkout} --once: p50 {times[10] * 1000:.0f} ms, p95 {times[18] * 1000:.0f} ms (nvitop-exporter has none)"
        )
    instances = [{"profile": "1g.10gb", "load": load} for _ in range(INSTANCES)]
    rounds = {checkout: [] for checkout in checkouts}
    with play([{"model": "H100", "mig": instances}] * GPUS) as (environment, static, feeder):
        for _ in range(options.rounds):
            for checkout, figures in measure_ours(checkouts, environment, static, options.soak, feeder).items():
                rounds[checkout].append(figures)
    show(f"{GPUS} H100 in {INSTANCES} MIG instances each, {GPUS * INSTANCES} holders", rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
