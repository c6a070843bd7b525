"""The pure view: it never shows more than the records prove at that moment."""

from __future__ import annotations

import pytest
from tests.testbed.simulated_node import SimulatedNode

from gpu_exporter.agent.devices.scenario import parse_scenario
from gpu_exporter.agent.node.view import ViewRules, build_view
from gpu_exporter.common.model.holders import HolderKey, Use
from gpu_exporter.common.model.records import HolderRecord, NodeRecords
from gpu_exporter.common.model.units import UnitId
from gpu_exporter.common.model.views import AllocationView, Spin, Verdict
from gpu_exporter.diagnosis.loop import Findings

POD = {"gpu": 0, "kind": "pod", "name": "ml/a/main", "processes": 1, "memory_gib": 2}
RULES = ViewRules(withhold_s=5.0, keep_last_s=300.0)


@pytest.fixture(scope="module")
def node() -> SimulatedNode:
    """An idle GPU whose holder has an idle verdict."""
    node = SimulatedNode(parse_scenario({"gpus": [{"model": "H100"}], "holders": [POD]}))
    node.run(900)
    return node


def shown(node: SimulatedNode, records: NodeRecords, rules: ViewRules = RULES) -> AllocationView | None:
    allocations = build_view(records, node.view().status, node.diagnosis.loop.findings, rules).allocations
    return allocations[0] if allocations else None


def changed(node: SimulatedNode, **fields: object) -> NodeRecords:
    """The records, with changed fields of the only holder."""
    records = node.state.records(node.placed())
    (holder,) = records.holders
    return records._replace(holders=(holder._replace(**fields),))


def test_an_idle_verdict_ends_with_the_idle_run_even_before_the_next_judgement(node: SimulatedNode) -> None:
    records = node.state.records(node.placed())
    totals = records.holders[0].totals
    assert shown(node, changed(node)).verdict.state == "held_idle"
    unknown = shown(node, changed(node, totals=totals._replace(idle_run_s=None))).verdict
    assert unknown == ("unknown", "the exporter last saw the holder idle; its present activity is unknown")
    ended = changed(node, totals=totals._replace(idle_run_s=0.0))
    assert shown(node, ended).verdict == ("unknown", "its idle time has ended since its state was last judged")
    ((uuid, gpu),) = records.gpus.items()
    active = gpu.totals[""]._replace(active_by=("pcie", "power"), last_active_wall=records.wall - 5.0)
    seen = shown(node, ended._replace(gpus={uuid: gpu._replace(totals={"": active})})).verdict
    assert seen.evidence == (
        "its idle time has ended since its state was last judged; pcie and power showed activity 5 s ago"
    )


@pytest.mark.parametrize(
    ("spin", "state"),
    [(Spin(1000.0, "high"), "stalled"), (Spin(1000.0, "low"), "unknown"), (Spin(0.0, "none"), "unknown"), (None, "unknown")],
)  # fmt: skip
def test_a_stall_ends_with_its_run_even_before_the_next_judgement(
    node: SimulatedNode, spin: Spin | None, state: str
) -> None:
    records = changed(node, spin=spin)
    findings = Findings({records.holders[0].id: Verdict("stalled", "no progress")})
    (seen,) = build_view(records, node.view().status, findings, RULES).allocations
    assert seen.verdict.state == state


def test_activity_of_an_instance_is_reported_with_its_own_witness() -> None:
    part = {"profile": "1g.10gb", "load": {"kind": "constant", "value": 0}}
    node = SimulatedNode(parse_scenario({"gpus": [{"model": "H100", "mig": [part]}], "holders": [POD | {"mig": 0}]}))
    node.run(900)
    records = node.state.records(node.placed())
    ((uuid, gpu),) = records.gpus.items()
    totals = {key: each._replace(active_by=(key or "board",), last_active_wall=1.0) for key, each in gpu.totals.items()}
    woken = changed(node, totals=records.holders[0].totals._replace(idle_run_s=0.0))
    evidence = shown(node, woken._replace(gpus={uuid: gpu._replace(totals=totals)})).verdict.evidence
    assert "; MIG-" in evidence and "board" not in evidence


