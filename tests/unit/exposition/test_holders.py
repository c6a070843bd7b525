"""`gpu-exporter holders`: the evidence for each holder, and the doubts about it."""

from __future__ import annotations

import json

import pytest
from tests.testbed.simulated_node import SimulatedNode

from gpu_exporter.agent.attribution.resolve import resolve
from gpu_exporter.agent.devices.scenario import parse_scenario
from gpu_exporter.agent.exposition.health import judge_health
from gpu_exporter.agent.exposition.holders import render_holders
from gpu_exporter.agent.exposition.json_format import render_json
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
    assert resolution.allocations[0][0].basis == "IDX 0, which meant this GPU when the holder began"


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
    status = view.status._replace(attribution_known=False)
    assert lines(view._replace(status=status))[2].endswith("not every source has answered")
    used = view.gpus
    not_free = used[1]._replace(not_free={"": "in use by container 0123456789ab, which no source reports"})
    assert "(unknown)" in lines(view._replace(gpus=(used[0], not_free)))[2]


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
