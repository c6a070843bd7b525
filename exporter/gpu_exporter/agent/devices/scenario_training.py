"""Simulates one rank of a training loop in a scenario, and the rank's report."""

from __future__ import annotations

from typing import NamedTuple

from gpu_exporter.common.model.training import RankReport


class TrainingLoop(NamedTuple):
    """One rank of a training loop.

    - `step`: duration of a step in seconds.
    - `wait`: share of a step in which the GPU waits for data.
    - `world_size`: 1 if the training is not distributed.
    - `workers`, `batch_size`: 0 if the report does not contain them.
    """

    step: float
    wait: float
    rank: int
    world_size: int
    workers: int
    batch_size: int

    def report(self, uuid: str, runs_s: float) -> RankReport:
        """Returns the report of a loop that has run for `runs_s` seconds on the GPU or MIG instance `uuid`."""
        steps = int(runs_s / self.step)
        whole_s = steps * self.step
        waits_s = whole_s * self.wait
        facts = {"num_workers": self.workers, "batch_size": self.batch_size}
        return RankReport(
            run="simulated",
            steps=steps,
            rank=self.rank,
            world_size=self.world_size,
            gpus=(uuid,),
            measured=steps,
            step_s=whole_s,
            wait_s=waits_s,
            starved_s=waits_s,
            worked_s=whole_s - waits_s,
            is_gpu=True,
            facts={name: number for name, number in facts.items() if number},
        )
