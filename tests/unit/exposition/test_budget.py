"""The number of series per GPU, instance and allocation: each series costs memory in Prometheus."""

from __future__ import annotations

from collections import Counter

import pytest
from tests.limits import advise
from tests.testbed.nvml.scenarios import GENERATIONS
from tests.testbed.simulated_node import SimulatedNode

from gpu_exporter.agent.devices.scenario import parse_scenario
from gpu_exporter.agent.exposition.series import Series, list_series

# 64, and the NVLinks that are up, the fabric status and one condition.
GPU_BUDGET, INSTANCE_BUDGET, ALLOCATION_BUDGET = 67, 24, 24


def publish(name: str) -> list[Series]:
    """All series of one GPU of a generation, with a holder. Each XID that was seen would add two more."""
    gpu = GENERATIONS[name]
    holder = {"gpu": 0, "kind": "pod", "name": "ml/a/main", "memory_gib": 2, **({"mig": 0} if "mig" in gpu else {})}
    node = SimulatedNode(parse_scenario({"gpus": [gpu], "holders": [holder]}))
    node.state.xids.watch(node.unit(0).uuid)
    return list_series(node.run(60))


def count(series: list[Series]) -> Counter[str]:
    counted: Counter[str] = Counter()
    for entry in series:
        if entry.family.name.startswith("gpu_allocation"):
            counted["allocation"] += len(entry.rows)
        elif "mig_uuid" in entry.label_names:
            for labels, _ in entry.rows:
                counted[f"instance {labels[entry.label_names.index('mig')]}"] += 1
        elif "uuid" in entry.label_names:
            counted["gpu"] += len(entry.rows)
    return counted


@pytest.mark.parametrize("name", GENERATIONS)
def test_a_gpu_stays_within_its_budget_of_series(name: str) -> None:
    counted = count(publish(name))
    series = counted.pop("gpu")
    assert series >= 30
    advise(f"series of {name}", series, GPU_BUDGET, so="drop one, or have the collector off by default")
    of_holder = counted.pop("allocation")
    assert of_holder >= 10
    advise(f"series of a holder on {name}", of_holder, ALLOCATION_BUDGET, so="drop one")
    assert bool(counted) == ("mig" in name)
    for instance, number in counted.items():
        advise(f"series of {instance} of {name}", number, INSTANCE_BUDGET, so="drop one")


def test_board_and_instance_never_share_a_family() -> None:
    """Otherwise a sum over a family would count a board and its instances together."""
    for entry in publish("h100-mig"):
        if entry.family.name.startswith("gpu_mig_") and entry.family.name != "gpu_mig_unassigned_energy_joules_total":
            assert "mig_uuid" in entry.label_names
        elif not entry.family.name.startswith("gpu_allocation"):
            assert "mig_uuid" not in entry.label_names
