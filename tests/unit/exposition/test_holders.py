"""`gpu-exporter holders`: the evidence for each holder, and the doubts about it."""

from __future__ import annotations

import json

import pytest
from tests.testbed.simulated_node import SimulatedNode

from gpu_exporter.agent.attribution.resolve import resolve
from gpu_exporter.agent.devices.scenario import parse_scenario
from gpu_exporter.agent.exposition.health import judge_health
from gpu_exporter.agent.exposition.holders import render_holders
from gpu_exporter.agent.exposition.json_format import list_rows, render_json
from gpu_exporter.agent.exposition.page import render_page
from gpu_exporter.agent.exposition.publisher import no_history
from gpu_exporter.agent.exposition.series import list_series
from gpu_exporter.common.model.holders import Grant, Holder, HolderKey, SourceStatus
from gpu_exporter.common.model.readings import CollectorOutcome
from gpu_exporter.common.model.units import UnitId
from gpu_exporter.common.model.views import View

JOB = Holder(HolderKey("slurm", "lab/7/0/1"), job_id="7", source="slurm")


@pytest.fixture(scope="module")
def node() -> SimulatedNode:
    job = {"gpu": 0, "kind": "job", "name": "7", "user": "ada"}
    node = SimulatedNode(parse_scenario({"gpus": [{"model": "H100"}, {"model": "H100"}], "holders": [job]}))
    node.run(60)
    return node


def lines(view: View) -> list[str]:
    return render_holders(view).splitlines()


@pytest.mark.parametrize(
    ("grant", "basis"),
    [
        (Grant("minor", "{minor}", JOB, number="IDX 0"), "IDX 0: device file {minor}"),
        (Grant("index", "0", JOB, number="IDX 0"), "IDX 0: position 0 of the driver's list"),
        (Grant("uuid", "{uuid}", JOB, number="IDX 0"), "IDX 0: UUID"),
        (Grant("uuid", "{uuid}::2", JOB), "UUID"),
        (Grant("index", "0", JOB, number="0"), "position 0 of the driver's list"),
        (Grant("uuid", "{uuid}", JOB, witnesses="step, slurmctld"), "UUID (step, slurmctld)"),
    ],
)
def test_the_evidence_shows_the_number_of_the_source_and_how_it_was_resolved(
    node: SimulatedNode, grant: Grant, basis: str
) -> None:
    snapshots = [placed.snapshot for placed in node.placed().values()]
    identity = snapshots[0].identity
    names = {"minor": identity.minor, "uuid": identity.uuid}
    resolution = resolve([grant._replace(device=grant.device.format(**names))], snapshots)
    assert resolution.allocations[0][0].basis == basis.format(**names)


def test_the_evidence_shows_a_gpu_that_was_resolved_earlier(node: SimulatedNode) -> None:
    grant = Grant("unproven", "0", JOB, number="IDX 0", reason="gres.conf was changed")
    snapshots = [placed.snapshot for placed in node.placed().values()]
    unit = UnitId(snapshots[1].identity.uuid)
    resolution = resolve([grant], snapshots, numbers={(JOB.key, "IDX 0"): unit})
    assert resolution.allocations[0][0].basis == "IDX 0, which named this GPU when the holder began"


def test_a_line_shows_the_holder_the_evidence_and_the_doubt(node: SimulatedNode) -> None:
    view = node.view()
    (held,) = view.allocations
    shared = held.allocation._replace(
        share="shard", share_ratio=0.5, contradiction="processes of job 8 run here", basis="IDX 0: device file 0"
    )
    view = view._replace(allocations=(held._replace(allocation=shared, unconfirmed_s=65.0),))
    first = lines(view)[1]
    for cell in ("job 7", "ada", "shard 50%", "IDX 0: device file 0", "1m ago", "processes of job 8 run here"):
        assert cell in first
    assert json.loads(render_json(view))["allocations"][0]["doubt"] == "processes of job 8 run here"
    assert lines(view)[2].split()[2] == "(free)"


