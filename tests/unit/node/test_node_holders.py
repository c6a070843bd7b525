"""Views of a node: holders that are lost, contradicted, not offered, or followed by others."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.testbed.simulated_node import SimulatedNode
from tests.unit.node.node_bench import (
    GPU,
    IDLE,
    JOB,
    LOST,
    POD,
    job,
    node_of,
    numbered,
    obstacles,
    of_job,
    only,
    seen_before,
    values,
)

from gpu_exporter.agent.attribution.holders import Devices, _list_left
from gpu_exporter.agent.attribution.numbers import KEEP_S
from gpu_exporter.agent.attribution.resolve import Resolution
from gpu_exporter.agent.devices.scenario import parse_scenario
from gpu_exporter.agent.exposition.holders import render_holders
from gpu_exporter.agent.exposition.json_format import list_rows
from gpu_exporter.agent.exposition.page import render_page
from gpu_exporter.agent.exposition.series import list_series
from gpu_exporter.agent.ledger.state import StateFile
from gpu_exporter.common.model.holders import Grant, Holder, HolderKey
from gpu_exporter.common.model.readings import GpuProcess, ProcessList
from gpu_exporter.common.model.units import UnitId
from gpu_exporter.common.model.views import Verdict


def test_a_gpu_that_leaves_the_list_during_a_restart_gives_no_job_another_gpu(tmp_path: Path) -> None:
    """Job 42 has had IDX 1 before. Job 43 starts after GPU-0 was lost, when NVML counts from GPU-1 on."""
    state = StateFile(tmp_path, 10.0, "boot")
    before = node_of(GPU, GPU, GPU, holders=[], state=state)
    before.run(5)
    uuids = [sampler.device.identity.uuid for sampler in before.samplers]
    assert numbered(before, [job("42", 1)], expected=3) == {"42": uuids[1]}
    before.state.write_state()

    after = node_of(GPU, GPU, GPU, holders=[], state=StateFile(tmp_path, 10.0, "boot"))
    after.state.restore()
    first, *others = after.samplers
    for index, sampler in enumerate(others):
        sampler.device.identity = sampler.device.identity._replace(index=index)
    after.samplers = others
    after.sample()
    assert numbered(after, [job("42", 1), job("43", 0)], expected=3) == {"42": uuids[1]}
    grants = [job("43", 0)._replace(confirmed=after.clock.monotonic())]
    unresolved = after.state.on_poll(grants, after.placed(), expected=3).unresolved
    assert [reason for _, reason in unresolved] == ["positions may have changed: 2 of 3 GPUs are in the driver's list"]
    assert not after.state.is_resolved()
    after.inventory = seen_before(before)
    assert numbered(after, [job("43", 0)]) == {}
    after.samplers = [*others, first]
    after.sample()
    # two GPUs have one place in the list, so the order is unknown
    assert numbered(after, [job("44", 2)], expected=3) == {}


def test_numbers_of_holders_that_are_gone_are_forgotten(tmp_path: Path) -> None:
    node = node_of(GPU, GPU, holders=[])
    node.run(5)
    numbered(node, [job("42", 1)])
    node.clock.advance(KEEP_S + 1)
    numbered(node, [])
    assert numbered(node, [job("42", 1)._replace(kind="unproven", reason="x")]) == {}


def test_a_lost_or_hung_gpu_has_no_idle_run_because_0_would_mean_active() -> None:
    node = node_of({"model": "H100"}, holders=[POD])
    assert only(node.run(600)).totals.idle_run_s == pytest.approx(595.0, abs=3.0)
    node.hung.add(node.samplers[0].device.identity.uuid)
    assert only(node.run(1)).totals.idle_run_s is None
    node.hung.clear()
    assert only(node.run(10)).totals.idle_run_s is not None
    assert only(node.run(30, sample=False)).totals.idle_run_s is None
    names = {series.family.name for series in list_series(node.view())}
    assert "gpu_allocation_held_seconds_total" in names
    assert not names & {"gpu_allocation_idle_run_seconds", "gpu_allocation_idle_run_witnesses"}


def test_a_suspended_job_is_unknown_with_the_reason() -> None:
    node = node_of({"model": "H100"}, holders=[])
    node.run(60)
    grant = job("7", 0)._replace(running=False, why="the job is SUSPENDED", obstacle="suspended")
    for _ in range(3):
        node.run(5)
        numbered(node, [grant])
    view = only(node.view())
    assert (view.verdict, view.totals.idle_run_s) == (Verdict("unknown", "the job is SUSPENDED"), None)
    assert obstacles(node.view()) == ["suspended"]


def test_a_holder_keeps_a_gpu_that_was_lost_before_the_exporters_start_without_values(tmp_path: Path) -> None:
    state = StateFile(tmp_path, 10.0, "boot")
    before = node_of(GPU, GPU, holders=[], state=state)
    before.run(5)
    numbered(before, [job("42", 0)])
    before.state.write_state()
    after = node_of(GPU, GPU, holders=[], state=StateFile(tmp_path, 10.0, "boot"))
    after.state.restore()
    after.inventory = seen_before(before)
    numbered(after, [job("42", 0)])
    view = only(after.view())
    assert (view.verdict.state, view.totals.idle_run_s, view.utilization) == ("unknown", None, None)


def test_a_contradicted_holder_is_unknown_and_never_idle() -> None:
    node = node_of(IDLE, holders=[JOB])
    before = node.run(900)
    assert only(before).verdict.state == "held_idle"
    assert only(before).totals.idle_run_s > 800
    node.owners = {node.unit(0): (of_job("43"),)}
    view = node.run(900)
    allocation = only(view)
    evidence = "processes of job 43 run here, but scenario reports job 42"
    assert (allocation.verdict.state, allocation.verdict.evidence) == ("unknown", evidence)
    assert (allocation.utilization, allocation.memory_used_bytes, allocation.power_w) == (None, None, None)
    for counter in ("busy_s", "observed_s", "idle_s"):  # the last interval before the look is not charged either
        assert getattr(allocation.totals, counter) <= getattr(only(before).totals, counter)
    assert allocation.totals.held_s > only(before).totals.held_s + 890
    assert values(view, "gpu_allocation_idle_run_seconds") == []
    assert values(view, "gpu_allocation_held_seconds_total") != []
    assert values(view, "gpu_allocated") == [1.0]  # by any holder
    (row,) = list_rows(view)
    assert (row.holder, row.state, row.why) == ("job 42", "unknown", evidence)
    assert node.poller.statuses()[0].conflicts == 180
    node.owners = {}
    assert only(node.run(60)).verdict.evidence == "processes of job 43 ran here, but scenario reports job 42"
    node.owners = {node.unit(0): (of_job("42"),)}
    after = only(node.run(60))
    assert 0 < after.totals.idle_run_s <= 60  # a new run, from the look that confirmed the holder
    assert values(node.run(5), "gpu_allocation_idle_run_seconds") != []


def test_work_during_a_contradiction_is_charged_to_no_holder() -> None:
    node = node_of(GPU, holders=[JOB])
    node.owners = {node.unit(0): (of_job("43"),)}
    assert only(node.run(300)).totals.observed_s == 0.0
    node.owners = {node.unit(0): (of_job("42"),)}
    assert only(node.run(5)).totals.observed_s == 0.0  # the interval of a change is charged to no holder
    assert only(node.run(60)).totals.busy_s == pytest.approx(30.0, abs=1.0)


def test_both_holders_of_a_swapped_pair_are_unknown() -> None:
    node = node_of(IDLE, GPU, holders=[JOB, {**JOB, "gpu": 1, "name": "43"}])
    node.owners = {node.unit(0): (of_job("43"),), node.unit(1): (of_job("42"),)}
    assert [a.verdict.state for a in node.run(900).allocations] == ["unknown", "unknown"]


def test_a_gpu_in_use_without_a_holder_is_not_free() -> None:
    node = node_of(IDLE, GPU, holders=[JOB])
    assert values(node.run(30), "gpu_allocated") == [1.0, 0.0]
    node.owners = {node.unit(1): (of_job("43"),)}
    view = node.run(30)
    assert values(view, "gpu_allocated") == [1.0]
    row = list_rows(view)[1]
    assert (row.holder, row.state, row.why) == ("", "unknown", "in use by job 43, which no source reports")
    node.owners = {}
    view = node.run(30)
    assert values(view, "gpu_allocated") == [1.0, 0.0], "no source of holders has it"
    row = list_rows(view)[1]
    assert (row.state, row.why) == ("unknown", "in use by an unknown holder")


def test_a_unit_is_free_only_if_nothing_was_on_it_in_the_last_readings() -> None:
    """In the table, on the page, in JSON and in the list of holders alike."""
    burst = {"model": "H100", "load": {"kind": "curve", "points": [[0, 0.5], [60, 0.5], [60, 0]]}}
    node = node_of(IDLE, IDLE, burst, holders=[JOB])
    view = node.run(62)
    states = [row.state for row in list_rows(view)]
    assert (states[1:], list_rows(view)[2].why) == (["free", "unknown"], "in use by an unknown holder")
    lines = render_holders(view).splitlines()
    assert "(free)" in lines[2] and lines[3].endswith("  in use by an unknown holder") and "(unknown)" in lines[3]
    assert "<b>1</b>Free" in render_page(view, node.state.history)
    view = node.run(60)
    assert [row.state for row in list_rows(view)][1:] == ["free", "free"], "it has been quiet since"
    gpu = view.gpus[1]
    facts = gpu.snapshot.facts._replace(compute_processes=1.0)
    view = view._replace(gpus=(gpu._replace(snapshot=gpu.snapshot._replace(facts=facts)), view.gpus[2]))
    assert [(row.state, row.why) for row in list_rows(view)] == [
        ("unknown", "a process of an unknown holder has opened it"),
        ("free", ""),
    ]
    withheld = view._replace(gpus=(view.gpus[0]._replace(withheld=True),))
    assert [row.state for row in list_rows(withheld)] == ["stale"]


def test_a_gpu_that_its_scheduler_does_not_offer_is_not_free() -> None:
    node = node_of(IDLE, GPU, {"model": "H100", "mig": [{"profile": "1g.10gb"}, {"profile": "1g.10gb"}]}, holders=[JOB])
    assert values(node.run(30), "gpu_allocatable") == []
    nobody = Holder(HolderKey("kubernetes", ""))
    first = node.view().gpus[2].snapshot.instances[0].uuid
    node.offers = [Grant("uuid", first, nobody)]
    view = node.run(30)
    assert values(view, "gpu_allocatable") == [0.0, 0.0, 1.0]
    assert values(view, "gpu_allocated") == [1.0], "a held GPU is never free"
    shown = [(row.gpu, row.state, row.why.partition(":")[0]) for row in list_rows(view)[1:]]
    assert shown == [
        ("1", "unknown", "the kubelet does not offer this GPU or instance to pods"),
        ("2", "mig", ""),
        ("2:1/0", "free", ""),
        ("2:2/0", "unknown", "the kubelet does not offer this GPU or instance to pods"),
    ]
    node.offers = [Grant("uuid", "GPU-of-another-node", nobody)]
    assert values(node.run(30), "gpu_allocatable") == []


def test_an_offer_by_position_is_unknown_while_a_gpu_is_lost() -> None:
    node = node_of(GPU, {"model": "H100", "faults": LOST}, holders=[])
    node.offers = [Grant("index", "0", Holder(HolderKey("kubernetes", "")))]
    assert values(node.run(25), "gpu_allocatable") == [1.0, 0.0]
    assert values(node.run(30), "gpu_allocatable") == []


def test_an_instance_in_use_without_a_holder_is_not_free() -> None:
    node = node_of({"model": "H100", "mig": [{"profile": "1g.10gb"}, {"profile": "1g.10gb"}]}, holders=[])
    instances = node.run(30).gpus[0].snapshot.instances
    node.owners = {node.unit(0, instances[1].uuid): (of_job("43"),)}
    view = node.run(30)
    assert values(view, "gpu_allocated") == []
    assert [(row.state, row.why) for row in list_rows(view)] == [
        ("mig", ""),
        ("free", ""),
        ("unknown", "in use by job 43, which no source reports"),
    ]


def test_an_idle_run_that_a_contradiction_ends_is_soon_written_to_the_state_file() -> None:
    node = node_of(IDLE, holders=[JOB])
    node.run(300)
    node.state.ledger.long_run_ended = False
    node.owners = {node.unit(0): (of_job("43"),)}
    node.run(10)
    assert node.state.ledger.long_run_ended


def test_a_holder_that_is_confirmed_every_minute_is_judged_over_the_whole_window(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its readings wait for the controller for up to a minute, and not for the three minutes after which it is
    unconfirmed.
    """
    decoder = {"kind": "curve", "points": [[0, 1], [300, 1], [300, 0]]}
    node = node_of({"model": "H100", "decoder": decoder}, holders=[JOB])
    poll = node.poller.poll
    began = node.clock.monotonic()

    def seldom() -> list[Grant]:
        minute = (node.clock.monotonic() - began) // 60 * 60 + began
        return [grant._replace(confirmed=minute, renewed_s=60.0) for grant in poll()]

    monkeypatch.setattr(node.poller, "poll", seldom)
    seen = only(node.run(815))
    assert 440 < (seen.totals.idle_run_s or 0.0) < 480  # up to 780, the last confirmation
    assert (seen.verdict.state, seen.unconfirmed_s) == ("unknown", pytest.approx(35, abs=5))
    assert "decoder showed activity before" in seen.verdict.evidence
    assert only(node.run(500)).verdict.state == "held_idle"


