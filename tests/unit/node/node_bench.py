"""What the tests of this subject share: views of a node: what is withheld while a GPU or a call does not answer."""

from __future__ import annotations

from typing import Any

from tests.testbed.simulated_node import SimulatedNode

from gpu_exporter.agent.devices.scenario import parse_scenario
from gpu_exporter.agent.exposition.series import list_series
from gpu_exporter.agent.inventory.expected import ExpectedDevice
from gpu_exporter.agent.inventory.inventory import Inventory
from gpu_exporter.agent.ledger.state import StateFile
from gpu_exporter.common.cgroup import ProcessOwner
from gpu_exporter.common.model.holders import Grant, Holder, HolderKey
from gpu_exporter.common.model.views import AllocationView, View


def node_of(*gpus: dict[str, Any], holders: list[dict[str, Any]], state: StateFile | None = None) -> SimulatedNode:
    return SimulatedNode(parse_scenario({"gpus": list(gpus), "holders": holders}), state=state)


def values(view: View, family: str) -> list[float]:
    return [value for series in list_series(view) if series.family.name == family for _, value in series.rows]


def obstacles(view: View) -> list[str]:
    """Why allocations have no idle run, by allocation."""
    found = [series for series in list_series(view) if series.family.name == "gpu_allocation_activity_unknown"]
    return [labels[-1] for series in found for labels, _ in series.rows]


def only(view: View) -> AllocationView:
    (allocation,) = view.allocations
    return allocation


POD = {"gpu": 0, "kind": "pod", "name": "ml/a/main", "processes": 1, "memory_gib": 2}
GPU = {"model": "H100", "load": {"kind": "constant", "value": 0.5}}
LOST = [{"at": 30, "call": "*", "error": "NVML_ERROR_GPU_IS_LOST"}]


def numbered(node: SimulatedNode, grants: list[Grant], expected: int = 0) -> dict[str, str]:
    """UUID of each holder's GPU after a poll with these grants."""
    confirmed = [grant._replace(confirmed=node.clock.monotonic()) for grant in grants]
    allocations = node.state.on_poll(confirmed, node.placed(), expected=expected).allocations
    return {allocation.holder.job_id: allocation.unit.uuid for allocation, _ in allocations}


def seen_before(node: SimulatedNode) -> Inventory:
    """The inventory that expects the first GPU of a node."""
    identity = node.samplers[0].device.identity
    return Inventory((ExpectedDevice(identity.uuid, identity.pci_bus_id, identity.index, identity.name),))


def job(number: str, index: int) -> Grant:
    holder = Holder(HolderKey("slurm", f"lab/{number}/0/1"), job_id=number, source="slurm")
    return Grant("index", str(index), holder, number=f"IDX {index}")


JOB = {"gpu": 0, "kind": "job", "name": "42", "processes": 1, "memory_gib": 2}
IDLE = {"model": "H100"}


def of_job(number: str) -> ProcessOwner:
    return ProcessOwner(slurm=True, job=number)