def test_a_gpu_is_free_only_if_every_source_has_answered(node: SimulatedNode) -> None:
    view = node.view()
    kubelet = SourceStatus("kubelet", up=True, complete=True, last_success_wall=1.0)
    for sources, doubt in (
        ((), "no source of holders"),
        ((kubelet, kubelet._replace(name="slurm", up=False)), "source slurm does not answer"),
        ((kubelet._replace(complete=False),), "a holder of source kubelet may have it: the reason is below"),
        ((kubelet,), "a holder has started, and its GPU is not known yet"),
    ):
        status = view.status._replace(attribution_known=False, sources=sources)
        assert lines(view._replace(status=status))[2].endswith(doubt)
    used = view.gpus
    not_free = used[1]._replace(not_free={"": "in use by container 0123456789ab, which no source reports"})
    assert "(unknown)" in lines(view._replace(gpus=(used[0], not_free)))[2]


def test_a_gpu_of_a_closed_node_is_not_free(node: SimulatedNode) -> None:
    """Slurm has drained the node, and one job still runs."""

    def closed(view: View) -> list[tuple[str, ...]]:
        (found,) = [each.rows for each in list_series(view) if each.family.name == "gpu_node_closed"] or [[]]
        return [labels for labels, _ in found]

    view = node.view()
    source = SourceStatus("slurm", up=True, complete=True, last_success_wall=1.0)
    drained = source._replace(closed="drained", closed_reason="bad\nfan")
    view = view._replace(status=view.status._replace(sources=(drained,)))
    reason = "slurm has closed this node: drained (bad\N{REPLACEMENT CHARACTER}fan)"
    assert lines(view)[2].split()[2] == "(closed)" and lines(view)[2].endswith(reason)
    assert [row.state for row in list_rows(view)].count("free") == 0
    assert list_rows(view)[1].state == "closed" and list_rows(view)[1].why.startswith("slurm has closed this node")
    assert closed(view) == [("slurm", "drained")]
    assert json.loads(render_json(view))["attribution"][0]["closed"] == "drained"
    assert "<b>1</b>Closed" in render_page(view, no_history)
    for status in (
        view.status._replace(sources=(source,)),
        view.status._replace(sources=(drained,), attribution_known=False),
    ):
        other = view._replace(status=status)
        assert list_rows(other)[1].state == ("free" if status.attribution_known else "unknown")
        assert "Closed" not in render_page(other, no_history)


def test_the_status_of_each_source_is_shown(node: SimulatedNode) -> None:
    view = node.view()
    sources = (
        SourceStatus("kubelet", up=True, complete=True, last_success_wall=1.0, conflicts=2, notice="a\nnotice"),
        SourceStatus("slurm", up=False, complete=False, last_success_wall=None, error="slurmctld is away"),
    )
    shown = lines(view._replace(status=view.status._replace(sources=sources)))[-3:]
    assert shown == [
        "source kubelet: answers, 2 conflicts",
        "source kubelet: a\N{REPLACEMENT CHARACTER}notice",
        "source slurm: never answered: slurmctld is away",
    ]
    assert "no source of holders is configured" in lines(view._replace(status=view.status._replace(sources=())))[-1]


def test_a_device_health_check_ignores_sources_and_collectors(node: SimulatedNode) -> None:
    view = node.view()
    mute = view._replace(
        status=view.status._replace(sources=(SourceStatus("slurm", False, False, None, error="away"),))
    )
    assert (judge_health(mute), judge_health(mute, devices_only=True)) == ("partial", "ok")
    failed = view.gpus[0].snapshot._replace(outcomes=(CollectorOutcome("ecc", False, 0.1, "E"),))
    odd = view._replace(gpus=(view.gpus[0]._replace(snapshot=failed), view.gpus[1]))
    assert (judge_health(odd), judge_health(odd, devices_only=True)) == ("partial", "ok")
    lost = view._replace(gpus=(view.gpus[0], view.gpus[1]._replace(hung=True)))
    assert judge_health(lost, devices_only=True) == "partial"
    assert judge_health(view._replace(gpus=()), devices_only=True) in ("no_data", "none_expected")
