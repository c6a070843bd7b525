"""The holder is young, its GPU has not worked yet, and it uses CPUs or moves data: it installs, downloads or starts."""

from __future__ import annotations

from gpu_exporter.common.durations import describe_duration
from gpu_exporter.common.model.causes import HIGH, MEDIUM, Cause, numbers
from gpu_exporter.diagnosis.causes.case import IDLE, CauseCase, Needs, need, rule

LONG_S = 1200.0  # MaxInitializationTime of SageMaker Debugger
CORES, BYTES = 0.5, 1e6  # CPUs, bytes per second: a program that uses less only waits


def is_at_work(case: CauseCase) -> bool:
    """Returns whether the holder uses CPUs, or moves data."""
    return (case.average(lambda each: each.cores) or 0.0) >= CORES or _moved(case) >= BYTES


def is_new(case: CauseCase) -> bool:
    """Returns whether the holder is new, and its GPU has certainly never worked."""
    return case.worked is False and case.held_s <= case.rules.start_max


def _moved(case: CauseCase) -> float:
    rates = (case.average(lambda each: each.read), case.average(lambda each: each.written))
    return sum(rate or 0.0 for rate in (*rates, case.average(lambda each: each.received)))


@rule(
    states=IDLE | {"unknown"},
    needs="the age of the holder, no work on its GPU so far, and its use of CPUs, disks and network",
    against="a start of more than 20 minutes is rare",
)
def judge(case: CauseCase) -> Cause | Needs | None:
    if not is_new(case):
        return None
    if not case.recent:
        return need(case)
    if not is_at_work(case):
        return None
    cores, moved = case.average(lambda each: each.cores) or 0.0, _moved(case)
    long = case.held_s > LONG_S
    return Cause(
        "starting",
        MEDIUM if long else HIGH,
        f"held for {describe_duration(case.held_s)}; the GPU has not worked yet, but the holder uses "
        f"{cores:.1f} CPUs and moves {moved / 1e6:.0f} MB/s",
        against="starts of jobs are rarely longer than 20 min" if long else "",
        values=numbers(held_seconds=case.held_s, used_cpus=cores),
    )
