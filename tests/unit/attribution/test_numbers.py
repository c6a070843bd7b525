"""The units that numbers mean: remembered for running holders, for a limited time and in a limited number."""

from __future__ import annotations

from gpu_exporter.agent.attribution.numbers import KEEP_S, MAX_NUMBERS, NumberMemory
from gpu_exporter.common.model.holders import HolderKey
from gpu_exporter.common.model.units import UnitId


def key(number: int) -> tuple[HolderKey, str]:
    return HolderKey("slurm", f"lab/{number}/0/1"), "IDX 0"


def test_a_number_is_kept_while_it_means_a_unit_and_for_a_while_after() -> None:
    memory = NumberMemory()
    memory.note({key(1): UnitId("GPU-1")}, 100.0)
    memory.note({key(2): UnitId("GPU-2")}, 100.0 + KEEP_S)
    assert memory.units() == {key(1): UnitId("GPU-1"), key(2): UnitId("GPU-2")}
    memory.note({key(2): UnitId("GPU-2")}, 100.1 + KEEP_S)
    assert memory.units() == {key(2): UnitId("GPU-2")}


def test_of_too_many_numbers_the_latest_are_kept() -> None:
    memory = NumberMemory()
    for number in range(MAX_NUMBERS + 5):
        memory.note({key(number): UnitId("GPU-0")}, number / 1000)
    assert set(memory.units()) == {key(number) for number in range(5, MAX_NUMBERS + 5)}
