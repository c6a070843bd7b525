"""One or a few loaders work without a pause while CPUs of the holder are free."""

from __future__ import annotations

import math

from gpu_exporter.common.model.causes import HIGH, LOW, MEDIUM, Cause, numbers
from gpu_exporter.common.report_rules import bound_gain as bound_share
from gpu_exporter.diagnosis.causes.advice import bound_gain, find_measured, propose_workers
from gpu_exporter.diagnosis.causes.case import CauseCase, Needs, need, rule
from gpu_exporter.diagnosis.causes.cpu_oversubscribed import MORE_THAN
from gpu_exporter.diagnosis.causes.inside import describe_wait, find_pace
from gpu_exporter.diagnosis.causes.shortage import NOBODY, find_cpus, find_short_of_cpu

MOST = 0.75  # share of the loaders that work: if the others wait, loaders are not the limit
ONE = "one process that does not use the GPU uses a whole CPU"
REPORTED = "only the loop's report shows that these are loaders: before torch 2.5, they have no name"
PACED = "loaders that wait for a source with its own pace, such as a camera, look the same"
NAMELESS = "these may be other processes: only loaders of torch 2.5 and newer have a name"
THREADED = 1.2  # CPUs of each loader: one that uses more has threads, so a whole CPU does not show that it is full
STREAMS = 5e6  # bytes per second, from disks or the network, that loaders may wait for
COMPUTES = 3.0  # CPUs: a process on the GPU that uses more computes by itself
READS = 1e6  # bytes per second: a process that reads more probably loads its samples itself


@rule(
    states=frozenset(("low", "bursty")),
    needs="the CPU time of each process, and CPUs that are free",
    against=(
        "the confidence is low if no process has the name of a loader (torch 2.5 and newer), if loaders pause, or if"
        " a loop without loaders hardly reads. A reported wait for data can raise it"
    ),
)
def judge(case: CauseCase) -> Cause | Needs | None:
    seen, measured = _judge_host(case), _judge_measured(case)
    if isinstance(seen, Cause) and seen.confidence != LOW:
        return seen
    if measured is None or _is_out_of_cpus(case):
        return seen
    return measured


def _is_out_of_cpus(case: CauseCase) -> bool:
    cpus = find_cpus(case)
    return cpus is not None and (cpus.is_full or find_short_of_cpu(case) != NOBODY)


def _judge_measured(case: CauseCase) -> Cause | None:
    """Returns the cause with the number of workers to try. None if the loop has not measured its time per batch."""
    pace, advice = find_pace(case), find_measured(case)
    if pace is None or advice is None or pace.wait is None or pace.wait < case.rules.wait_min:
        return None
    is_long = pace.wait >= case.rules.wait_high
    return Cause(
        "too_few_workers",
        LOW if not is_long else HIGH if pace.is_gpu else MEDIUM,
        describe_wait(pace) + (f"; {pace.late}" if pace.late else ""),
        "" if pace.is_gpu else "the wait was not measured on the GPU, so the GPU may work during this time",
        advice.text,
        gain=bound_share(pace.wait),
        values=numbers(workers_to_try=advice.number),
    )


def _judge_host(case: CauseCase) -> Cause | Needs | None:
    rank, cpus = case.average_processes(lambda each: each.rank_cores), find_cpus(case)
    if rank is None or cpus is None:
        return need(case)
    free = cpus.usable - cpus.used
    if free < case.rules.free_cpus or cpus.is_full or find_short_of_cpu(case):
        return None
    if (case.runnable or 0.0) >= cpus.usable + MORE_THAN:
        return None  # these threads want the free CPUs
    full = case.average_processes(lambda each: float(each.full_loaders)) or 0.0
    busy = case.average_processes(lambda each: float(each.busy_loaders)) or 0.0
    pace, number = find_pace(case), max((each.loaders or 0 for each in case.seen), default=0)
    waits = pace is not None and (pace.wait or 0.0) >= case.rules.wait_min
    measures = pace is not None and "num_workers" in pace.facts
    if full >= MOST * max(1.0, busy) and rank < case.rules.full_ratio:
        if (case.average_processes(lambda each: each.loader_cores) or 0.0) > THREADED * max(1.0, busy):
            return None
        loads = case.has_loaders or waits
        if not loads:  # a server's front end, environments, a tokenizer
            some = f"of the {number} processes that do not use the GPU, {full:.0f} use a whole CPU each"
            said = f"{some if number > 1 else ONE}; {free:.1f} of {cpus.usable:.3g} CPUs are free"
            return Cause("too_few_workers", LOW, said, NAMELESS, advice="")
        confidence, against = (HIGH, "") if case.has_loaders else (MEDIUM, REPORTED)
        what = f"{full:.0f} of {number} loaders never wait" if number > 1 else "its only loader never waits"
    elif case.has_loaders and busy < MOST:
        return _judge_waiting(case, number)
    elif case.has_loaders and waits and not measures and rank < case.rules.full_ratio:
        # The queue is empty, so no loader waits for the loop.
        confidence, against = LOW, PACED
        what = f"{busy:.0f} of its {number} loaders work, and pause at times"
    elif case.rules.full_ratio <= rank <= COMPUTES and busy < MOST:
        moved = _count_read(case)
        confidence = MEDIUM if moved >= READS else LOW
        against = "a loop that starts many small kernels, or waits for each of them, looks the same from outside"
        what = f"no loader, the process on the GPU uses {rank:.0%} of a CPU and reads {moved / 1e6:.0f} MB/s"
    else:
        return None
    advice = propose_workers(case, adds=True)
    return Cause(
        "too_few_workers",
        confidence,
        f"{what}; {free:.1f} of {cpus.usable:.3g} CPUs are free",
        against,
        advice.text,
        gain=bound_gain(case),
        values=numbers(free_cpus=free, workers_to_try=advice.number),
    )


def _count_read(case: CauseCase) -> float:
    """Returns the bytes per second that the holder reads: the larger of disk traffic and read calls."""
    files = case.recent[-1].files
    return max(case.average(lambda each: each.read) or 0.0, files.read_bytes if files is not None else 0.0)


def _judge_waiting(case: CauseCase, number: int) -> Cause | None:
    """Returns the cause for loaders that use hardly any CPU. They wait for files or for the loop: both look alike."""
    moved = max(_count_read(case), case.average(lambda each: each.received) or 0.0)
    if moved < STREAMS:
        return None
    ranks = max((each.ranks or 0 for each in case.seen), default=0) or 1
    return Cause(
        "too_few_workers",
        LOW,
        f"its {number} loaders mostly wait, while {moved / 1e6:.0f} MB/s arrive",
        "loaders that wait for the loop look the same, and the data may be gradients",
        measured.text
        if (measured := find_measured(case)) is not None
        else f"set num_workers of the DataLoader to {2 * math.ceil(number / ranks)}: loaders that wait need no CPU",
    )
