"""`gpu-exporter report` about seven days of 3,000 GPUs: `nice python -m tests.bench.report [--program prometheus-3]`.

Prints the time, the peak memory of the command and of the server, and the differences from the truth. The first run
makes the history, which takes minutes and is kept. The memory is held to its bound; the time only loosely, because it is
that of a machine with other work.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import tempfile
import time
from pathlib import Path

from tests.testbed.history_servers import large_history, prometheus
from tests.testbed.history_worlds import large
from tests.testbed.processes import GPU_EXPORTER, Processes

MEMORY_MIB = 300
PATIENCE_S = 1200.0


def peak_mib(pid: int) -> float:
    """The largest memory of a running process."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text("ascii"))
    assert found is not None
    return int(found[1]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--program", default="prometheus", help="prometheus or prometheus-3")
    program = parser.parse_args().program
    truth = large().truth().total()
    with tempfile.TemporaryDirectory() as name, Processes(Path(name)) as processes:
        began = time.monotonic()
        large_history(Path(name))
        print(f"history: {time.monotonic() - began:.0f} s")
        server = prometheus(processes, Path(name), program)
        command = [*GPU_EXPORTER, "report", f"--source.prometheus={server.url}", "--until=2025-06-02T00:00Z"]
        flags = ["--format=json", "--no-trend", "--rest=0"]
        began = time.monotonic()
        with subprocess.Popen([*command, *flags], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            text = process.stdout.read()
            _, status, usage = os.wait4(process.pid, 0)
        took, ours = time.monotonic() - began, usage.ru_maxrss / 1024
        print(f"report: {took:.0f} s, {usage.ru_utime + usage.ru_stime:.0f} s of CPU, {ours:.0f} MiB")
        print(f"server: {peak_mib(server.running.process.pid):.0f} MiB, load {os.getloadavg()[0]:.1f}")
    total = json.loads(text)["total"]
    found = {
        "held": (total["held_hours"], truth.held - truth.unseen),
        "used and low": (total["used_hours"] + total["low_hours"], truth.used + truth.low),
        "idle, also unproven": (total["idle_hours"] + total["unproven_hours"], truth.idle),
    }
    for what, (hours, true) in found.items():
        print(f"{what}: {hours:,.0f} GPU-hours, truth {true:,.0f} ({hours / true - 1:+.2%})")
        assert abs(hours / true - 1) < 0.02
    assert status == 0
    assert ours <= MEMORY_MIB
    assert took < PATIENCE_S


if __name__ == "__main__":
    main()
