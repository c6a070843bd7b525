"""Views of a node: what is withheld while a GPU or a call does not answer."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.testbed.samples import value
from tests.unit.node.node_bench import GPU, LOST, POD, node_of, obstacles, only

from gpu_exporter.agent.devices.protocol import Processes
from gpu_exporter.agent.ledger.state import StateFile
from gpu_exporter.agent.node.state import NodeState
from gpu_exporter.common.clock import ManualClock
from gpu_exporter.common.config.defaults import Settings


def test_the_holder_of_a_gpu_that_stopped_answering_has_no_values_and_no_verdict() -> None:
    node = node_of(GPU, holders=[POD])
    before = only(node.run(60))
    assert (before.utilization, before.memory_used_bytes, before.obstacle) == (0.5, 2 * 1024**3, "")
    assert before.power_w is not None
    after = node.run(20, sample=False)
    assert after.gpus[0].withheld
    allocation = only(after)
    assert (allocation.utilization, allocation.memory_used_bytes, allocation.power_w) == (None, None, None)
    assert (allocation.verdict.state, allocation.verdict.evidence) == ("unknown", "the GPU does not answer")
    assert obstacles(after) == ["no_answer"]
    assert allocation.totals.busy_s == before.totals.busy_s


def test_a_witness_is_named_only_if_it_ended_the_idle_run() -> None:
    """The decoder worked at the start. Much later the GPU is silent for more than a minute, which also ends the run."""
    decoder = {"kind": "curve", "points": [[0, 1], [200, 1], [200, 0]]}
    node = node_of({"model": "H100", "load": {"kind": "constant", "value": 0.0}, "decoder": decoder}, holders=[POD])
    node.run(700)
    early = only(node.view()).verdict.evidence
    assert early.startswith("utilization 0, but idle only for ") and early.endswith("decoder showed activity before")
    node.run(600)
    node.run(90, sample=False)
    late = only(node.run(60)).verdict.evidence
    assert late.startswith("utilization 0, but idle only for ") and late.endswith(
        ": the time before the idle time is unknown"
    )


def test_a_hung_gpu_has_no_values_from_the_moment_when_the_hang_is_detected() -> None:
    node = node_of(GPU, holders=[POD])
    node.run(60)
    node.hung.add(node.samplers[0].device.identity.uuid)
    view = node.run(1)
    assert view.gpus[0].withheld
    assert only(view).utilization is None


def test_zero_processes_is_a_fact_only_if_processes_are_visible() -> None:
    empty = {**POD, "processes": 0}
    blind = node_of({"model": "H100"}, holders=[empty])
    view = blind.run(900)
    assert only(view).verdict.state == "held_idle"
    assert value(view.gpus[0].snapshot, "gpu_compute_processes") is None
    seeing = node_of({"model": "H100"}, GPU, holders=[empty, {**POD, "gpu": 1, "name": "ml/b/main"}])
    states = [allocation.verdict.state for allocation in seeing.run(900).allocations]
    assert states[0] == "held_no_process"


def test_a_graphics_context_is_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A viewer or a renderer has no compute context."""
    node = node_of({"model": "H100"}, holders=[{**POD, "processes": 0}])
    monkeypatch.setattr(node.samplers[0].device, "read_processes", lambda: Processes(0, 1))
    view = node.run(900)
    assert only(view).verdict.state == "held_idle"
    assert value(view.gpus[0].snapshot, "gpu_graphics_processes") == 1.0


def test_a_failed_read_of_mig_keeps_holders_and_shows_no_values_of_the_whole_gpu() -> None:
    gpu = {
        "model": "H100",
        "mig": [{"profile": "1g.10gb", "load": {"kind": "constant", "value": 0.5}}],
        "faults": [{"at": 60, "for": 30, "call": "nvmlDeviceGetMigMode", "error": "NVML_ERROR_UNKNOWN"}],
    }
    node = node_of(gpu, holders=[{**POD, "mig": 0}])
    before = only(node.run(55))
    assert before.utilization == 0.5
    during = only(node.run(20))
    assert (during.mig, during.utilization, during.memory_used_bytes) == ("1/0", None, None)
    after = only(node.run(40))
    assert after.totals.held_s > before.totals.held_s + 50
    assert after.utilization == 0.5


