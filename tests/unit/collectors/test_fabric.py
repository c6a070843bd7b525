"""The registration with the NVLink fabric: for how long it is missing, and what this means for the GPU."""

from __future__ import annotations

from typing import cast

import pytest
from tests.testbed.samples import value
from tests.testbed.simulated_node import SimulatedNode

from gpu_exporter.agent.collectors.contract import Cycle, Totals
from gpu_exporter.agent.collectors.fabric import collect_fabric
from gpu_exporter.agent.collectors.facts import take_facts
from gpu_exporter.agent.devices.protocol import Device, Fabric
from gpu_exporter.agent.devices.scenario import parse_scenario
from gpu_exporter.agent.node.conditions import FABRIC_PATIENCE_S, LINKS_PATIENCE_S, list_conditions
from gpu_exporter.common.model.readings import Facts
from gpu_exporter.common.model.views import GpuView


class Board(Device):
    """A board whose registration a test sets."""

    fabric = Fabric(3)
    links = 18

    def read_nvlinks_active(self) -> int:
        return self.links

    def read_fabric(self) -> Fabric:
        return self.fabric


def wait_s(board: Board, totals: Totals, now: float) -> float | None:
    cycle = Cycle(board, {}, lambda: now, totals)
    collect_fabric(cycle)
    return take_facts(cycle.samples).fabric_wait_s


def test_the_wait_counts_while_the_gpu_answers_and_before_a_first_completion_from_the_boot() -> None:
    """The monotonic clock starts at the boot, so a new process judges as the old one."""
    board, totals = Board(), Totals()
    board.fabric = Fabric(2)
    assert wait_s(board, totals, 5000.0) == 5000.0
    board.fabric = Fabric(3)
    assert wait_s(board, totals, 6000.0) is None
    board.fabric = Fabric(1)
    assert [wait_s(board, totals, at) for at in (6010.0, 6310.0)] == [0.0, 300.0]
    totals.forget_last()  # the GPU was lost or released: it may have been reset
    assert [wait_s(board, totals, at) for at in (9000.0, 9010.0)] == [0.0, 10.0]
    board.fabric = Fabric(3)
    assert wait_s(board, totals, 9020.0) is None
    board.fabric = Fabric(2)
    assert wait_s(board, totals, 9900.0) == 0.0, "another wait"
    board.fabric = Fabric(4, "insufficient resources")
    assert wait_s(board, totals, 9910.0) is None


def seen(**facts: float | str | None) -> GpuView:
    node = SimulatedNode(parse_scenario({"gpus": [{"model": "H100"}]}))
    (gpu,) = node.run(10).gpus
    return gpu._replace(snapshot=gpu.snapshot._replace(facts=Facts(**facts)))  # type: ignore[arg-type]


@pytest.mark.parametrize("after", [0.0, FABRIC_PATIENCE_S - 1, FABRIC_PATIENCE_S, 1e6])
def test_a_missing_registration_makes_a_gpu_unusable_after_ten_minutes(after: float) -> None:
    (condition,) = list_conditions(seen(fabric=2, fabric_wait_s=after))
    assert condition.name == "fabric_not_ready"
    assert condition.severity == ("unusable" if after >= FABRIC_PATIENCE_S else "degraded")


def test_links_count_as_gone_only_if_they_were_up_and_for_a_minute() -> None:
    for up, most, gone, severity in (
        (0, 18, 0.0, "degraded"),  # after a reset, links train
        (0, 18, LINKS_PATIENCE_S, "unusable"),
        (17, 18, None, "degraded"),
        (18, 18, None, ""),
        (0, 0, 1e6, ""),
        (12, 0, None, ""),
    ):
        found = list_conditions(seen(nvlinks=up, nvlinks_gone_s=gone)._replace(links=most))
        assert [each.severity for each in found] == [severity] * bool(severity)
    assert list_conditions(seen()._replace(links=18)) == [], "the number is unknown"


def test_the_time_without_a_link_counts_while_the_gpu_answers() -> None:
    board, totals = Board(), Totals()

    def gone_s(links: int, now: float) -> float | None:
        board.links = links
        cycle = Cycle(board, {}, lambda: now, totals)
        collect_fabric(cycle)
        return take_facts(cycle.samples).nvlinks_gone_s

    assert [gone_s(18, 10.0), gone_s(0, 20.0), gone_s(0, 90.0)] == [None, 0.0, 70.0]
    totals.forget_last()  # the GPU was lost
    assert [gone_s(0, 500.0), gone_s(0, 510.0), gone_s(1, 520.0), gone_s(0, 530.0)] == [0.0, 10.0, None, 0.0]


@pytest.mark.parametrize(
    ("pending", "severity"), [(1, "degraded"), (None, "degraded"), (0, "unusable")], ids=["pending", "unknown", "none"]
)
def test_a_drain_and_reset_is_degraded_unless_no_remap_waits(pending: int | None, severity: str) -> None:
    """With MIG instances the driver does not report remaps."""
    found = {each.name: each.severity for each in list_conditions(seen(recovery_action=4, remap_pending=pending))}
    assert found["recovery_action"] == severity


def test_the_unusable_conditions_come_first() -> None:
    found = list_conditions(seen(remap_pending=1, remap_failed=1, fabric=4, nvlinks=17)._replace(links=18))
    assert [each.severity for each in found] == ["unusable", "unusable", "degraded", "degraded"]


def test_the_simulated_board_publishes_links_and_fabric() -> None:
    node = SimulatedNode(
        parse_scenario({"gpus": [{"model": "H100", "health": {"nvlinks_down": 2, "fabric_status": 3}}]})
    )
    node.run(30)
    assert value(node.readings[0], "gpu_nvlinks_active") == 16
    assert value(node.readings[0], "gpu_fabric_status", "") == 3


def test_a_remap_that_begins_drains_nobody_at_any_moment() -> None:
    scenario = parse_scenario({"gpus": [{"model": "H100", "health": {"recovery_action": 0}}]})
    node = SimulatedNode(scenario)
    node.run(33)
    health = cast("dict[str, int]", scenario.gpus[0].health)
    health.update(remap_pending=1, recovery_action=4)
    found = [{each.name: each.severity for each in list_conditions(node.run(1).gpus[0])} for _ in range(40)]
    assert found[-1] == {"recovery_action": "degraded", "row_remap_pending": "degraded"}
    assert all("unusable" not in each.values() for each in found)


@pytest.mark.parametrize(
    ("health", "is_idle"), [({"fabric_status": 4}, False), ({"remap_pending": 1}, True), ({}, True)]
)
def test_an_idle_holder_of_an_unusable_gpu_is_unknown_and_a_working_one_works(
    health: dict[str, int], is_idle: bool
) -> None:
    """Its programs may fail on this GPU: this is no fault of the holder."""
    gpus = [{"model": "H100", "health": health, "load": {"kind": "constant", "value": load}} for load in (0.0, 0.8)]
    holders = [{"gpu": gpu, "kind": "pod", "name": f"ml/{name}/main"} for gpu, name in enumerate(("idle", "busy"))]
    node = SimulatedNode(parse_scenario({"gpus": gpus, "holders": holders}))
    idle, busy = node.run(900).allocations
    assert (idle.totals.idle_run_s is not None, idle.obstacle) == (is_idle, "" if is_idle else "unusable")
    assert idle.verdict.state == ("held_idle" if is_idle else "unknown")
    assert ("NVLink fabric failed" in idle.verdict.evidence) is not is_idle
    assert (busy.verdict.state, busy.obstacle, busy.totals.idle_run_s) == ("healthy", "", 0.0)
