"""How often the search for stalls is wrong, over simulated years of GPUs: `python -m tests.bench.stalls --days 2000`.

Jobs of random length go through random published levels (devices/levels.py), each board with its own error of up to
5 %. Some jobs hang, and the exporter restarts, misses time and loses its view of the host. A report of medium or high
confidence is false unless the job hangs at that moment. The seed is printed.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from typing import NamedTuple

from gpu_exporter.agent.devices.levels import Level
from tests.testbed.spins import BLIND, QUIET, Host, Stage, Trace

DAY_S = 86400.0
NAMED_S = 1200.0
# By model: levels of healthy work, and of hangs that the rule can find. "llm" draws 80 to 140 W and wobbles.
HEALTHY: dict[str, tuple[str | Level, ...]] = {
    "H100": ("train", "decode", "evaluate", "one-block", "small-kernel", "integer", "steady-250", "context"),
    "A100": ("train", "llm-100", "zero3", "steady-150", "context", Level(1.0, 130, 12), Level(0.99, 95, 9, pcie=3e7)),
    "V100": ("train", "decode"),
    "T4": ("train",),
}
HANGS = {"H100": ("hang", "hang-152"), "A100": ("hang",), "V100": ("hang",), "T4": ("hang",)}
HOSTS = (QUIET, QUIET, BLIND, Host(loaders=0.4), Host(disk=2e8), Host(network=None), Host(network=5e7))


class Tally(NamedTuple):
    """`jobs`, `false`, `hangs`: numbers. `named`: of the hangs, those named within NAMED_S. By model."""

    jobs: Counter[str]
    false: Counter[str]
    hangs: Counter[str]
    named: Counter[str]
    days: Counter[str]


def play_job(model: str, draw: random.Random, tally: Tally, step_s: float) -> None:
    """One job on one board, with what happens to the exporter meanwhile."""
    trace = Trace(model, step_s=step_s, seed=draw.randrange(2**31))
    rest = Level(0.0, trace.product.idle_power)
    tally.jobs[model] += 1
    began = trace.t
    trace.play(Stage(draw.uniform(40, 600), rest))
    for _ in range(draw.randint(1, 5)):
        level = draw.choice(HEALTHY[model])
        length = 60.0 * 10 ** draw.uniform(0.0, 2.9)
        reports = trace.play(Stage(length, level, draw.choice(HOSTS), memory=draw.choice((20.0, 40.0, 60.0))))
        tally.false[f"{model} {level if isinstance(level, str) else level.watts}"] += any(
            s.is_stall for _, s in reports
        )
        accident = draw.random()
        if accident < 0.1:
            trace.restart(10 ** draw.uniform(0.5, 3.0))
        elif accident < 0.2:
            trace.play(Stage(10 ** draw.uniform(0.5, 3.0), level, lost=True))
    if draw.random() < 0.25:
        has_worked = trace.watch is not None and trace.watch.work.total_s >= trace.rules.work_min
        host = draw.choice((QUIET, QUIET, BLIND))
        reports = trace.play(Stage(draw.uniform(1300, 4 * 3600), draw.choice(HANGS[model]), host))
        kind = f"{model} {'worked' if has_worked else 'never worked'}, host {'known' if host is QUIET else 'unknown'}"
        tally.hangs[kind] += 1
        tally.named[kind] += any(spin.is_stall and at <= NAMED_S for at, spin in reports)
    tally.days[model] += (trace.t - began) / DAY_S  # type: ignore[assignment]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--days", type=float, default=50.0, help="simulated days of GPUs (default %(default)s)")
    parser.add_argument("--step", type=float, default=10.0, help="seconds between two readings (default %(default)s)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    given = parser.parse_args()
    print(f"seed {given.seed}")
    draw = random.Random(given.seed)
    tally = Tally(Counter(), Counter(), Counter(), Counter(), Counter())
    while sum(tally.days.values()) < given.days:
        play_job(draw.choice(("H100", "H100", "A100", "A100", "V100", "T4")), draw, tally, given.step)
    for model, jobs in sorted(tally.jobs.items()):
        print(f"{model}: {jobs} jobs, {tally.days[model]:.0f} days")
    print(f"false stalls of medium or high confidence: {sum(tally.false.values())}")
    for level, count in tally.false.items():
        if count:
            print(f"  {level}: {count}")
    for kind, count in sorted(tally.hangs.items()):
        print(f"hangs, {kind}: {tally.named[kind]} of {count} named within 20 min")
    return 1 if sum(tally.false.values()) else 0


if __name__ == "__main__":
    raise SystemExit(main())
