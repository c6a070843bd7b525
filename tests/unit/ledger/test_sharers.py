"""Holders of a shared GPU while readings are lost, noisy or unconfirmed, against an oracle of their true work."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.ledger.ledger_bench import RULES, START, WALL

from gpu_exporter.agent.attribution.usage import ROUNDING, ROUNDING_MAX, SLACK
from gpu_exporter.agent.ledger.accounts import ConfirmedAllocation
from gpu_exporter.agent.ledger.ledger import Ledger
from gpu_exporter.common.model.holders import Allocation, Holder, HolderKey
from gpu_exporter.common.model.readings import Activity, Span, Split
from gpu_exporter.common.model.units import UnitId

UNIT = UnitId("GPU-0")
HOLDERS = [Holder(HolderKey("kubernetes", f"uid-{name}/main"), namespace="ml", pod=name) for name in "abc"]
PERIOD_S = 5
LOSSES = ("no period", "no list")
Work = Callable[[int], float]  # what a holder's processes do in a second, 0 to 1


@dataclass
class Host:
    """One GPU, read every second; every five seconds the driver lists its processes, and the kubelet its pods.

    `lost`: share of the periods whose list is lost. `noise`: standard deviation of a process's share. `unlisted`:
    holders whose processes the driver never lists. `hides`: holders whose work makes the list fail. `away`: seconds in which the kubelet does not answer.
    """

    works: Sequence[Work]
    draw: random.Random
    lost: float = 0.0
    hides: frozenset[int] = frozenset()
    noise: float = 0.0
    unlisted: frozenset[int] = frozenset()
    away: Callable[[int], bool] = lambda second: False
    ledger: Ledger = field(default_factory=lambda: Ledger(RULES, START))
    second: int = 0
    confirmed: float = START

    def __post_init__(self) -> None:
        self.held = HOLDERS[: len(self.works)]
        self.seen_work: list[float] = [START] * len(self.works)
        """the end of the last period whose list shows work of this holder"""
        self.worked: list[float] = [START] * len(self.works)
        self.poll()

    def poll(self) -> None:
        now = START + self.second
        if not self.away(self.second):
            self.confirmed = now
        kind = "time_slice" if len(self.held) > 1 else ""
        held = [
            ConfirmedAllocation(Allocation(UNIT, each, kind, 1.0 / len(self.held)), self.confirmed, None)
            for each in self.held
        ]
        self.ledger.charge_poll(now, WALL + self.second, held)

    def step(self) -> None:
        """One period and one poll."""
        begin, shares = START + self.second, [0.0] * len(self.works)
        spans = []
        for _ in range(PERIOD_S):
            wanted = [work(self.second) for work in self.works]
            total = sum(wanted)
            done = [each / max(1.0, total) for each in wanted]
            shares = [sum(pair) for pair in zip(shares, done, strict=True)]
            at = START + self.second
            spans.append(Span(at, at + 1.0, min(1.0, total)))
            self.worked = [at + 1.0 if each else before for each, before in zip(done, self.worked, strict=True)]
            self.second += 1
        self.ledger.record(Activity(UNIT, tuple(spans), 3))
        now, loss = START + self.second, self.draw.choice(LOSSES) if self.draw.random() < self.lost else ""
        if any(shares[number] for number in self.hides):
            loss = "no list"
        ratios = {}
        for number, (holder, share) in enumerate(zip(self.held, shares, strict=True)):
            if share and number not in self.unlisted:
                seen = max(ROUNDING, round(share / PERIOD_S + self.draw.gauss(0.0, self.noise), 2))
                ratios[holder.key] = seen
                if not loss:
                    self.seen_work[number] = now
        slack = SLACK + min(ROUNDING * len(ratios), ROUNDING_MAX)
        if len(self.held) > 1 and loss != "no period":
            ratios, problem = ({}, "lost") if loss == "no list" else (ratios, "")
            self.ledger.record_split(UNIT, Split(begin, now, ratios, None, slack, problem))
        self.poll()

    def idle_run(self, number: int) -> float:
        allocation = Allocation(UNIT, self.held[number])
        totals = self.ledger.holder_totals(allocation, START + self.second, WALL + self.second)
        return (totals and totals.idle_run_s) or 0.0


def marked_share(host: Host, number: int, hours: int = 12) -> float:
    """The share of the time in which the holder's idle run is at least two hours."""
    marked = 0
    for _ in range(hours * 3600 // PERIOD_S):
        host.step()
        marked += host.idle_run(number) >= 7200.0
    return marked * PERIOD_S / (hours * 3600)


def busy(second: int) -> float:
    return 0.9


def idle(second: int) -> float:
    return 0.0


def training(second: int) -> float:
    """Steps of 40 s between 60 and 95 %, then ten seconds of evaluation on the CPU."""
    return 0.0 if second % 50 >= 40 else 0.6 + 0.35 * (second % 7) / 6


@pytest.mark.parametrize("neighbour", [busy, training])
def test_an_idle_sharer_is_marked_as_long_as_a_holder_of_its_own_gpu(neighbour: Work) -> None:
    """One list in 300 is lost, a kubelet is away for 25 s an hour, and shares are wrong by two points."""

    def away(second: int) -> bool:
        return second % 3600 < 25

    alone = marked_share(Host([idle], random.Random(5), away=away), 0)
    shared = Host([neighbour, idle], random.Random(5), lost=1 / 300, noise=0.02, away=away)
    assert alone > 0.8
    assert marked_share(shared, 1) >= 0.95 * alone


def bursts(draw: random.Random) -> Work:
    """Work of a few seconds to minutes with pauses, at one level."""
    level, pause, length = draw.choice((0.3, 0.6, 1.0)), draw.choice((20, 60, 300, 900)), draw.choice((1, 5, 30, 90))
    offset = draw.randrange(pause + length)
    return lambda second: level if (second + offset) % (pause + length) < length else 0.0


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([0.0, 1 / 300, 1 / 30, 0.2]), st.sampled_from([0.0, 0.02]))
def test_work_that_any_list_shows_ends_the_idle_run(seed: int, lost: float, noise: float) -> None:
    """Whatever is lost around it, and also while no kubelet answers."""
    draw = random.Random(seed)
    outage = draw.choice((10, 25, 120))
    works = [draw.choice((bursts(draw), bursts(draw), busy, idle)) for _ in range(draw.choice((2, 3)))]
    host = Host(works, draw, lost, noise=noise, away=lambda second: second % 1800 < outage)
    for _ in range(3600 // PERIOD_S):
        host.step()
        for number in range(len(works)):
            assert host.idle_run(number) <= START + host.second - host.seen_work[number] + PERIOD_S


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([0.0, 0.02]), st.booleans())
def test_work_of_processes_that_are_never_listed_ends_the_idle_run(
    seed: int, noise: float, has_neighbour: bool
) -> None:
    """It takes seconds, less than the unknown time that an idle run may bridge, also while the neighbour pauses."""
    draw = random.Random(seed)
    pause = draw.choice((60, 300, 900))
    level = draw.choice((0.5, 1.0))
    length = draw.choice((5, 10))

    def hidden(second: int) -> float:
        return level if second % pause < length else 0.0

    neighbour = draw.choice((busy, training)) if has_neighbour else idle
    host = Host([neighbour, hidden], draw, noise=noise, unlisted=frozenset({1}))
    for _ in range(3600 // PERIOD_S):
        host.step()
        assert host.idle_run(1) <= START + host.second - host.worked[1] + PERIOD_S


@pytest.mark.parametrize("pause", [60, 120])
def test_lists_that_fail_whenever_a_sharer_works_do_not_make_it_idle(pause: int) -> None:
    """Four seconds of each minute are less than the unknown time that an idle run may bridge."""

    def hidden(second: int) -> float:
        return 1.0 if second % pause < 4 else 0.0

    host = Host([lambda second: 1.0, hidden], random.Random(3), hides=frozenset({1}))
    longest = 0.0
    for _ in range(4 * 3600 // PERIOD_S):
        host.step()
        longest = max(longest, host.idle_run(1))
    assert longest <= 600.0


def test_nothing_is_forgotten_before_the_first_complete_poll() -> None:
    """Ten sharers of a state file, and a kubelet that answers only after a while."""
    pods = [Holder(HolderKey("kubernetes", f"uid-{number}/main"), namespace="ml") for number in range(10)]

    def poll(ledger: Ledger, now: float, *, is_complete: bool) -> None:
        held = [ConfirmedAllocation(Allocation(UNIT, each, "time_slice", 0.1), now, None) for each in pods]
        ledger.charge_poll(now, WALL + now - START, held if is_complete else (), is_complete=is_complete)

    before = Ledger(RULES, START)
    for at in range(0, 1500, 5):
        before.record(Activity(UNIT, (Span(START + at, START + at + 5.0, 0.0),), 3))
        poll(before, START + at + 5.0, is_complete=True)
    for silent_s in (5, 400, 2000):
        after = Ledger(RULES, START + 1500.0)
        after.restore(
            {UNIT: replace(before.units[UNIT].account)}, {key: replace(each) for key, each in before.holders().items()}
        )
        for at in range(0, silent_s, 5):
            poll(after, START + 1500.0 + at, is_complete=False)
        poll(after, START + 1500.0 + silent_s, is_complete=True)
        held = [each.held_s for each in after.holders().values()]
        assert held == pytest.approx([1495.0 + silent_s] * 10, abs=0.1)
        for at in range(5, 400, 5):  # the kubelet is away again
            poll(after, START + 1500.0 + silent_s + at, is_complete=False)
        poll(after, START + 1900.0 + silent_s, is_complete=True)
        held = [each.held_s for each in after.holders().values()]
        assert held == pytest.approx([1895.0 + silent_s] * 10, abs=0.1)
