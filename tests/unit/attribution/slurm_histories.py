"""What the tests of this subject share: random histories of a node, in which epilogs are late and the exporter restarts."""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.unit.attribution.slurm_silence import GPUS, PARTS, Job, Silence, SilentNode

SLOTS = 4  # of a GPU: no job has a smaller part
END = 160.0  # of the last job, in seconds since the node's start
ALL = ("sinfo", "squeue", "show")
WORDS = (ALL, ALL, ("squeue",), ("show",), ("listpids",), (*ALL, "listpids"), ("sinfo",))


class Stop(NamedTuple):
    """A stop of the exporter. `saves`: it is not killed."""

    at: float
    away_s: float
    saves: bool


class History(NamedTuple):
    """Jobs on GPUs, and the disturbances. `shared`: the kind of parts into which gres.conf divides the GPUs, "" if none."""

    jobs: list[Job]
    silences: list[Silence]
    stops: list[Stop]
    shared: str = ""


def draw(seed: int, *, late: bool, disturbed: bool) -> History:
    """Whole GPUs. `late`: one epilog in three runs 3 to 20 s after the last step. `disturbed`: with silences and stops."""
    dice = random.Random(seed)
    free = [dice.uniform(1.0, 20.0) for _ in range(GPUS)]
    jobs, runs, back = list[Job](), Counter[int](), list[tuple[float, int]]()
    while min(free) < END - 30.0:
        gpu = free.index(min(free))
        begin = free[gpu]
        end = min(begin + 2.0 * 50.0 ** dice.random(), END)
        late_s = dice.uniform(3.0, 20.0) if late and dice.random() < 0.35 else 0.1
        again = next((entry for entry in back if entry[0] < begin and dice.random() < 0.7), None)
        if again is not None:
            back.remove(again)
            runs[again[1]] += 1
        number = again[1] if again is not None else len(runs) + 1
        runs[number] += 0
        jobs.append(Job(number, begin, end, "whole", dice.choice((1, 1, 1, 2)), late_s, gpu, runs[number]))
        if dice.random() < 0.15:
            back.append((end + late_s + 1.0, number))  # requeued
        free[gpu] = end + dice.choice((dice.uniform(0.05, 0.6), dice.uniform(0.05, 0.6), dice.uniform(1.0, 25.0)))
    return History(jobs, *_disturb(dice, disturbed=disturbed))


def draw_parts(seed: int, *, late: bool, disturbed: bool, shared: str = "shard") -> History:
    """As `draw`, but jobs have parts of GPUs at the same time, and one in five a whole GPU."""
    dice, jobs = random.Random(seed), list[Job]()
    free = {(gpu, slot): dice.uniform(1.0, 20.0) for gpu in range(GPUS) for slot in range(SLOTS)}
    while min(free.values()) < END - 30.0:
        gpu = min(free, key=lambda each: free[each])[0]
        is_whole = dice.random() < 0.2
        slots = sorted((each for each in free if each[0] == gpu), key=lambda each: free[each])
        slots = slots[: SLOTS if is_whole else dice.choice((1, 1, 1, 2, SLOTS))]
        begin = max(free[each] for each in slots)
        end = min(begin + 2.0 * 50.0 ** dice.random(), max(END, begin + 2.0))
        late_s = dice.uniform(3.0, 20.0) if late and dice.random() < 0.35 else 0.1
        kind, parts = "whole" if is_whole else shared, PARTS // SLOTS * len(slots)
        jobs.append(Job(len(jobs) + 1, begin, end, kind, dice.choice((1, 1, 1, 2)), late_s, gpu, parts=parts))
        for each in slots:
            free[each] = end + dice.choice((dice.uniform(0.05, 0.6), dice.uniform(1.0, 25.0)))
    return History(jobs, *_disturb(dice, disturbed=disturbed), shared)


def _disturb(dice: random.Random, *, disturbed: bool) -> tuple[list[Silence], list[Stop]]:
    silences, stops, at = list[Silence](), list[Stop](), 0.0
    for _ in range(dice.choice((1, 1, 2, 3)) if disturbed else 0):
        begin, end = at + dice.uniform(5.0, 50.0), dice.uniform(5.0, 45.0)
        silences.append(Silence(begin, begin + end, dice.choice(WORDS), refuses=dice.random() < 0.4))
        at = begin + end
    at = 25.0
    for _ in range(dice.choice((1, 1, 2, 3)) if disturbed else 0):
        away_s = dice.choice((dice.uniform(0.3, 3.0), dice.uniform(3.0, 30.0)))
        stops.append(Stop(at + dice.uniform(3.0, 50.0), away_s, saves=dice.random() < 0.5))
        at = stops[-1].at + away_s
    return silences, stops


class Wrong(NamedTuple):
    """By user: the GPU-seconds above what is true, and below it. `missed`: the number of jobs that count as missed."""

    over: dict[str, float]
    under: dict[str, float]
    missed: int


def compare(directory: Path, history: History) -> Wrong:
    """Lets the history happen, and compares each run's GPU-seconds with the least and the most that are true."""
    node = SilentNode(directory, history.jobs, history.silences, history.shared)
    for stop in history.stops:
        node.run_until(stop.at)
        node.stop(saves=stop.saves)
        node.clock.advance(stop.away_s)
        node.start()
    node.run_until(END + 150.0)
    held, missed = node.held(), node.missed
    least, most = bound(history.jobs, node.spans)
    node.stop(saves=False)
    over = {job.user: s for job in history.jobs if (s := held.get(job.user, 0.0) - most[job.user]) > 1.1}
    under = {job.user: s for job in history.jobs if (s := least[job.user] - held.get(job.user, 0.0)) > 1.1}
    return Wrong(over, under, missed)


def bound(jobs: Sequence[Job], spans: Mapping[str, tuple[int, int]]) -> tuple[Counter[str], Counter[str]]:
    """Returns the least and the most GPU-seconds of each run. A job has its part of a GPU at least to its last step, and at
    most to its epilog, or to the next job that has the whole GPU. The jobs of a GPU share each of its seconds equally.
    Dates are whole seconds. `spans`: as in SilentNode.
    """
    least, most = Counter[str](), Counter[str]()
    for gpu in range(GPUS):
        there, maybe = defaultdict[int, list[str]](list), defaultdict[int, list[str]](list)
        for job in (job for job in jobs if job.gpu == gpu):
            begin, end = spans[job.user]
            nexts = (
                spans[each.user][0]
                for each in jobs
                if each.gpu == gpu and each.begin > job.begin and each.kind == "whole"
            )
            last, end = begin - math.floor(job.begin) + math.floor(job.end), min([end, *nexts])
            for second in range(begin, end):
                maybe[second].append(job.user)
                if second < last:
                    there[second].append(job.user)
        for second, users in maybe.items():
            least += Counter({user: 1.0 / len(users) for user in there[second]})
            most += Counter({user: 1.0 / len({*there[second], user}) for user in users})
    return least, most
