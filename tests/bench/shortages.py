"""Who is called short on random hosts: `python -m tests.bench.shortages --hosts 6000`.

Hosts are drawn by tests/bench/hosts.py, which has its own model of who gets which CPU and page and was written from the
user's page alone. One of three kinds of report is wrong: an owner's cause for what neighbours take, the opposite of the
right advice, and an accusation where nothing is short. Only published causes count (medium and high). The seed is
printed.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from gpu_exporter.common.model.causes import Cause
from gpu_exporter.diagnosis.causes.case import CauseCase, HeldGpu, HostLook
from gpu_exporter.diagnosis.causes.rules import find_causes
from tests.bench.hosts import DrawnHost, draw_host

OF_CPU = frozenset(("cpu_bound_input", "cpu_quota", "cpu_oversubscribed"))
OF_OWNER = OF_CPU | {"memory_pressure"}
RIGHT: Mapping[str, frozenset[str]] = {
    "own cpu": OF_CPU,
    "threads": frozenset(("cpu_oversubscribed", "cpu_quota")),
    "own memory": frozenset(("memory_pressure",)),
    "neighbours cpu": frozenset(("cpu_contended",)),
    "neighbours memory": frozenset(("node_memory",)),
    "too few": frozenset(("too_few_workers",)),
    "none": frozenset(),
}
OWN = ("own cpu", "threads", "own memory")


class Verdict(NamedTuple):
    """`named`: a right cause is published. `accused`: an owner's cause that is wrong. `opposite`: so is the advice."""

    kind: str
    short: str
    causes: tuple[str, ...]
    named: bool
    accused: bool
    opposite: bool


def case_of(drawn: DrawnHost) -> CauseCase:
    """The host as the rules see it."""
    is_idle = drawn.state == "held_idle"
    return CauseCase(
        state=drawn.state,
        uuid="GPU-0",
        held_s=7200.0,
        worked=True,
        idle_run_s=900.0 if is_idle else 0.0,
        mean=drawn.mean,
        processes=1.0,
        members=(HeldGpu("GPU-0", "0", drawn.mean, 1.0, 900.0 if is_idle else 0.0),),
        looks=tuple(HostLook(each, drawn.mean) for each in drawn.looks),
        link=1.0,
        share=drawn.share,
        held=drawn.held,
    )


def judge(drawn: DrawnHost) -> Verdict:
    found: tuple[Cause, ...] = find_causes(case_of(drawn)).published
    names = tuple(cause.name for cause in found)
    told = set(names)
    accused = drawn.short not in OWN and bool(told & OF_OWNER)
    more = bool(told & {"too_few_workers"})
    fewer = bool(told & OF_CPU)
    opposite = (drawn.short == "too few" and fewer) or (
        drawn.short in ("own cpu", "threads", "neighbours cpu") and more
    )
    return Verdict(drawn.kind, drawn.short, names, bool(told & RIGHT[drawn.short]), accused, opposite)


def run(hosts: int, seed: int) -> list[Verdict]:
    """The verdicts on so many hosts."""
    draw = random.Random(seed)
    return [judge(draw_host(draw)) for _ in range(hosts)]


def share(verdicts: Iterable[bool]) -> float:
    """The share that is true, 0 of nothing."""
    found = list(verdicts)
    return sum(found) / len(found) if found else 0.0


def lines(verdicts: list[Verdict], by: str) -> Iterator[str]:
    yield f"{by:44} {'hosts':>6} {'named':>7} {'accused':>8} {'opposite':>9}  published"
    groups: dict[str, list[Verdict]] = {}
    for each in verdicts:
        groups.setdefault(each.short if by == "truth" else f"{each.short}: {each.kind}", []).append(each)
    for name, group in sorted(groups.items()):
        told = Counter(cause for each in group for cause in each.causes)
        most = ", ".join(f"{cause} {count}" for cause, count in told.most_common(4))
        named, accused = share(each.named for each in group), share(each.accused for each in group)
        opposite = share(each.opposite for each in group)
        yield f"{name:44} {len(group):6} {named:7.1%} {accused:8.1%} {opposite:9.1%}  {most}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, default=1000, help="random hosts (default %(default)s)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    given = parser.parse_args()
    print(f"seed {given.seed}")
    verdicts = run(given.hosts, given.seed)
    print("\n".join((*lines(verdicts, "truth"), "", *lines(verdicts, "kind"))))
    return 1 if any(each.opposite for each in verdicts) else 0


if __name__ == "__main__":
    raise SystemExit(main())