def test_an_instance_without_hardware_counters_is_neither_idle_nor_zero() -> None:
    """A MIG instance of an A100: the driver has no counter for the instance alone."""
    mig = [{"profile": "3g.20gb", "load": {"kind": "constant", "value": 0.0}}]
    node = node_of({"model": "A100", "mig": mig}, holders=[{"gpu": 0, "mig": 0, "kind": "pod", "name": "ml/a/main"}])
    view = node.run(120)
    assert obstacles(view) == ["no_source"]
    assert [row.idle_s for row in list_rows(view) if row.holder] == [None]
    assert values(view, "gpu_allocation_idle_run_seconds") == []


def test_an_instance_whose_processes_were_not_read_is_not_free() -> None:
    """Instances that cannot be listed now are kept from the earlier list, without a list of processes."""
    node = SimulatedNode(parse_scenario({"gpus": [{"model": "H100", "mig": [{"profile": "1g.10gb"}]}]}))
    node.run(5)
    board = node.readings[0]
    unit = UnitId(board.identity.uuid, board.instances[0].uuid)
    done = Grant("uuid", unit.mig_uuid, Holder(HolderKey("kubernetes", "done"), "ml", "done"))
    resolution = Resolution([], [], [], {}, {unit: done}, [])
    for known, listed, left in (
        (True, (), False),
        (False, (), True),
        (True, (GpuProcess(7, board.instances[0].mig),), True),
    ):
        snapshot = board._replace(instances_known=known, processes=ProcessList(0.0, listed))
        found = _list_left(resolution, Devices({board.identity.uuid: snapshot}, "", True))
        assert bool(found) is left, (known, listed)
    elsewhere = board._replace(processes=ProcessList(0.0, (GpuProcess(7, "9/9"),)))
    assert not _list_left(resolution, Devices({board.identity.uuid: elsewhere}, "", True)), "another instance's process"