def test_while_polls_hang_the_holder_is_first_unconfirmed_and_then_withheld() -> None:
    node = node_of(GPU, holders=[POD])
    node.run(60)
    for _ in range(20):
        node.clock.advance(1.0)
        node.sample()
    allocation = only(node.view())
    assert allocation.utilization is None
    assert allocation.verdict.evidence.startswith("no source has confirmed the holder for")
    for _ in range(300):
        node.clock.advance(1.0)
        node.sample()
    assert node.view().allocations == ()


def test_a_poll_that_fails_half_way_confirms_no_holder(monkeypatch: pytest.MonkeyPatch) -> None:
    node = node_of(GPU, holders=[POD])
    node.run(60)

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(node.state.ledger, "charge_poll", broken)
    node.clock.advance(400.0)
    grants = node.poller.grants()
    assert grants == []
    node.poller.poll()
    with pytest.raises(ZeroDivisionError):
        node.state.on_poll(node.poller.poll(), node.placed())
    allocation = only(node.view())
    assert allocation.totals.idle_run_s is None


def test_during_a_lasting_fault_of_mig_whole_gpus_keep_their_holders() -> None:
    fault = {"at": 0, "call": "nvmlDeviceGetMigMode", "error": "NVML_ERROR_UNKNOWN"}
    node = node_of({**GPU, "faults": [fault]}, holders=[POD])
    assert only(node.run(30)).utilization == 0.5
    assert node.state.is_resolved()


def test_a_grant_that_names_no_device_here_leaves_no_gpu_free() -> None:
    node = node_of(GPU, holders=[POD])
    node.run(10)
    assert node.state.is_resolved()
    node.samplers = []
    blind = node_of(GPU, holders=[POD])
    blind.samplers = []
    blind.run(10)
    assert not blind.state.is_resolved()


def test_the_last_sample_keeps_its_time_when_the_last_gpu_is_lost() -> None:
    """Its evidence becomes older. Without the timestamp, a rule could not detect the age."""
    node = node_of({**GPU, "faults": LOST}, holders=[POD])
    assert node.state.last_sample_wall() is None
    start = node.clock.wall()
    node.run(29)
    assert node.state.last_sample_wall() == start + 29
    node.run(60)
    assert not next(iter(node.placed().values())).snapshot.up
    assert node.state.last_sample_wall() == start + 29
    node.readings.clear()  # the GPU is no longer shown
    assert node.placed() == {}
    assert node.state.last_sample_wall() == start + 29


def test_the_last_sample_is_the_newest_even_after_the_wall_clock_was_set_back() -> None:
    node = node_of(GPU, holders=[POD])
    node.run(5)
    node.clock.step_wall(-3600.0)
    node.run(1)
    assert node.state.last_sample_wall() == node.clock.wall()


def test_writes_of_the_state_are_dated_and_failures_are_counted(tmp_path: Path) -> None:
    clock = ManualClock()
    state = NodeState(Settings(), clock, StateFile(tmp_path, 10.0, "boot"))
    assert state.writes == (None, 0, "")
    state.write_state()
    written = clock.wall()
    assert state.writes == (written, 0, "")
    clock.advance(5.0)
    (tmp_path / "state").unlink()
    (tmp_path / "state").mkdir()  # so that no file can be renamed to this name
    version = state.version()
    for failures in (1, 2):
        with pytest.raises(OSError):
            state.write_state()
        assert state.writes == (written, failures, "Is a directory")
    assert state.version() > version  # an earlier rendered view does not contain the failure
    (tmp_path / "state").rmdir()
    state.write_state()
    assert state.writes == (written + 5.0, 2, "")


def test_without_a_state_directory_the_status_has_no_state() -> None:
    assert NodeState(Settings(), ManualClock()).writes is None


def test_the_name_from_before_a_second_gpu_had_the_uuid_is_forgotten() -> None:
    """Otherwise a scheduler's grant for this UUID would be given to a GPU that is no longer shown."""
    node = node_of({"model": "H100"}, holders=[])
    node.run(5)
    (placed,) = node.placed().values()
    own, twin = placed.snapshot.identity, placed.snapshot.identity.told_apart
    node.state.on_snapshot(placed.snapshot.rename(twin))
    assert set(node.state.known()) == {twin.uuid} != {own.uuid}
