"""Computes the advice for a job: how many data loaders and threads the holder should use."""

from __future__ import annotations

import math
from typing import NamedTuple

from gpu_exporter.common.report_rules import OWN_PART
from gpu_exporter.diagnosis.causes.case import CauseCase
from gpu_exporter.diagnosis.causes.inside import find_pace
from gpu_exporter.diagnosis.causes.shortage import find_cpus

GIB = 2**30
GAIN_MIN = 0.2
ENOUGH, MEAN_MIN = 2.0, 0.01


class Advice(NamedTuple):
    """One piece of advice, as a sentence. `number`: the number of workers to set; None for other advice."""

    text: str
    number: int | None = None


def find_measured(case: CauseCase) -> Advice | None:
    """Returns the advice on `num_workers` from the training loop's own measurement. None without such a measurement."""
    pace = find_pace(case)
    to_try = None if pace is None else pace.facts.get("workers_to_try")
    if pace is None or to_try is None:
        return None
    own_part = OWN_PART if pace.facts.get("iterable") else ""
    return Advice(f"set num_workers of the DataLoader to {to_try}{own_part}", int(to_try))


def propose_workers(case: CauseCase, *, adds: bool = False) -> Advice:
    """Returns the advice on `num_workers` (of PyTorch's DataLoader), limited by the free memory.

    The number: the CPUs for each process on a GPU, minus the CPUs that this process uses itself (at least one). If no
    CPU remains, the advice is to ask for more CPUs. `adds`: CPUs are free, so the number is the one that the loop has
    measured, or at least one more than now.
    """
    if adds and (measured := find_measured(case)):
        return measured
    found = find_cpus(case)
    cpus = None if found is None else found.advised
    ranks = int(max((each.ranks or 0 for each in case.seen), default=0)) or 1
    if cpus is None:
        return Advice("raise num_workers of the DataLoader")
    busy = case.average_processes(lambda each: each.rank_cores) or 1.0
    workers = math.floor(cpus / ranks) - max(1, math.ceil(busy - 0.5))
    have = math.ceil(max((each.loaders or 0 for each in case.seen), default=0) / ranks)
    if adds and found is not None:
        # At most twice the number that would fill the GPU at the present pace: each loader costs memory.
        enough = math.ceil(ENOUGH * max(have, 1) / max(case.mean or 0.0, MEAN_MIN))
        workers = max(min(workers, enough), have + 1 if found.usable - found.used >= ranks else workers)
    each_has = f"{cpus:.3g} CPUs" if ranks == 1 else f"{cpus:.3g} CPUs for {ranks} processes on GPUs"
    if found is not None and cpus < found.usable - 0.5:
        each_has = each_has.replace(" CPUs", f" of {found.usable:.3g} CPUs", 1) + ": other holders may need the rest"
    if workers < 1:
        return Advice(f"ask for more CPUs: with {each_has}, none remains for a loader")
    set_all = Advice(f"set num_workers of the DataLoader to {workers} ({each_has})", workers)
    newest = case.recent[-1]
    size = max((each.loader_bytes or 0.0 for each in case.seen), default=0.0)
    if newest.memory_limit is None or newest.memory_bytes is None or not size:
        return set_all
    used = newest.memory_bytes - (newest.memory_cache or 0.0)  # the kernel gives the page cache back
    fits = math.floor((newest.memory_limit - used) / size / ranks)
    if have + fits >= workers:
        return set_all
    if fits < 1:
        return Advice(f"ask for more memory: one more loader needs {size / GIB:.1f} GiB")
    return Advice(
        f"set num_workers of the DataLoader to {have + fits}: more do not fit, because each needs {size / GIB:.1f} GiB",
        have + fits,
    )


def count_threads(case: CauseCase) -> int:
    """Returns the number of threads that each process of the holder should have."""
    found = find_cpus(case)
    cpus = 1.0 if found is None else found.advised
    processes = max((max(1, each.ranks or 0) for each in case.seen), default=1)
    return max(1, math.floor(cpus / processes))


def propose_threads(case: CauseCase) -> str:
    return f"set OMP_NUM_THREADS={count_threads(case)} (and the thread limit of other libraries)"


def bound_gain(case: CauseCase) -> str:
    """Returns the upper limit of the gain, as text. "" at very low utilization, where this limit means nothing."""
    mean = case.mean or 0.0
    return f"at most {1.0 / mean:.1f} times, because the GPU is at {mean:.0%}" if mean >= GAIN_MIN else ""
