"""Facts are the values that users see: each fact is the value of a published sample."""

from __future__ import annotations

import pytest
from tests.testbed.samples import value
from tests.testbed.simulated_node import SimulatedNode

from gpu_exporter.agent.collectors.facts import take_facts
from gpu_exporter.agent.devices.scenario import parse_scenario
from gpu_exporter.common.model.readings import Facts

FAULTS = {"fabric_status": 2, "nvlinks_down": 18, "remap_pending": 1, "remap_failed": 1, "recovery_action": 4}
GPU = {
    "model": "H100",
    "health": FAULTS,
    "load": {"kind": "constant", "value": 0.5},
    "throttle": [{"reason": "power_cap", "share": 0.5}],
}
MIG = {"model": "H100", "mig": [{"profile": "1g.10gb", "load": {"kind": "constant", "value": 0.5}}]}
HOLDERS = [
    {"gpu": 0, "kind": "pod", "name": "ml/a/main", "processes": 2, "memory_gib": 2},
    {"gpu": 1, "mig": 0, "kind": "pod", "name": "ml/b/main", "processes": 1, "memory_gib": 3},
]


@pytest.fixture(scope="module")
def node() -> SimulatedNode:
    node = SimulatedNode(parse_scenario({"gpus": [GPU, MIG], "holders": HOLDERS}))
    node.run(30)
    return node


def test_every_fact_of_a_gpu_is_a_published_value(node: SimulatedNode) -> None:
    snapshot = node.readings[0]
    named = {
        "utilization": "gpu_utilization_ratio",
        "memory_used_bytes": "gpu_memory_used_bytes",
        "memory_total_bytes": "gpu_memory_total_bytes",
        "power_w": "gpu_power_watts",
        "power_limit_w": "gpu_power_limit_watts",
        "energy_j": "gpu_energy_joules_total",
        "temperature_celsius": "gpu_temperature_celsius",
        "compute_processes": "gpu_compute_processes",
        "graphics_processes": "gpu_graphics_processes",
        "recovery_action": "gpu_recovery_action",
        "remap_pending": "gpu_remapped_rows_pending",
        "remap_failed": "gpu_remapped_rows_failed",
        "nvlinks": "gpu_nvlinks_active",
        "fabric": "gpu_fabric_status",
        "nvlinks_gone_s": "gpu_nvlinks_down_seconds",
        "fabric_wait_s": "gpu_fabric_not_ready_seconds",
        "link": "gpu_pcie_link_bytes_per_second",
        "link_max": "gpu_pcie_link_max_bytes_per_second",
    }
    assert {*named, "throttle_s", "fabric_problem"} == set(Facts._fields)
    for field, family in named.items():
        fact = getattr(snapshot.facts, field)
        assert fact is not None
        labels = ("",) if family == "gpu_fabric_status" else ()
        assert fact == value(snapshot, family, *labels)
    assert snapshot.facts.compute_processes == 2.0
    assert snapshot.facts.throttle_s["power_cap"] == value(snapshot, "gpu_throttle_seconds_total", "power_cap") > 0


def test_facts_of_an_instance_are_its_own(node: SimulatedNode) -> None:
    board = node.readings[1]
    (instance,) = board.instances
    assert (board.facts.utilization, instance.facts.utilization) == (None, 0.5)
    assert instance.facts.memory_used_bytes == 3 * 2**30
    assert instance.facts.memory_total_bytes < board.facts.memory_total_bytes
    assert 0 < instance.facts.power_w < board.facts.power_w
    assert instance.facts.compute_processes is None


def test_without_samples_there_are_no_facts() -> None:
    assert take_facts(()) == Facts()
