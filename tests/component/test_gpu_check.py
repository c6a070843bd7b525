"""`make gpu-check` is rarely run on a real GPU, so it is tested with the fake NVML library."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_exporter.agent.devices.loads import Constant
from gpu_exporter.agent.devices.nvml.recording import is_recording
from tests.gpu_check import ranges
from tests.gpu_review import as_marks, review
from tests.testbed.nvml.feeder import NvmlTable, ScenarioFeeder
from tests.testbed.nvml.scenarios import build

ROOT = Path(__file__).resolve().parents[2]


def test_gpu_check_writes_every_promised_measurement(
    nvml_environment: dict[str, str], nvml_table: NvmlTable, tmp_path: Path
) -> None:
    feeder = ScenarioFeeder(build("h100"), nvml_table)
    feeder.start()
    try:
        command = [sys.executable, "-m", "tests.gpu_check", "--seconds=1", "--no-loads", f"--out={tmp_path}"]
        done = subprocess.run(
            command, cwd=ROOT, env=nvml_environment, capture_output=True, text=True, check=False, timeout=120
        )
    finally:
        feeder.stop()
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "gpu-check.json").read_text("utf-8"))
    assert {74, 82, 138, 197, 230} <= set(report["fields"])
    assert report["gpm"] == [1, 2, 3, 5, 10, 11, 12, 13, 20, 21, 30, 40, 50, 60, 61, 166, 248, 249]
    assert all(report["rings"][name]["period_s"] > 0.1 for name in ("utilization", "encoder", "ofa"))
    assert report["hook"].startswith("not measured: ")
    assert report["once"]["status"] == 4  # the scenario's board asks for a reset
    assert report["latencies"]["nvmlDeviceGetUtilizationRates"]["p99_us"] > 0
    assert is_recording(tmp_path / "gpu-check.rec.gz")
    page = (tmp_path / "gpu-check.md").read_text("utf-8")
    assert page.startswith("# Answers of NVIDIA H100 80GB HBM3\n")
    assert "GPM ids: 1-3, 5, 10-13, 20-21, 30, 40, 50, 60-61, 166, 248-249" in page


TORCH = """
import time
float16 = uint8 = 0
class cuda:
    is_available = staticmethod(lambda: True)
    synchronize = staticmethod(lambda: None)
    class Event:
        def __init__(self, **options): pass
        def record(self): self.at = time.perf_counter()
        def synchronize(self): pass
        def elapsed_time(self, other): return 1e3 * (other.at - self.at)
def randn(*sizes, **options): return 0
def empty(*sizes, **options): return 0
def mm(a, b): time.sleep(0.001)
"""


@pytest.mark.slow
def test_gpu_check_reviews_its_loads_by_a_recording(
    nvml_environment: dict[str, str], nvml_table: NvmlTable, tmp_path: Path
) -> None:
    """The loads do nothing here, and the GPU is what the scenario says: 50 % busy throughout."""
    (tmp_path / "torch.py").write_text(TORCH, "utf-8")
    feeder = ScenarioFeeder(build("h100"), nvml_table)
    feeder.start()
    try:
        flags = ("--seconds=6", "--only=context", "--only=kernels 50%", "--only=decode", f"--out={tmp_path}")
        done = subprocess.run(
            [sys.executable, "-m", "tests.gpu_check", *flags],
            cwd=ROOT,
            env={**nvml_environment, "PYTHONPATH": f"{tmp_path}:{nvml_environment.get('PYTHONPATH', '')}"},
            capture_output=True,
            text=True,
            check=False,
            timeout=180,
        )
    finally:
        feeder.stop()
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "gpu-check.json").read_text("utf-8"))
    assert report["loads"]["decode"].startswith("TypeError: "), "a load that cannot run gives its reason"
    assert [mark["name"] for mark in report["marks"]] == ["no context", "context", "kernels 50%"]
    assert report["loads"]["kernels 50%"]["gpm"]["1"] == 50.0, "percent, as NVML has it"
    rows = review(tmp_path / "gpu-check-loads.rec.gz", as_marks(report["marks"]))
    for row in rows:
        assert row.known_s > 1.5
        assert abs(row.busy_s / row.known_s - 0.5) < 0.02
        assert row.idle_s == 0.0
        assert row.spin.run_s == 0.0
    page = (tmp_path / "gpu-check.md").read_text("utf-8")
    assert re.search(r"^\| kernels 50% \| \d+ \| 0\.500 \| 0\.0 \|", page, re.MULTILINE), page


def test_gpu_check_measures_the_work_of_a_process(nvml_environment: dict[str, str], nvml_table: NvmlTable) -> None:
    """Also if the driver lists hundreds of entries without a process."""
    feeder = ScenarioFeeder(build("h100"), nvml_table)
    feeder.pids[0], feeder.work[4711] = ((4711, ""), (4712, "")), Constant(0.25)
    feeder.work[4712] = Constant(0.5)
    nvml_table.table.devices[0].zombies = 300
    feeder.start()
    script = "; ".join(
        (
            "import json, time",
            "from tests.gpu_check import describe_share",
            "from gpu_exporter.agent.devices.nvml.backend import NvmlBackend",
            "backend = NvmlBackend()",
            "backend.open()",
            "begin = time.time()",
            "from tests.testbed.processes import wait_for",
            "device = backend.find(0)",
            "wait_for(lambda: len(device.read_utilization_samples(begin)) > 3 or None, 'a few samples')",
            "print(json.dumps(describe_share(device, 4711, begin)))",
        )
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", script], cwd=ROOT, env=nvml_environment, capture_output=True, text=True, check=False
        )
    finally:
        feeder.stop()
    found = json.loads(done.stdout or "{}")
    assert found["ratio"] == 0.25, done.stderr
    assert (found["entries"], found["entries_of_others"]) == (1, 301)
    assert found["newest_s_ago"] < 5.0
    assert found["p50_us"] > 0


def test_gpu_check_without_a_gpu_reports_the_missing_gpu(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu_check"], cwd=ROOT, env={"PATH": "/usr/bin"}, capture_output=True, text=True, check=False
    )  # fmt: skip
    assert done.returncode == 3
    assert done.stderr.startswith("gpu-check needs a GPU: ")


def test_gpu_check_prints_consecutive_numbers_as_ranges() -> None:
    assert ranges([3, 1, 2, 7, 9, 10]) == "1-3, 7, 9-10"