def test_jobs_that_followed_each_other_between_two_polls_have_their_hours_and_shared_nothing() -> None:
    node = node_of({"model": "H100", "load": {"kind": "constant", "value": 0.5}}, holders=[])
    node.run(60)
    uuid = node.samplers[0].device.identity.uuid
    now, wall = node.clock.monotonic(), node.clock.wall()
    ended = [
        Grant(
            "uuid",
            uuid,
            Holder(HolderKey("slurm", f"lab/{job}/0/0"), job_id=job, user=job, source="slurm", start_wall=0.0),
            confirmed=now - after,
            start_here=wall - before,  # its start by slurmctld's clock is not used here
        )
        for job, before, after in (("8", 8.0, 5.0), ("7", 12.0, 8.0), ("9", 5.0, 1.0))
    ]
    resolution = node.state.on_poll([], node.placed(), ended=ended)
    assert resolution.allocations == [], "they hold nothing now"
    node.run(70)  # a new tenant is published as 0 for its first minute
    tenants = {tenant.user: totals for tenant, totals in node.view().tenants}
    assert {job: round(totals.held_s) for job, totals in tenants.items()} == {"7": 4, "8": 3, "9": 4}
    for totals in tenants.values():
        assert totals.known_s == pytest.approx(totals.held_s)
        assert totals.busy_s == pytest.approx(totals.held_s / 2)
