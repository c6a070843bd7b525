"""What the tests of this subject share: random histories of a node, in which epilogs are late and the exporter restarts."""

from __future__ import annotations

import math
import random
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from tests.unit.attribution.slurm_silence import GPUS, Job, Silence, SilentNode

END = 160.0  # of the last job, in seconds since the node's start
ALL = ("sinfo", "squeue", "show")
WORDS = (ALL, ALL, ("squeue",), ("show",), ("listpids",), (*ALL, "listpids"), ("sinfo",))


class Stop(NamedTuple):
    """A stop of the exporter. `saves`: it is not killed."""

    at: float
    away_s: float
    saves: bool


class History(NamedTuple):
    """Jobs on whole GPUs, one after the other, and the disturbances."""

    jobs: list[Job]
    silences: list[Silence]
    stops: list[Stop]


def draw(seed: int, *, late: bool, disturbed: bool) -> History:
    """`late`: one epilog in three runs 3 to 20 s after the last step. `disturbed`: with silences and stops."""
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
    return History(jobs, silences, stops)


class Wrong(NamedTuple):
    """By user: the GPU-seconds above what is true, and below it. `missed`: the number of jobs that count as missed."""

    over: dict[str, float]
    under: dict[str, float]
    missed: int


def compare(directory: Path, history: History) -> Wrong:
    """Lets the history happen. A job has its GPU at least to its last step, and at most to its epilog, or to the next job.
    Dates are whole seconds.
    """
    node = SilentNode(directory, history.jobs, history.silences)
    for stop in history.stops:
        node.run_until(stop.at)
        node.stop(saves=stop.saves)
        node.clock.advance(stop.away_s)
        node.start()
    node.run_until(END + 120.0)
    held, missed, over, under = node.held(), node.missed, dict[str, float](), dict[str, float]()
    for job in history.jobs:
        begin, end = node.spans[job.user]
        nexts = [
            node.spans[other.user][0] for other in history.jobs if other.gpu == job.gpu and other.begin > job.begin
        ]
        last = math.floor(node.spans[job.user][0] - math.floor(job.begin) + job.end)
        over[job.user] = held.get(job.user, 0.0) - (min([end, *nexts]) - begin)
        under[job.user] = min([last, end, *nexts]) - begin - held.get(job.user, 0.0)
    node.stop(saves=False)
    over, under = ({user: s for user, s in each.items() if s > 1.1} for each in (over, under))
    return Wrong(over, under, missed)
