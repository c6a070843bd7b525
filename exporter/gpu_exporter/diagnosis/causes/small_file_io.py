"""The holder reads its data in many small pieces."""

from __future__ import annotations

from gpu_exporter.common.model.causes import HIGH, LOW, MEDIUM, Cause, numbers
from gpu_exporter.diagnosis.causes.case import CauseCase, Needs, need, rule
from gpu_exporter.diagnosis.causes.remote_io import FILES


@rule(
    states=frozenset(("low", "bursty")),
    needs="the number and size of read calls (`causes.files`)",
    against="no process waits, so the reads are perhaps from pipes or the page cache (low confidence)",
)
def judge(case: CauseCase) -> Cause | Needs | None:
    if not case.seen:
        return need(case)
    files = [each.files for each in case.recent if each.files is not None]
    if not files:
        return FILES
    reads = sum(each.reads for each in files) / len(files)
    size = sum(each.read_bytes for each in files) / len(files) / reads if reads else 0.0
    rules = case.rules
    if reads < rules.reads_min or size > rules.read_small:
        return None
    blocked = case.average_processes(lambda each: float(each.blocked)) or 0.0
    waits = blocked >= 0.5
    return Cause(
        "small_file_io",
        (HIGH if size <= rules.read_tiny else MEDIUM) if waits else LOW,
        f"{reads:.0f} reads a second of {size / 1024:.1f} KiB on average",
        against="" if waits else "no process waited: the reads may be from pipes or the page cache",
        gain="up to 19 % more bandwidth by staging small files (tf-Darshan)",
        values=numbers(reads_per_second=reads, read_bytes=size),
    )
