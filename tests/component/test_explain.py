"""`explain` from a real Prometheus: the first line has the state, the cause with its numbers, and what to change."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tests.testbed.processes import Processes, run_exporter, wait_for
from tests.testbed.servers import Prometheus

pytestmark = pytest.mark.servers
PAGE = Path(__file__).resolve().parents[1] / "golden" / "demo.prom"
FIRST_LINES = {
    "job/48121": "96 threads are runnable on 4 CPUs; to change: set OMP_NUM_THREADS=4",
    "vision/augment-2": "few processes load its data, and 6.6 CPUs are free; to change: set num_workers of the DataLoader to 5",
    "job 48077": "no progress for 25m on 1 of its 2 GPUs on the node; to change: look at the rank at 0 % first: its last log line",
    "48113": "the holder has no process on the GPU, and uses 0 CPUs; to change: end the job if its work is done",
}


class _Page(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = PAGE.read_bytes()
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_the_first_line_from_prometheus_alone_has_the_cause_and_what_to_change(
    processes: Processes, tmp_path: Path
) -> None:
    server = HTTPServer(("127.0.0.1", 0), _Page)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    prometheus = Prometheus(processes, tmp_path / "prometheus", {"n1": f"127.0.0.1:{server.server_address[1]}"})
    wait_for(lambda: prometheus.query("gpu_allocation_cause_value") or None, "the causes")
    for holder, said in FIRST_LINES.items():
        done = run_exporter("explain", *holder.split(), f"--source.prometheus={prometheus.url}")
        first = done.stdout.partition("\n")[0]
        assert said in first, done.stdout + done.stderr
        assert len(first) < 360
    server.shutdown()
    server.server_close()
