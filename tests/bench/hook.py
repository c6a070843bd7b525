"""What the hook of docs/torch.md costs a training loop: pairs of the same loop with and without it, in turn.

`python -m tests.bench.hook` needs torch in the environment; `make bench-hook` has its own. Prints the median of the pairs'
differences as a share of a step of 10 ms, with the 95 % interval of a bootstrap, and the cost of a step that does nothing.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from typing import Any

import torch

from gpu_exporter_torch import observe

STEP_S = 0.010
STEPS = 60  # of one loop
EMPTY = 20_000
RESAMPLES = 5_000


class Loop:
    """Steps of matrix products of about STEP_S on one thread."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.model = torch.nn.Linear(256, 256)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.inputs = torch.randn(64, 256)
        self.repeats = 1
        while (each := self._time(5)) < STEP_S:
            self.repeats = max(self.repeats + 1, round(self.repeats * STEP_S / max(each, 1e-4)))

    def _time(self, steps: int) -> float:
        begin = time.perf_counter()
        self.run(range(steps))
        return (time.perf_counter() - begin) / steps

    def run(self, batches: Iterable[int]) -> None:
        for _ in batches:
            for _ in range(self.repeats):
                self.model(self.inputs)
            self.optimizer.zero_grad()
            self.model(self.inputs).sum().backward()
            self.optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=40)
    pairs = parser.parse_args().pairs
    loop, chance = Loop(), random.Random(7)

    def measure(observed: bool) -> float:
        """CPU seconds of this thread for one step: other programs on this machine do not count."""
        with tempfile.TemporaryDirectory() as folder:
            options: dict[str, Any] = {"optimizer": loop.optimizer, "directory": folder, "summary": False}
            batches: Any = observe(range(STEPS), **options) if observed else range(STEPS)
            begin = time.thread_time()
            loop.run(batches)
            spent = time.thread_time() - begin
            if observed:
                batches.close()
        return spent / STEPS

    measure(True), measure(False)
    ratios = []
    for _ in range(pairs):
        order = [True, False]
        chance.shuffle(order)
        found = {observed: measure(observed) for observed in order}
        ratios.append(found[True] / found[False] - 1.0)
    medians = sorted(statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    low, high = medians[RESAMPLES // 40], medians[-RESAMPLES // 40]
    with observe(range(EMPTY), optimizer=(), summary=False) as empty:
        begin = time.perf_counter()
        for _ in empty:
            empty.mark_step()
        each_us = (time.perf_counter() - begin) / EMPTY * 1e6
    print(
        f"torch {torch.__version__}, Python {sys.version.split()[0]}, {pairs} pairs of {STEPS} steps of 10 ms, CPU time"
    )
    print(f"with the hook: {statistics.median(ratios):+.2%} (95 % interval {low:+.2%} to {high:+.2%})")
    print(f"a step that does nothing: {each_us:.1f} us, {each_us / 1e4:.2%} of 10 ms; no GPU, so no events")


if __name__ == "__main__":
    main()
