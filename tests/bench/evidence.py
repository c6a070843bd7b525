"""The reconciler's dry run against a real Prometheus with the data of a large site: time, memory, queries.

DESIGN requires ten seconds and 300 MiB at 100,000 allocations. A quarter of them is idle; half are pods, and half are
Slurm jobs. Each has a sample of every series now, and of its counters two hours ago. The reconciler reads only idle
allocations over a window; these have `--samples` samples within it: 120 is one per minute. Pods have their counters of a
week ago, from which pods that could share are found; `--servers` of them have all of that week, every five minutes.

    python -m tests.bench.evidence [--allocations 100000] [--idle 0.25] [--samples 120] [--servers 200] [--rounds 3]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.testbed.processes import GPU_EXPORTER, Processes
from tests.testbed.servers import Prometheus

NODE = 'job="gpu-exporter",node="n{0}",instance="n{0}"'
HELD_S = 700_000.0
WINDOW_S = 7200
WEEK_S, WEEK_STEP_S = 7 * 86_400, 300


def write_history(path: Path, allocations: int, idle: float, samples: int, servers: int, end: int) -> None:
    """Write OpenMetrics text, with all rows of a family together."""
    every = max(1, round(1 / idle)) if idle else 0

    def labels(i: int) -> str:
        place = NODE.format(i // 8)
        unit = f'gpu="{i % 8}",uuid="GPU-{i:08x}-0000-4000-8000-000000000000"'
        if i % 2:
            return f'{place},{unit},scheduler="slurm",job_id="{4_000_000 + i}"'
        pod = f'namespace="team-{i % 97}",pod="train-{i:06d}-7d9c5b8f4d-x2x9p",container="main"'
        return f'{place},{unit},scheduler="kubernetes",{pod}'

    def week(i: int) -> list[int]:
        """Seconds before the end, the earliest first."""
        return [*range(WEEK_S + WEEK_STEP_S, 0, -WEEK_STEP_S), 0] if i < 2 * servers else [WEEK_S, 0]

    def rows(name: str) -> Iterator[str]:
        for i in range(allocations):
            mine = labels(i)
            is_idle = bool(every) and i % every in (0, 1) and i % (2 * every) in (0, 1 + every)
            if name == "info":
                yield f'gpu_allocation_info{{{mine},pod_uid="uid-{i}",user="u{i % 500}",account="a{i % 40}"}} 1 {end}'
            elif name in ("busy_seconds_total", "share_ratio"):
                if i % 2:
                    continue
                if name == "share_ratio":
                    yield f"gpu_allocation_{name}{{{mine}}} 1 {end}"
                    continue
                ratio = 0.05 if i < 2 * servers else 0.5
                for before in week(i):
                    yield f"gpu_allocation_{name}{{{mine}}} {ratio * (HELD_S - before)} {end - before}"
            elif name.endswith("total"):
                if name == "observed_seconds_total" and i % 2 == 0:
                    for before in week(i)[:-1]:
                        if before > WINDOW_S:
                            yield f"gpu_allocation_{name}{{{mine}}} {HELD_S - before} {end - before}"
                parts = samples if is_idle else 1
                for part in range(parts + 1):
                    before = WINDOW_S * (parts - part) // parts
                    yield f"gpu_allocation_{name}{{{mine}}} {HELD_S - before} {end - before}"
            else:
                value = {
                    "idle_run_seconds": 9000.0 if is_idle else 20.0,
                    "idle_run_witnesses": 7,
                    "start_timestamp_seconds": end - HELD_S,
                    "holder_units": 1,
                    "host_activity_ratio": 0.05 if is_idle and i % 10 else 0.6,
                    "host_io_bytes_per_second": 1e5,
                }[name]
                yield f"gpu_allocation_{name}{{{mine}}} {value} {end}"

    with path.open("w", encoding="utf-8") as out:
        for name in (
            "busy_seconds_total",
            "held_seconds_total",
            "holder_units",
            "host_activity_ratio",
            "host_io_bytes_per_second",
            "idle_run_seconds",
            "idle_run_witnesses",
            "info",
            "observed_seconds_total",
            "share_ratio",
            "start_timestamp_seconds",
        ):
            out.writelines(f"{row}\n" for row in rows(name))
        for name, value in (("build_info", 1), ("last_sample_timestamp_seconds", end), ("sample_interval_seconds", 1)):
            for node in range((allocations + 7) // 8):
                out.write(f"gpu_exporter_{name}{{{NODE.format(node)}}} {value} {end}\n")
        out.write("# EOF\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--allocations", type=int, default=100_000)
    parser.add_argument("--idle", type=float, default=0.25)
    parser.add_argument("--samples", type=int, default=120)
    parser.add_argument("--servers", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, Processes(Path(name)) as processes:
        directory = Path(name)
        end = int(time.time())
        write_history(
            directory / "history.txt", options.allocations, options.idle, options.samples, options.servers, end
        )
        # In one block: for each block of two hours promtool would read the whole text again.
        promtool = ["promtool", "tsdb", "create-blocks-from", "--max-block-duration=240h", "openmetrics"]
        source = [str(directory / "history.txt"), str(directory / "data")]
        subprocess.run([*promtool, *source], check=True, stdout=subprocess.DEVNULL)
        prometheus = Prometheus(processes, directory, {})
        (directory / "config.yaml").write_text("alerts: {fresh_max: 1h}\npolicy: {fresh_min: 50m}\n", encoding="utf-8")
        took: list[float] = []
        for _ in range(options.rounds):
            began = time.monotonic()
            process = subprocess.Popen(
                [
                    *GPU_EXPORTER,
                    "reconcile",
                    "--once",
                    "--no-kubernetes",
                    "--no-slurm",
                    "--format=json",
                    f"--config.file={directory / 'config.yaml'}",
                    f"--source.prometheus={prometheus.url}",
                ],
                stdout=(directory / "out.json").open("w"),
            )
            _, status, usage = os.wait4(process.pid, 0)
            took.append(time.monotonic() - began)
            text = (directory / "out.json").read_text("utf-8")
            found, shared = text.count("underused"), text.count('"stage": "active"')
            print(
                f"exit {os.waitstatus_to_exitcode(status)}, {took[-1]:.1f} s, {usage.ru_maxrss / 1024:.0f} MiB, "
                f"{usage.ru_utime + usage.ru_stime:.1f} s of CPU, {found} texts with underused, {shared} could share"
            )
        print(
            f"{options.allocations} allocations, {options.idle:.0%} idle: median {statistics.median(took):.1f} s; "
            "all of reading, deciding and printing"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
