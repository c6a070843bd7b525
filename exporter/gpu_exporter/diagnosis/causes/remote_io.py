"""The holder waits for files on a network file system."""

from __future__ import annotations

from gpu_exporter.common.model.causes import HIGH, LOW, MEDIUM, Cause, numbers
from gpu_exporter.diagnosis.causes.case import WITH_PROCESS, CauseCase, Needs, need, rule
from gpu_exporter.diagnosis.causes.shortage import find_short_of_cpu

FILES = Needs("the right to trace processes, for their open files (causes.files)")
PRESSURE = 0.2  # share of the time (PSI)
READS = 1e6  # bytes per second


@rule(
    states=WITH_PROCESS,
    needs=(
        "mounted network file systems, and processes that wait for I/O; with `causes.files` also open files and bytes"
        " read"
    ),
    against="open files are not visible; the holder reads few bytes",
)
def judge(case: CauseCase) -> Cause | Needs | None:
    if not case.seen:
        return need(case)
    blocked = case.average_processes(lambda each: float(each.blocked)) or 0.0
    kinds = case.recent[-1].network_files or ()
    if not kinds or find_short_of_cpu(case):
        return None
    files = [each.files for each in case.recent if each.files is not None]
    pressure = case.average(lambda each: each.pressure_io) or 0.0
    waits = f"{blocked:.1f} of its processes wait for a disk or a network file system" if blocked >= 0.5 else ""
    waits = waits or (f"its tasks waited for files {pressure:.0%} of the time" if pressure >= PRESSURE else "")
    if not files:
        if not waits:
            return FILES
        against = "they may wait for a local disk: without the right to trace them, their open files are hidden"
        return Cause("remote_io", LOW, f"{waits}; it has mounted {', '.join(kinds)}", against)
    network = [kind for kind in kinds if kind != "fuse"]  # a FUSE file system may be local, such as a container's image
    remote, rate = files[-1].remote_files, sum(each.read_bytes for each in files) / len(files)
    if not network or not remote or remote < files[-1].local_files or not waits:
        return None
    return Cause(
        "remote_io",
        HIGH if rate >= READS else MEDIUM,
        f"{waits}; {remote} of its open files are on {', '.join(network)}, and it reads {rate / 1e6:.1f} MB/s",
        against="" if rate >= READS else "it reads little, so it may wait for something else",
        values=numbers(read_bytes_per_second=rate),
    )
