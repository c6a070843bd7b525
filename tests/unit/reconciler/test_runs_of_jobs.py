"""A job that was requeued on another node: the last series of its former node belong to an earlier run."""

from __future__ import annotations

import pytest

from gpu_exporter.reconciler.decision.policy import Policy, decide_holder, windows_for
from gpu_exporter.reconciler.evidence.records import Gathered, HolderName, UnitEvidence

WALL = 1_800_000_000.0
JOB, POD = HolderName("slurm", "", "42"), HolderName("kubernetes", "ml", "train-0")


def unit(node: str, start: float | None, idle_s: float | None, gpu: str = "0") -> UnitEvidence:
    return UnitEvidence(node, gpu, f"GPU-{node}-{gpu}", "", start, idle_s, 5.0, 1.0, 3)


def stage(name: HolderName, held: int, *units: UnitEvidence) -> tuple[str, int]:
    """The stage of the holder by these series, and the number of its GPUs."""
    gathered = Gathered()
    for each in units:
        gathered.add({"slurm_cluster": "lab"}, each)
    gathered.count(held)
    evidence = gathered.evidence(name)
    policy = Policy()
    decision = decide_holder(evidence, WALL, policy, windows_for(evidence, policy))
    return decision.stage, len(evidence.units)


IDLE = unit("n2", WALL - 20_000.0, 15_000.0)


@pytest.mark.parametrize(
    "before",
    [
        unit("n1", WALL - 90_000.0, 80_000.0),  # idle in its last series
        unit("n1", WALL - 90_000.0, 0.0),  # working in its last series
        unit("n1", WALL - 90_000.0, None),  # its GPU no longer answers
        unit("n1", WALL - 20_003.0, 0.0),
    ],
)
def test_series_of_an_earlier_run_do_not_change_the_decision(before: UnitEvidence) -> None:
    alone = stage(JOB, 1, IDLE)
    assert alone == ("underused", 1)
    assert stage(JOB, 1, before, IDLE) == stage(JOB, 1, IDLE, before) == alone


def test_all_nodes_with_the_start_of_the_last_run_count() -> None:
    works = unit("n1", WALL - 20_001.5, 0.0)
    assert stage(JOB, 2, IDLE, works)[1] == 2
    assert stage(JOB, 2, IDLE, works)[0] != "underused"
    unknown = unit("n1", None, 15_000.0)
    assert stage(JOB, 2, IDLE, unknown) == ("unknown", 2)


def test_gpus_of_a_pod_with_different_start_times_all_count() -> None:
    assert stage(POD, 2, IDLE, unit("n2", WALL - 90_000.0, 0.0, "1"))[1] == 2