def test_an_unconfirmed_holder_is_first_unknown_and_then_gone(node: SimulatedNode) -> None:
    seen = shown(node, changed(node, unconfirmed_s=16.0))
    assert (seen.verdict.evidence, seen.totals.idle_run_s, seen.utilization) == (
        "no source has confirmed the holder for 16 s",
        None,
        None,
    )
    assert shown(node, changed(node, unconfirmed_s=300.0)) is not None
    assert shown(node, changed(node, unconfirmed_s=301.0)) is None


def test_a_holder_that_is_confirmed_less_often_is_doubted_later(node: SimulatedNode) -> None:
    """Such a holder is a job without a step here, which only the controller can confirm."""
    seen = shown(node, changed(node, unconfirmed_s=200.0, stale_s=200.0))
    assert (seen.verdict.state, seen.totals.idle_run_s is not None) == ("held_idle", True)
    assert shown(node, changed(node, unconfirmed_s=201.0, stale_s=200.0)).verdict.state == "unknown"
    assert shown(node, changed(node, unconfirmed_s=700.0, stale_s=720.0)) is not None
    assert shown(node, changed(node, unconfirmed_s=721.0, stale_s=720.0)) is None


def test_a_holder_of_a_gpu_that_is_not_here_is_not_shown(node: SimulatedNode) -> None:
    allocation = node.state.records(node.placed()).holders[0].allocation
    assert shown(node, changed(node, allocation=allocation._replace(unit=UnitId("GPU-elsewhere")))) is None


def test_no_value_of_a_shared_gpu_is_copied_to_a_holder(node: SimulatedNode) -> None:
    allocation = node.state.records(node.placed()).holders[0].allocation._replace(share="time_slice")
    seen = shown(node, changed(node, allocation=allocation))
    assert (seen.utilization, seen.memory_used_bytes, seen.power_w) == (None, None, None)
    own = shown(node, changed(node, allocation=allocation, ratio=0.25, use=Use(2, 2**30)))
    assert (own.utilization, own.memory_used_bytes, own.processes) == (0.25, 2**30, 2)
    doubted = changed(node, allocation=allocation._replace(contradiction="processes of others"), ratio=0.25)
    assert shown(node, doubted).utilization is None
    assert shown(node, changed(node, allocation=allocation, ratio=0.25, unconfirmed_s=16.0)).utilization is None


def test_a_holder_without_a_verdict_is_unknown(node: SimulatedNode) -> None:
    records = node.state.records(node.placed())
    (holder,) = records.holders
    key = HolderKey("kubernetes", "another/main")
    other: HolderRecord = holder._replace(
        allocation=holder.allocation._replace(holder=holder.allocation.holder._replace(key=key))
    )
    assert shown(node, records._replace(holders=(other,))).verdict == Verdict("unknown", "not judged yet")


def test_a_gpu_is_withheld_if_its_reading_is_old_or_its_call_hangs(node: SimulatedNode) -> None:
    records = node.state.records(node.placed())
    ((key, gpu),) = records.gpus.items()
    for old, hung, withheld in ((5.0, False, False), (5.1, False, True), (0.0, True, True)):
        later = records._replace(monotonic=gpu.snapshot.monotonic + old, gpus={key: gpu._replace(hung=hung)})
        view = build_view(later, node.view().status, node.diagnosis.loop.findings, RULES)
        assert view.gpus[0].withheld == withheld
        assert (view.allocations[0].verdict.state == "held_idle") == (not withheld)


def test_a_view_changes_nothing(node: SimulatedNode) -> None:
    """Scrapes of one moment get one view: reading it writes nothing."""
    version, verdicts = node.state.version(), node.diagnosis.loop.findings
    assert node.view() == node.view()
    assert (node.state.version(), node.diagnosis.loop.findings) == (version, verdicts)
