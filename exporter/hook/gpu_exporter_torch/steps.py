"""Counts the steps of one training loop, and measures their waits. Pure.

All times are parameters, in nanoseconds of one clock. A step begins when the loop asks for its first batch. It ends
when the loop asks for the next batch after the optimizer's step. So there is no gap between the steps of an epoch. No
step includes the time between two epochs, e.g. an evaluation or the start of new loaders. The first batch of an epoch
also waits for new workers. This time counts as `start`, not as `wait`.
"""

from __future__ import annotations

from array import array

WARMUP = 5  # first steps that are counted and not measured: they compile, choose kernels and fill caches
RECENT = 128  # durations that are kept for the median


class StepCounter:
    """Counts and times the steps of one loop. Not thread-safe: only the loop's thread may call it. Needs constant
    memory.

    `marked`: whether a step ends after a mark (`mark`). Otherwise each batch is a step, until the first mark.
    """

    def __init__(self, *, marked: bool) -> None:
        self.marked = marked
        self.batches = self.steps = self.optimizer_steps = self.epochs = 0
        self.measured = self.skipped = self.unfinished = 0
        self.step_ns = self.wait_ns = self.start_ns = 0  # of the measured steps; of all epochs
        self._recent = array("d", bytes(8 * RECENT))
        self._recent_count = 0
        self._begin: int | None = None  # of the present step
        self._wait = self._batches = self._marks = self._last_mark = 0
        self._is_skipped = False

    def begin_epoch(self) -> None:
        """Notes that the loop makes a new iterator. Closes an open step of the last iterator, e.g. after an error."""
        if self._begin is not None and self._marks:
            self._close(self._last_mark)  # what came after the mark may be anything
        self._drop()

    def ask(self, now: int) -> None:
        """Notes that the loop asks for the next batch."""
        if self._begin is not None and self._batches and (self._marks or not self.marked):
            self._close(now)
            self._begin = now

    def get(self, asked: int, now: int, *, is_first: bool) -> None:
        """Notes that the loop received a batch, requested at `asked`. `is_first`: the first batch of its iterator."""
        self.batches += 1
        self._batches += 1
        if is_first:
            self.epochs += 1
            self.start_ns += now - asked
            self._begin = now
        elif self._begin is None:  # another pass over the same loader has ended the step
            self._begin = now
        else:
            self._wait += now - asked

    def restart(self, now: int) -> None:
        """Notes other work of the framework between two batches, e.g. an evaluation, which belongs to no step."""
        if self._begin is not None and not self._batches:
            self._begin, self._wait = now, 0

    def add_wait(self, asked: int, now: int) -> None:
        """Notes that the loop has waited for another loader."""
        if self._begin is not None:
            self._wait += now - asked

    def end_epoch(self) -> None:
        """Notes that the loader has no further batch."""
        self._drop()

    def mark(self, now: int) -> None:
        """Notes that the optimizer has made its step. Marks without a new batch between them belong to one step."""
        if not self.marked:  # the first mark: the batches before it were no steps
            self.marked = True
            self.steps = self.measured = self.skipped = self.step_ns = self.wait_ns = self._recent_count = 0
        self.optimizer_steps += 1
        self._marks += 1
        self._last_mark = now

    def skip(self) -> None:
        """Excludes the present step from the measurement, e.g. because a profiler slows it down."""
        self._is_skipped = True

    @property
    def measures(self) -> bool:
        """Whether the present step will be measured."""
        return self.steps >= WARMUP and not self._is_skipped

    @property
    def median_ns(self) -> float | None:
        """The median of the last RECENT measured steps, None if no step was measured."""
        known = sorted(self._recent[: min(self._recent_count, RECENT)])
        return known[len(known) // 2] if known else None

    def _close(self, now: int) -> None:
        self.steps += 1
        if self._is_skipped:
            self.skipped += 1
        elif self.steps > WARMUP and self._begin is not None:
            self.measured += 1
            self.step_ns += now - self._begin
            self.wait_ns += self._wait
            self._recent[self._recent_count % RECENT] = now - self._begin
            self._recent_count += 1
        self._reset()

    def _drop(self) -> None:
        self.unfinished += self._batches
        self._begin = None
        self._reset()

    def _reset(self) -> None:
        self._wait = self._batches = self._marks = 0
        self._is_skipped = False
