"""`gpu-exporter backtest` about many GPUs: `nice python -m tests.bench.backtest [--days 30] [--nodes 375]`.

Prints the time and the CPU time of the command and of the server, and their peak memory. 30 days of 3,000 GPUs (375
nodes) take some minutes to make and 4 GB of disk. Only the memory is held to a bound: the time is that of a machine with
other work.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
import time
from pathlib import Path

from tests.bench.report import peak_mib
from tests.testbed.history_series import dcgm, kube_state
from tests.testbed.history_servers import LARGE, prometheus, write_blocks
from tests.testbed.history_worlds import large
from tests.testbed.processes import GPU_EXPORTER, Processes

MEMORY_MIB = 1024
LEAD_DAYS = 0.25


def cpu_s(pid: int) -> float:
    """CPU time of a running process."""
    fields = Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--days", type=int, default=30)
    parser.add_argument("--nodes", type=int, default=375, help="with eight GPUs each")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, Processes(Path(name)) as processes:
        began = time.monotonic()
        cluster = large(nodes=options.nodes, days=options.days + LEAD_DAYS)
        write_blocks(Path(name), dcgm(cluster, LARGE), kube_state(cluster))
        print(f"history: {time.monotonic() - began:.0f} s", flush=True)
        server = prometheus(processes, Path(name))
        pid, output = server.running.process.pid, Path(name) / "backtest.txt"
        flags = [f"--since={options.days}d", "--until=2025-06-02T00:00Z", "--rest=0", f"--output={output}"]
        before, began = cpu_s(pid), time.monotonic()
        process = subprocess.Popen([*GPU_EXPORTER, "backtest", f"--source.prometheus={server.url}", *flags])
        _, status, usage = os.wait4(process.pid, 0)
        took, ours = time.monotonic() - began, usage.ru_maxrss / 1024
        print(f"backtest: {took:.0f} s, {usage.ru_utime + usage.ru_stime:.0f} s of CPU, {ours:.0f} MiB")
        print(f"server: {cpu_s(pid) - before:.0f} s of CPU, {peak_mib(pid):.0f} MiB, load {os.getloadavg()[0]:.1f}")
        assert status == 0 and output.stat().st_size
        print("\n".join(output.read_text("utf-8").splitlines()[:8]))
    assert ours <= MEMORY_MIB


if __name__ == "__main__":
    main()
