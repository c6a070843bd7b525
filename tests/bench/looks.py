"""What a look at the holders costs: python -m tests.bench.looks

Eight holders with real processes and threads in cgroups made of files: 1,500 processes and 4,000 threads on the node.
Prints the CPU time of a look, the time until the next one, and so the CPU time per second; and resident memory.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path, PurePosixPath

import psutil

from gpu_exporter.common.clock import ManualClock
from gpu_exporter.common.model.holders import Who
from gpu_exporter.diagnosis.host.cgroups import Cgroups
from gpu_exporter.diagnosis.host.evidence import EvidenceReader
from gpu_exporter.diagnosis.host.subject import HostSubject, RankedGpu

HOLDERS, PROCESSES, THREADS = 8, 1500, 4000
LOOKS = 12


def start_processes() -> list[int]:
    """Processes that sleep; the first ones of each holder have the threads."""
    each = (THREADS - PROCESSES) // (2 * HOLDERS)
    pids = []
    for position in range(PROCESSES):
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            if position < 2 * HOLDERS:
                threading.stack_size(65536)
                for _ in range(each):
                    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
            time.sleep(600)
            os._exit(0)
        pids.append(pid)
    return pids


def main() -> None:
    pids = start_processes()
    try:
        with tempfile.TemporaryDirectory() as temporary:
            measure(Path(temporary), pids)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for pid in pids:
            os.waitpid(pid, 0)


def measure(root: Path, pids: list[int]) -> None:
    (root / "cgroup.controllers").touch()
    places: dict[Who, PurePosixPath] = {}
    subjects = []
    for holder in range(HOLDERS):
        own = pids[holder::HOLDERS]
        place = PurePosixPath(f"job_{holder}")
        (root / place).mkdir()
        (root / place / "cgroup.procs").write_text("".join(f"{pid}\n" for pid in own))
        (root / place / "cpu.stat").write_text("usage_usec 0\n")
        places["job", str(holder)] = place
        subjects.append(HostSubject(("job", str(holder)), (RankedGpu("GPU-0", frozenset((0,)), (own[0],)),)))
    clock = ManualClock()
    before = psutil.Process().memory_info().rss
    reader = EvidenceReader(Cgroups(root), clock, 64, Path("/proc"))
    costs, waits = [], []
    for _ in range(LOOKS):
        began, at = time.thread_time(), clock.monotonic()
        list(reader.read(subjects, places))
        costs.append(time.thread_time() - began)
        waits.append(reader._due - at)
        clock.advance(waits[-1])
    cost, wait = sorted(costs)[LOOKS // 2], sorted(waits)[LOOKS // 2]
    grown = (psutil.Process().memory_info().rss - before) / 2**20
    sys.stdout.write(
        f"{PROCESSES} processes, {THREADS} threads, {HOLDERS} holders: a look costs {1e3 * cost:.1f} ms of CPU, the next "
        f"follows after {wait:.0f} s: {1e3 * cost / wait:.2f} ms per second; memory +{grown:.1f} MiB\n"
    )


if __name__ == "__main__":
    main()
