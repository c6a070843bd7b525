"""What the driver of this machine answers, and how fast: for a machine with a GPU, to be committed as a recording.

Reads only. Writes out/gpu-check.json: for every call that the exporter uses, what it answered (identifiers left out),
its return code, and its latency; span and period of the utilization ring; time and memory of `--once`.
"""

from __future__ import annotations

import itertools
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu_exporter.devices.errors import DeviceError, DriverUnavailable
from gpu_exporter.devices.nvml.backend import NvmlBackend, NvmlDevice

OUT = Path(__file__).resolve().parents[1] / "out" / "gpu-check.json"
REPEATS = 200


def time_call(ask: Callable[[], Any]) -> dict[str, Any]:
    """Answer or error of a call, and its latency in microseconds over REPEATS calls."""
    latencies = []
    answer: Any = None
    error = ""
    for _ in range(REPEATS):
        begin = time.perf_counter()
        try:
            answer = ask()
        except DeviceError as exc:
            error = exc.error
        latencies.append((time.perf_counter() - begin) * 1e6)
    latencies.sort()
    return {
        "answer": None if error else repr(answer),
        "error": error,
        "p50_us": round(statistics.median(latencies), 1),
        "p99_us": round(latencies[int(REPEATS * 0.99)], 1),
    }


def check_device(device: NvmlDevice) -> dict[str, Any]:
    calls = {
        name: time_call(getattr(device, name))
        for name in dir(device)
        if name.startswith("read_") and name != "read_utilization_samples"
    }
    ring = list(device.read_utilization_samples(0.0))
    steps = [later.wall - earlier.wall for earlier, later in itertools.pairwise(ring)]
    calls["read_utilization_samples"] = time_call(lambda: len(device.read_utilization_samples(time.time() - 1.0)))
    return {
        "name": device.identity.name,
        "driver_version": device.identity.driver_version,
        "mig_mode": device.identity.mig_mode,
        "calls": calls,
        "ring": {
            "entries": len(ring),
            "span_s": round(ring[-1].wall - ring[0].wall, 3) if ring else None,
            "period_s": round(statistics.median(steps), 4) if steps else None,
        },
    }


def main() -> int:
    backend = NvmlBackend()
    try:
        backend.open()
        devices = [entry.device for entry in backend.discover() if isinstance(entry.device, NvmlDevice)]
    except DriverUnavailable as exc:
        print(f"gpu-check needs a GPU: {exc}", file=sys.stderr)
        return 3
    report: dict[str, Any] = {"devices": [check_device(device) for device in devices]}
    begin = time.perf_counter()
    command = [sys.executable, "-m", "gpu_exporter", "--once", "--state.directory="]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    report["once"] = {
        "status": done.returncode,
        "seconds": round(time.perf_counter() - begin, 3),
        "peak_rss_mib": round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024, 1),
        "lines": len(done.stdout.splitlines()),
    }
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(OUT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
