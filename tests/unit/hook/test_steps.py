"""How the hook counts steps: what belongs to a step, what to an epoch, and what to neither."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_exporter_torch.steps import RECENT, WARMUP, StepCounter

MS = 1_000_000


class Loop:
    """A loop on a clock of its own."""

    def __init__(self, *, marked: bool = False) -> None:
        self.counter = StepCounter(marked=marked)
        self.now = 0
        self.is_first = True

    def epoch(self) -> None:
        self.counter.begin_epoch()
        self.is_first = True

    def batch(self, wait: int, work: int, *, marks: int = 0) -> None:
        self.counter.ask(self.now)
        asked, self.now = self.now, self.now + wait * MS
        self.counter.get(asked, self.now, is_first=self.is_first)
        self.is_first = False
        self.now += work * MS
        for _ in range(marks):
            self.counter.mark(self.now)

    def end(self) -> None:
        self.counter.ask(self.now)
        self.counter.end_epoch()


def test_without_marks_each_batch_is_a_step_and_the_first_five_are_not_measured() -> None:
    loop = Loop()
    loop.epoch()
    for _ in range(25):
        loop.batch(wait=6, work=4)
    loop.end()
    counter = loop.counter
    assert (counter.steps, counter.measured, counter.batches) == (25, 25 - WARMUP, 25)
    assert counter.step_ns == 20 * 10 * MS
    assert counter.wait_ns == 20 * 6 * MS
    assert counter.median_ns == 10 * MS


def test_batches_of_one_optimizer_step_are_one_step() -> None:
    loop = Loop(marked=True)
    loop.epoch()
    for number in range(40):
        loop.batch(wait=1, work=4, marks=number % 4 == 3)
    loop.end()
    assert (loop.counter.steps, loop.counter.batches, loop.counter.optimizer_steps) == (10, 40, 10)
    assert loop.counter.step_ns == (10 - WARMUP) * 20 * MS


def test_several_optimizers_in_one_step_are_one_step() -> None:
    loop = Loop(marked=True)
    loop.epoch()
    for _ in range(10):
        loop.batch(wait=1, work=1, marks=2)
    loop.end()
    assert (loop.counter.steps, loop.counter.optimizer_steps) == (10, 20)


def test_a_step_that_a_scaler_skips_lengthens_the_next_one() -> None:
    loop = Loop(marked=True)
    loop.epoch()
    for number in range(20):
        loop.batch(wait=1, work=1, marks=number != 10)
    loop.end()
    assert (loop.counter.steps, loop.counter.batches) == (19, 20)
    assert loop.counter.step_ns == (20 - WARMUP) * 2 * MS


def test_the_first_mark_makes_the_batches_before_it_one_step() -> None:
    loop = Loop()
    loop.epoch()
    for number in range(8):
        loop.batch(wait=1, work=1, marks=number % 4 == 3)
    loop.end()
    assert loop.counter.steps == 2


def test_what_lies_between_epochs_is_no_step() -> None:
    loop = Loop(marked=True)
    for _ in range(3):
        loop.epoch()
        loop.batch(wait=500, work=4, marks=1)  # the loaders start
        for _ in range(9):
            loop.batch(wait=1, work=4, marks=1)
        loop.end()
        loop.now += 60_000 * MS  # an evaluation
    counter = loop.counter
    assert (counter.steps, counter.epochs) == (30, 3)
    assert counter.start_ns == 3 * 500 * MS
    assert counter.step_ns == (2 * 4 + 23 * 5) * MS  # the first step of an epoch has no wait
    assert counter.wait_ns == 23 * MS


def test_after_a_break_the_last_step_ends_at_its_mark() -> None:
    loop = Loop(marked=True)
    loop.epoch()
    for _ in range(WARMUP):
        loop.batch(wait=1, work=1, marks=1)
    loop.batch(wait=2, work=3, marks=1)
    loop.now += 10_000 * MS  # break, and something else
    loop.epoch()
    assert loop.counter.steps == WARMUP + 1
    assert loop.counter.step_ns == 5 * MS


def test_batches_without_a_mark_at_the_end_of_an_epoch_are_unfinished() -> None:
    loop = Loop(marked=True)
    loop.epoch()
    for number in range(10):
        loop.batch(wait=1, work=1, marks=number % 4 == 3)
    loop.end()
    assert (loop.counter.steps, loop.counter.unfinished) == (2, 2)


def test_steps_under_a_profiler_are_counted_and_not_measured() -> None:
    loop = Loop()
    loop.epoch()
    for number in range(20):
        loop.batch(wait=1, work=1)
        if number == 10:
            loop.counter.skip()
    loop.end()
    assert (loop.counter.steps, loop.counter.skipped, loop.counter.measured) == (20, 1, 20 - WARMUP - 1)


def test_a_second_loader_adds_only_wait() -> None:
    loop = Loop()
    loop.epoch()
    for _ in range(20):
        loop.batch(wait=1, work=0)
        asked, loop.now = loop.now, loop.now + 3 * MS
        loop.counter.add_wait(asked, loop.now)
        loop.now += 6 * MS
    loop.end()
    assert loop.counter.wait_ns == (20 - WARMUP) * 4 * MS
    assert loop.counter.step_ns == (20 - WARMUP) * 10 * MS


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("batch"), st.integers(0, 50), st.integers(0, 50), st.integers(0, 2)),
            st.tuples(st.just("epoch"), st.just(0), st.just(0), st.just(0)),
            st.tuples(st.just("end"), st.just(0), st.just(0), st.just(0)),
        ),
        max_size=120,
    ),
    st.booleans(),
)
def test_parts_never_exceed_the_whole(events: list[tuple[str, int, int, int]], marked: bool) -> None:
    loop = Loop(marked=marked)
    loop.epoch()
    for kind, wait, work, marks in events:
        if kind == "batch":
            loop.batch(wait, work, marks=marks)
        elif kind == "epoch":
            loop.epoch()
        else:
            loop.end()
            loop.epoch()
    counter = loop.counter
    assert 0 <= counter.wait_ns <= counter.step_ns <= loop.now
    assert counter.step_ns + counter.start_ns <= loop.now
    assert counter.measured + counter.skipped <= counter.steps <= counter.batches
    assert len(counter._recent) == RECENT


@pytest.mark.parametrize("number", [0, 1, RECENT - 1, RECENT + 50])
def test_the_median_is_of_the_last_steps(number: int) -> None:
    loop = Loop()
    loop.epoch()
    for _ in range(number + WARMUP + 1):
        loop.batch(wait=0, work=1)
    if number:
        for _ in range(RECENT + 1):
            loop.batch(wait=0, work=7)
        assert loop.counter.median_ns == 7 * MS
    else:
        loop.end()
        assert loop.counter.median_ns == 1 * MS
