"""The first minute and a quarter of two real recordings, at speed 1, as two GPUs of one node, through a real Prometheus."""

from __future__ import annotations

import datetime
import gzip
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.testbed.processes import Processes, wait_for
from tests.testbed.servers import Prometheus

ROOT = Path(__file__).resolve().parents[2]
RECORDINGS = [
    ROOT / "tests" / "fixtures" / "recordings" / f"{gpu}_update_freq_gpudata.csv.gz" for gpu in ("A100", "V100")
]
LENGTH_S = 75.0

pytestmark = [pytest.mark.servers, pytest.mark.realtime]


def cut(path: Path, directory: Path) -> Path:
    """The beginning of a recording."""
    with gzip.open(path, "rt") as file:
        head, *rows = file
    times = [datetime.datetime.strptime(row.partition(",")[0], "%Y/%m/%d %H:%M:%S.%f") for row in rows]
    kept = [row for row, at in zip(rows, times, strict=True) if (at - times[0]).total_seconds() <= LENGTH_S]
    copy = directory / path.name
    with gzip.open(copy, "wt") as file:
        file.writelines([head, *kept])
    return copy


def test_mean_utilization_and_power_equal_the_recordings(processes: Processes, tmp_path: Path) -> None:
    truth = []
    recordings = [cut(path, tmp_path) for path in RECORDINGS]
    for path in recordings:
        script = ROOT / "tests" / "testbed" / "recording_truth.py"
        done = subprocess.run([sys.executable, str(script), str(path)], capture_output=True, text=True, check=True)
        utilization, power = map(float, done.stdout.split())
        truth.append((utilization, power))
    flags = [f"--devices.replay={path}" for path in recordings]
    _, url = processes.start_exporter(*flags, "--no-attribution.slurm", "--no-attribution.kubelet")
    prometheus = Prometheus(processes, tmp_path / "prometheus", {"n1": url.removeprefix("http://")})
    started = time.monotonic()

    def is_over() -> bool:
        rows = prometheus.query("rate(gpu_observed_seconds_total[5s])")
        return time.monotonic() - started > LENGTH_S - 15 and len(rows) == 2 and all(value == 0.0 for _, value in rows)

    wait_for(is_over, "both recordings to end", LENGTH_S + 60, 1.0)
    for index, (utilization, power) in enumerate(truth):
        gpu = f'gpu="{index}"'
        (mean,) = prometheus.query(f"gpu_busy_seconds_total{{{gpu}}} / gpu_observed_seconds_total{{{gpu}}}")
        (watts,) = prometheus.query(f"gpu_energy_joules_total{{{gpu}}} / gpu_observed_seconds_total{{{gpu}}}")
        (observed,) = prometheus.query(f"gpu_observed_seconds_total{{{gpu}}}")
        print(
            f"gpu {index}: utilization {mean[1]:.4f} of {utilization:.4f}, power {watts[1]:.2f} W of {power:.2f} W, "
            f"observed {observed[1]:.1f} s"
        )
        assert mean[1] == pytest.approx(utilization, abs=0.01)
        assert watts[1] == pytest.approx(power, rel=0.01)
        assert observed[1] == pytest.approx(LENGTH_S, abs=2.5)
