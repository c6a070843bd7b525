"""How often waits and work are called hangs, and hangs are missed: `python -m tests.bench.lives --days 5000`.

Lives are drawn by tests/bench/outsiders.py, which was written from the user's page alone. One report at a time of a
phase makes it wrong: of high confidence on anything that goes on later, of medium on work. A wait may be named at
medium as one of the first three of its holder; that is a row of its own. The seed is printed.
"""

from __future__ import annotations

import argparse
import os
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from itertools import groupby
from typing import NamedTuple

from tests.bench.outsiders import KINDS, draw_life
from tests.testbed.lives import HANGS, WAITS, WORKS, Life, Player

DAY_S, NAMED_S, LONG_S, FIRST = 86400.0, (1200.0, 1800.0), 900.0, 3


class Row(NamedTuple):
    """One kind of lives. `false_high`: waits and phases of work. `work`: phases of work at medium. `first`, `later`: waits
    at medium, by their place. `hangs`: by model, visibility and place; `named`: of them within 20 and 30 min.
    """

    kind: str
    gpu_days: float
    waits: int = 0
    false_high: int = 0
    work: int = 0
    first: int = 0
    later: int = 0
    hangs: Mapping[str, int] = {}
    named: Mapping[str, int] = {}


def judge(life: Life, seed: int, step_s: float) -> Row:
    """Play one life and compare what was said with what is true."""
    strongest: dict[int, set[str]] = {}
    first_at: dict[int, float] = {}
    for said in Player(life, step_s=step_s, seed=seed).play():
        strongest.setdefault(said.phase, set()).add(said.confidence)
        if said.confidence != "low":
            first_at.setdefault(said.phase, said.at)
    row = Row(life.kind, sum(phase.seconds * len(phase.levels) for phase in life.phases) / DAY_S)
    hangs: Counter[str] = Counter()
    named: Counter[str] = Counter()
    long_waits = 0
    for truth, episode in groupby(range(len(life.phases)), lambda number: life.phases[number].truth):
        numbers = list(episode)
        said_of = set[str]().union(*(strongest.get(number, set()) for number in numbers))
        lasted = sum(life.phases[number].seconds for number in numbers)
        if truth != HANGS:
            row = row._replace(false_high=row.false_high + ("high" in said_of))
        if truth == WORKS:
            row = row._replace(work=row.work + ("medium" in said_of))
        elif truth == WAITS:
            long_waits += lasted >= LONG_S / FIRST
            at = "first" if long_waits <= FIRST else "later"
            row = row._replace(waits=row.waits + 1, **{at: getattr(row, at) + ("medium" in said_of)})
        elif lasted >= NAMED_S[0]:
            name = f"{life.model}, host {'known' if life.visible else 'unknown'}"
            hangs[name] += 1
            passed, found = 0.0, float("inf")
            for number in numbers:
                if number in first_at:
                    found = min(found, passed + first_at[number])
                passed += life.phases[number].seconds
            for limit_s in NAMED_S:
                named[f"{name} {limit_s / 60:.0f}"] += found <= limit_s
    return row._replace(hangs=hangs, named=named)


def add(one: Row, other: Row) -> Row:
    numbers = (a + b for a, b in zip(one[1:-2], other[1:-2], strict=True))
    counts = (Counter(a) + Counter(b) for a, b in zip(one[-2:], other[-2:], strict=True))
    return Row(one.kind, *numbers, *counts)  # type: ignore[arg-type]


def run(given: tuple[int, float, float]) -> list[Row]:
    """Rows by kind of so many GPU-days, from one seed."""
    seed, days, step_s = given
    draw, played = random.Random(seed), 0.0
    rows: dict[str, Row] = {}
    while played < days:
        life = draw_life(draw)
        row = judge(life, draw.randrange(2**31), step_s)
        rows[life.kind] = add(rows[life.kind], row) if life.kind in rows else row
        played += row.gpu_days
    return list(rows.values())


def lines(rows: dict[str, Row]) -> Iterator[str]:
    yield f"{'kind':40} {'GPU-days':>8} {'waits':>6} {'high!':>5} {'work':>5} {'first':>5} {'later':>5}  hangs named in 20, 30 min"
    for kind in KINDS:
        if kind not in rows:
            continue
        row = rows[kind]
        told = "; ".join(
            f"{name}: {row.named.get(f'{name} 20', 0)}, {row.named.get(f'{name} 30', 0)} of {count}"
            for name, count in sorted(row.hangs.items())
        )
        yield f"{kind:40} {row.gpu_days:8.0f} {row.waits:6} {row.false_high:5} {row.work:5} {row.first:5} {row.later:5}  {told}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--days", type=float, default=50.0, help="simulated GPU-days (default %(default)s)")
    parser.add_argument("--step", type=float, default=15.0, help="seconds between two readings (default %(default)s)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    given = parser.parse_args()
    print(f"seed {given.seed}")
    parts = os.cpu_count() or 1
    rows: dict[str, Row] = {}
    with ProcessPoolExecutor(parts) as pool:
        for found in pool.map(run, [(given.seed + part, given.days / parts, given.step) for part in range(parts)]):
            for row in found:
                rows[row.kind] = add(rows[row.kind], row) if row.kind in rows else row
    print("\n".join(lines(rows)))
    total = [
        sum(getattr(row, name) for row in rows.values()) for name in ("false_high", "work", "first", "later", "waits")
    ]
    print("false high {}, work at medium {}, first waits {}, later waits {} of {} waits".format(*total))
    return 1 if total[0] or total[1] else 0


if __name__ == "__main__":
    raise SystemExit(main())
