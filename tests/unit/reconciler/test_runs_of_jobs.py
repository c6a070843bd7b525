"""A job that was requeued elsewhere: what its former node last said is of another run."""

from __future__ import annotations

import pytest

from gpu_exporter.reconciler.decision.policy import Policy, decide_holder, windows_for
from gpu_exporter.reconciler.evidence.records import Gathered, HolderName, UnitEvidence

WALL = 1_800_000_000.0
JOB, POD = HolderName("slurm", "", "42"), HolderName("kubernetes", "ml", "train-0")


def unit(node: str, start: float | None, idle_s: float | None, gpu: str = "0") -> UnitEvidence:
    return UnitEvidence(node, gpu, f"GPU-{node}-{gpu}", "", start, idle_s, 5.0, 1.0, 3)


def stage(name: HolderName, held: int, *units: UnitEvidence) -> tuple[str, int]:
    """What the holder is by these series, and of how many GPUs."""
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
        unit("n1", WALL - 90_000.0, 80_000.0),  # as if it were idle there
        unit("n1", WALL - 90_000.0, 0.0),  # as if it worked there
        unit("n1", WALL - 90_000.0, None),  # its GPU does not answer any more
        unit("n1", WALL - 20_003.0, 0.0),
    ],
)
def test_a_former_run_is_neither_added_nor_does_it_shield(before: UnitEvidence) -> None:
    alone = stage(JOB, 1, IDLE)
    assert alone == ("underused", 1)
    assert stage(JOB, 1, before, IDLE) == stage(JOB, 1, IDLE, before) == alone


def test_nodes_of_one_run_have_its_start_and_all_of_them_count() -> None:
    works = unit("n1", WALL - 20_001.5, 0.0)
    assert stage(JOB, 2, IDLE, works)[1] == 2
    assert stage(JOB, 2, IDLE, works)[0] != "underused"
    unknown = unit("n1", None, 15_000.0)
    assert stage(JOB, 2, IDLE, unknown) == ("unknown", 2)


def test_gpus_of_a_pod_may_be_taken_at_different_times() -> None:
    assert stage(POD, 2, IDLE, unit("n2", WALL - 90_000.0, 0.0, "1"))[1] == 2
