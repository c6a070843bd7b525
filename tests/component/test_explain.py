"""`explain` from a real Prometheus: the first line has the state, the cause with its numbers, and what to change."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from tests.testbed.pages import serve_page
from tests.testbed.processes import Processes, run_exporter, wait_for
from tests.testbed.servers import Prometheus

pytestmark = pytest.mark.servers
PAGE = Path(__file__).resolve().parents[1] / "golden" / "demo.prom"
FIRST_LINES = {
    "job/48121": "96 threads are runnable on 4 CPUs; to change: set OMP_NUM_THREADS=4",
    "vision/augment-2": "few processes load its data, and 6.6 CPUs are free; to change: set num_workers of the DataLoader to 5",
    "job 48077": "no progress for 25m on 1 of its 2 GPUs on the node; to change: look at the rank whose GPU is at 0 % first: its last log line",
    "48113": "the holder has no process on the GPU, and uses 0 CPUs; to change: end the job if its work is done",
}


def render() -> str:
    """The demo's page, sampled now."""
    return re.sub(
        r"(?m)^(gpu_exporter_last_sample_timestamp_seconds) .*$", rf"\1 {time.time()}", PAGE.read_text("utf-8")
    )


def test_the_first_line_from_prometheus_alone_has_the_cause_and_what_to_change(
    processes: Processes, tmp_path: Path
) -> None:
    with serve_page(render) as place:
        prometheus = Prometheus(processes, tmp_path / "prometheus", {"n1": place})
        wait_for(lambda: prometheus.query("gpu_allocation_cause_value") or None, "the causes")
        for holder, said in FIRST_LINES.items():
            done = run_exporter("explain", *holder.split(), f"--source.prometheus={prometheus.url}")
            first = done.stdout.partition("\n")[0]
            assert said in first, done.stdout + done.stderr
            assert len(first) < 360
