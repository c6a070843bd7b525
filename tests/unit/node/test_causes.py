"""From the evidence of a host to what is published: a simulated node whose holders are judged in turn."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.testbed.simulated_node import SimulatedNode

from gpu_exporter.agent.devices.scenario import parse_scenario
from gpu_exporter.agent.exposition.json_format import list_rows, render_json
from gpu_exporter.agent.exposition.series import list_series
from gpu_exporter.common.model.evidence import HostEvidence
from gpu_exporter.common.model.readings import GpuProcess, ProcessList
from gpu_exporter.common.model.views import AllocationView, View
from gpu_exporter.diagnosis.causes.case import HostLook
from gpu_exporter.diagnosis.looks import KEEP_S, LOOKS_MAX, NodeEvidence

CROWD = {
    "cpus": 4,
    "quota": 4,
    "cores": 4,
    "throttled": 0.71,
    "ranks": 1,
    "rank_cores": 4,
    "loaders": 0,
    "runnable": 96,
}
CALM = CROWD | {"cores": 3, "throttled": 0, "runnable": 4}


def start(gpus: list[dict[str, Any]], *holders: dict[str, Any]) -> SimulatedNode:
    entries = [{"kind": "job", "name": "7", "processes": 1, **holder} for holder in holders]
    return SimulatedNode(parse_scenario({"gpus": [{"model": "H100", **gpu} for gpu in gpus], "holders": entries}))


def constant(value: float) -> dict[str, Any]:
    return {"load": {"kind": "constant", "value": value}}


def named(view: View) -> list[list[tuple[str, str]]]:
    return [[(cause.name, cause.confidence) for cause in each.causes.found] for each in view.allocations]


def only(view: View) -> AllocationView:
    (allocation,) = view.allocations
    return allocation


def test_a_cause_is_published_with_its_state_and_ends_with_it() -> None:
    load = {"load": {"kind": "curve", "points": [[0, 0.31], [1260, 0.31], [1260, 0.9]]}}
    node = start([load], {"gpu": 0, "host": [{"at": 0, **CROWD}, {"at": 1260, **CALM}]})
    view = node.run(400)
    assert (only(view).verdict.state, named(view)) == ("unknown", [[]])  # seen for too short a time
    view = node.run(800)
    assert only(view).verdict.state == "low"
    assert named(view) == [[("cpu_oversubscribed", "high")]]
    series = {each.family.name: each.rows for each in list_series(view)}
    ((labels, value),) = series["gpu_allocation_cause"]
    assert (labels[-2:], value) == (("cpu_oversubscribed", "high"), 1.0)
    (row,) = list_rows(view)
    assert (row.cause, row.advice) == (
        "cpu_oversubscribed high",
        "set OMP_NUM_THREADS=4 (and the thread limit of other libraries)",
    )
    (allocation,) = json.loads(render_json(view))["allocations"]
    (cause,) = allocation["causes"]
    assert cause["evidence"] == "96 threads are runnable on 4 CPUs; the quota ran out in 71% of the periods"
    assert "torchtitan" in cause["gain"]
    view = node.run(1260)
    assert (only(view).verdict.state, named(view)) == ("healthy", [[]])
    assert "gpu_allocation_cause" not in {each.family.name for each in list_series(view)}


def test_a_holder_that_mends_itself_loses_the_cause_before_the_state() -> None:
    node = start([constant(0.31)], {"gpu": 0, "host": [{"at": 0, **CROWD}, {"at": 1200, **CALM}]})
    node.run(1200)
    view = node.run(400)
    assert only(view).verdict.state == "low"
    assert named(view) == [[]]


def test_the_first_row_of_a_holder_has_the_advice() -> None:
    entries = [{"gpu": gpu, "host": [{"at": 0, **CROWD}]} for gpu in (0, 1, 2)]
    rows = list_rows(start([constant(0.3)] * 3, *entries).run(1200))
    assert [bool(row.advice) for row in rows] == [True, False, False]
    assert {row.cause for row in rows} == {"cpu_oversubscribed high"}


def test_without_evidence_the_answer_says_what_it_needs() -> None:
    view = start([constant(0.3)], {"gpu": 0}).run(1200)
    assert named(view) == [[]]
    (row,) = list_rows(view)
    assert row.cause == "unknown"
    assert row.why.endswith("not enough evidence: needs the holder's cgroup: mount /sys/fs/cgroup (--path.cgroup)")


@pytest.mark.parametrize(("others", "part"), [(1, "(32 of 59 CPUs"), (0, "(59 CPUs")])
def test_the_advice_counts_on_the_free_cpus_of_gpus_that_nobody_holds(others: int, part: str) -> None:
    host = {"cpus": 64, "cores": 1.4, "throttled": 0, "host_cpus": 64, "host_busy": 0.1, "ranks": 1, "rank_cores": 0.4}
    loader = {"loaders": 1, "named_loaders": 1, "busy_loaders": 1, "full_loaders": 1, "loader_cores": 1, "runnable": 1}
    holders = [{"gpu": 0, "host": [{"at": 0, **host, **loader}]}, *[{"gpu": 1, "name": "8"}] * others]
    view = start([constant(0.3), constant(0.9)], *holders).run(900)
    assert part in view.allocations[0].causes.found[0].advice


def test_one_of_two_gpus_is_not_used() -> None:
    node = start([constant(0.8), constant(0.0)], {"gpu": 0, "processes": 1}, {"gpu": 1, "processes": 0})
    view = node.run(1200)
    assert [each.verdict.state for each in view.allocations] == ["healthy", "held_no_process"]
    assert [name for name, _ in named(view)[1]] == ["unused_gpu", "no_process"]


SPINS = {"work": [{"at": 0, "level": "rest"}, {"at": 30, "level": "train"}, {"at": 900, "level": "hang"}]}
RESTS = {"work": [{"at": 0, "level": "rest"}, {"at": 30, "level": "train"}, {"at": 900, "level": "context"}]}


@pytest.mark.slow
def test_the_late_rank_is_named_on_both_sides() -> None:
    node = start([SPINS, RESTS], {"gpu": 0, "memory_gib": 60}, {"gpu": 1, "memory_gib": 60})
    view = node.run(3600)
    assert [each.verdict.state for each in view.allocations] == ["stalled", "held_idle"]
    assert [[name for name, _ in each] for each in named(view)] == [["late_rank"], ["late_rank"]]
    assert "gpu 1 has been at 0 %" in view.allocations[0].causes.found[0].evidence


def test_a_holder_that_was_there_before_the_exporter_is_never_called_starting() -> None:
    busy_host = {
        "at": 0,
        "cpus": 8,
        "cores": 3,
        "throttled": 0,
        "ranks": 1,
        "rank_cores": 0,
        "loaders": 0,
        "runnable": 1,
    }
    before = start([constant(0.0)], {"gpu": 0, "processes": 0, "host": [busy_host]}).run(900)
    assert "starting" not in [name for name, _ in named(before)[0]]
    after = start([constant(0.0)], {"gpu": 0, "from": 300, "processes": 0, "host": [busy_host]}).run(1500)
    assert ("starting", "high") in named(after)[0]


def test_a_link_that_is_slow_while_the_gpu_works_is_the_first_cause() -> None:
    slow = {"health": {"pcie_width": 4}}
    view = start([{**constant(0.3), **slow}], {"gpu": 0, "host": [{"at": 0, **CALM}]}).run(1200)
    assert named(view) == [[("link_degraded", "medium")]]
    assert "15.8 of 63.0 GB/s" in only(view).causes.found[0].evidence


def test_a_gpu_at_rest_has_no_slow_link() -> None:
    """It lowers the generation of its link to save power."""
    view = start([constant(0.0)], {"gpu": 0, "processes": 0, "host": [{"at": 0, **CALM}]}).run(1200)
    assert "link_degraded" not in [name for name, _ in named(view)[0]]


def test_a_gpu_without_a_source_of_activity_is_never_called_starting() -> None:
    """An instance of an A100 has none: whether it has worked is unknown."""
    gpu = {"model": "A100", "mig": [{"profile": "1g.10gb", "load": {"kind": "constant", "value": 0.9}}]}
    view = start([gpu], {"gpu": 0, "mig": 0, "from": 120, "host": [{"at": 0, "cores": 4}]}).run(900)
    assert (only(view).verdict.state, named(view)) == ("unknown", [[]])


def test_a_holder_one_of_whose_gpus_works_is_not_starting() -> None:
    host = [{"at": 0, "cpus": 8, "cores": 3, "throttled": 0}]
    entries = [{"gpu": gpu, "from": 120, "host": host, "processes": gpu} for gpu in (0, 1)]
    view = start([constant(0.0), constant(0.9)], *entries).run(1000)
    assert "starting" not in [name for name, _ in named(view)[0]]


def test_a_gpu_that_does_not_answer_has_no_cause() -> None:
    node = start([constant(0.31)], {"gpu": 0, "host": [{"at": 0, **CROWD}]})
    assert named(node.run(1200)) == [[("cpu_oversubscribed", "high")]]
    node.hung.add(node.unit(0).uuid)
    assert named(node.view()) == [[]]


def test_looks_that_have_stopped_say_nothing_about_now() -> None:
    node = start([constant(0.31)], {"gpu": 0, "host": [{"at": 0, **CROWD}]})
    node.run(1200)
    node.host.look = lambda _: None  # type: ignore[method-assign]
    assert named(node.run(400)) == [[]]


def test_a_look_over_a_long_time_is_kept_alone() -> None:
    kept = NodeEvidence()
    kept.note(("job", "7"), HostLook(HostEvidence(0.0, 9000.0)))
    assert len(kept.looks(("job", "7"))) == 1


def test_looks_are_kept_for_ten_minutes_and_forgotten_after_a_gap() -> None:
    kept = NodeEvidence()
    who = ("job", "7")
    for position in range(100):
        kept.note(who, HostLook(HostEvidence(15.0 * position, 15.0 * (position + 1)), 0.5))
    looks = kept.looks(who)
    assert len(looks) == LOOKS_MAX
    assert looks[-1].evidence.end - looks[0].evidence.start == KEEP_S
    kept.note(who, HostLook(HostEvidence(3000.0, 3015.0)))  # it was healthy meanwhile
    assert len(kept.looks(who)) == 1
    kept.keep(())
    assert kept.looks(who) == ()
    assert kept.looks(None) == ()


def test_a_gpu_whose_processes_are_unknown_costs_only_its_own_holder() -> None:
    node = start([constant(0.3)] * 2, {"gpu": 0, "name": "7"}, {"gpu": 1, "name": "8"})
    node.run(60)
    listed = ProcessList(0.0, (GpuProcess(4711),))
    node.state.on_snapshot(node.readings[0]._replace(processes=listed))
    subjects = list(node.diagnosis.host_node().list_subjects())
    assert {subject.who: subject.gpus is None for subject in subjects} == {("job", "7"): False, ("job", "8"): True}
    assert "4711" not in repr(subjects)
