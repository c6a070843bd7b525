"""Gaps of a view are reported in words, and decide the exit code."""

from __future__ import annotations

import contextlib
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.testbed.nvml.scenarios import build
from tests.testbed.simulated_node import SimulatedNode

from gpu_exporter.agent.devices.scenario import parse_scenario
from gpu_exporter.agent.exposition.health import judge_health, list_gaps
from gpu_exporter.agent.exposition.page import render_page
from gpu_exporter.agent.exposition.publisher import no_history
from gpu_exporter.agent.exposition.rows import list_rows
from gpu_exporter.agent.exposition.series import list_series
from gpu_exporter.agent.inventory.inventory import Inventory
from gpu_exporter.agent.inventory.pci import PciFunction
from gpu_exporter.agent.runtime import once
from gpu_exporter.agent.runtime.once import GAPS_MAX, run_once
from gpu_exporter.common.exits import Exit
from gpu_exporter.common.model.holders import SourceStatus
from gpu_exporter.common.model.readings import CollectorOutcome, DeviceSnapshot
from gpu_exporter.common.model.rows import TONES
from gpu_exporter.common.model.units import NO_PLACE
from gpu_exporter.common.model.views import GpuView, View

GPU = {"model": "H100", "load": {"kind": "constant", "value": 0.5}}


@pytest.fixture
def node() -> SimulatedNode:
    found = SimulatedNode(parse_scenario({"gpus": [GPU, GPU]}))
    found.run(10)
    return found


def changed(view: View, position: int, **facts: Any) -> View:
    gpus = list(view.gpus)
    snapshot = gpus[position].snapshot
    gpus[position] = gpus[position]._replace(snapshot=snapshot._replace(facts=snapshot.facts._replace(**facts)))
    return view._replace(gpus=tuple(gpus))


def exit_of(view: View, capsys: pytest.CaptureFixture[str], *, devices_only: bool = False) -> tuple[int, str]:
    code = run_once(lambda: view, "table", None, 5.0, None, "nvml", devices_only=devices_only)
    return code, capsys.readouterr().err


def test_a_complete_view_has_no_gaps(node: SimulatedNode, capsys: pytest.CaptureFixture[str]) -> None:
    assert list_gaps(node.view()) == []
    assert exit_of(node.view(), capsys) == (Exit.DONE, "")


@pytest.mark.parametrize(
    ("action", "text"), [(1.0, "asks for a reset"), (4.0, "to be drained and reset"), (9.0, "recovery action 9")]
)
def test_a_requested_recovery_action_is_in_rows_gaps_and_exit_code(
    node: SimulatedNode, capsys: pytest.CaptureFixture[str], action: float, text: str
) -> None:
    view = changed(node.view(), 1, recovery_action=action)
    assert text in list_rows(view)[1].why and text not in list_rows(view)[0].why
    for devices_only in (False, True):
        code, said = exit_of(view, capsys, devices_only=devices_only)
        assert code == Exit.PARTIAL and "partial: gpu 1 asks for" in said and text in said
    assert list_gaps(changed(view, 1, recovery_action=0.0)) == []


def test_a_gpu_that_the_driver_does_not_list_has_a_row_a_series_and_a_message(
    node: SimulatedNode, capsys: pytest.CaptureFixture[str]
) -> None:
    listed = tuple(PciFunction(sampler.device.identity.pci_bus_id, "nvidia") for sampler in node.samplers)
    node.inventory = Inventory(functions=(*listed, PciFunction("10000:01:00.0", "nvidia")), managed="nvidia")
    view = node.view()
    row = list_rows(view)[-1]
    assert (row.gpu, row.state) == ("10000:01:00.0", "missing")
    assert row.why == "bound to kernel driver nvidia, but not in the driver's list"
    (series,) = [each for each in list_series(view) if each.family.name == "gpu_missing"]
    assert series.rows == [(("10000:01:00.0",), 1.0)]
    assert view.status.devices_expected == 3
    ups = [labels for each in list_series(view) if each.family.name == "gpu_up" for labels, _ in each.rows]
    assert len(ups) == 2 and all(uuid for _, uuid in ups)
    code, said = exit_of(view, capsys, devices_only=True)
    assert code == Exit.PARTIAL and "partial: gpu 10000:01:00.0: bound to kernel driver nvidia" in said


def test_units_with_an_unknown_holder_are_counted(node: SimulatedNode) -> None:
    def count(view: View) -> list[float]:
        found = [each.rows for each in list_series(view) if each.family.name == "gpu_devices_unattributed"]
        return [value for rows in found for _, value in rows]

    view = node.view()
    source = SourceStatus("slurm", up=True, complete=True, last_success_wall=1.0)
    said = view.status._replace(sources=(source,), attribution_known=True)
    assert count(view._replace(status=said._replace(sources=()))) == []
    assert count(view._replace(status=said)) == [0.0]
    assert count(view._replace(status=said._replace(attribution_known=False))) == [2.0 - len(view.allocations)]
    mig = SimulatedNode(build("h100-mig"))
    mig.run(10)
    board = mig.view()._replace(status=said._replace(attribution_known=False))
    (held,) = board.allocations
    assert count(board) == [len(board.gpus[0].snapshot.instances) - 1.0]
    whole = held.allocation._replace(unit=held.allocation.unit._replace(mig_uuid=""))
    assert count(board._replace(allocations=(held._replace(allocation=whole),))) == [0.0], "the whole board is held"
    in_use = view.gpus[1]._replace(not_free={"": "in use by job 7"})
    assert count(view._replace(status=said, gpus=(view.gpus[0], in_use))) == [1.0]


@pytest.mark.parametrize(("counted", "gaps"), [(None, 0), (1, 0), (2, 0), (3, 1)])
def test_a_device_gap_is_reported_if_a_scheduler_counts_more_gpus_than_answer(
    node: SimulatedNode, capsys: pytest.CaptureFixture[str], counted: int | None, gaps: int
) -> None:
    source = SourceStatus("slurm", up=False, complete=False, last_success_wall=1.0, devices=counted)
    view = node.view()
    view = view._replace(status=view.status._replace(sources=(source,)))
    assert list_gaps(view, devices_only=True) == ["slurm counts 3 GPUs here, but 2 answer"] * gaps
    assert exit_of(view, capsys, devices_only=True)[0] == (Exit.PARTIAL if gaps else Exit.DONE)


def test_instances_are_counted_in_place_of_their_gpu() -> None:
    mig = SimulatedNode(build("h100-mig"))
    mig.run(10)
    view = mig.view()
    number = len(view.gpus[0].snapshot.instances)
    for counted, gaps in ((number, 0), (number + 1, 1)):
        source = SourceStatus("slurm", up=True, complete=True, last_success_wall=1.0, devices=counted)
        said = view._replace(status=view.status._replace(sources=(source,)))
        assert sum("slurm counts" in gap for gap in list_gaps(said, devices_only=True)) == gaps


def test_the_page_counts_silent_gpus_and_not_their_rows(node: SimulatedNode) -> None:
    view = node.view()
    first, second = view.gpus
    lost = first._replace(snapshot=first.snapshot._replace(up=False, error="fell off"))
    no_place = first.snapshot.identity._replace(index=NO_PLACE, uuid="", pci_bus_id="10000:01:00.0")
    missing = GpuView(DeviceSnapshot(no_place, 0.0, 0.0, up=False, error="not listed"), 0.0, False, False, None)
    away = missing._replace(snapshot=missing.snapshot._replace(away=True))
    for gpus, silent in (((first, second), 0), ((lost, second), 1), ((lost, second, missing), 2), ((first, away), 0)):
        page = render_page(view._replace(gpus=gpus), no_history)
        assert f"<b>{silent}</b>Not answering" in page
    assert TONES["missing"] == TONES["lost"]


def test_each_failure_is_printed_and_further_failures_are_counted(
    node: SimulatedNode, capsys: pytest.CaptureFixture[str]
) -> None:
    view = node.view()
    outcomes = tuple(CollectorOutcome(f"c{at}", False, 0.1, f"nvmlX{at} NVML_ERROR_UNKNOWN") for at in range(20))
    gpu = view.gpus[0]
    view = view._replace(gpus=(gpu._replace(snapshot=gpu.snapshot._replace(outcomes=outcomes)), *view.gpus[1:]))
    source = SourceStatus("kubelet", up=False, complete=False, last_success_wall=None, error="")
    view = view._replace(status=view.status._replace(sources=(source,)))
    assert judge_health(view) == "partial" and judge_health(view, devices_only=True) == "ok"
    code, said = exit_of(view, capsys)
    assert code == Exit.PARTIAL
    assert "partial: gpu 0: c0: nvmlX0 NVML_ERROR_UNKNOWN" in said
    assert f"partial: {21 - GAPS_MAX} more; --format=json names all of them" in said
    assert list_gaps(view)[-1] == "source of holders kubelet: no answer"


def test_an_unknown_holder_is_reported_only_if_there_are_sources_of_holders(
    node: SimulatedNode, tmp_path: Path
) -> None:
    assert list_rows(node.view())[0].why == "in use, but its holder is unknown"
    view = node.view()
    nobody = view._replace(status=view.status._replace(sources=()))
    assert list_rows(nobody)[0].why == ""


@pytest.mark.parametrize("devices_only", [False, True])
@pytest.mark.parametrize(
    ("status", "code", "said"),
    [
        ('{"health": "partial"}', Exit.PARTIAL, "another version"),
        ('{"health": "partial", "gaps": ["gpu 1 is lost"]}', Exit.PARTIAL, ""),
        ('{"health": "no_data"}', None, ""),
        ('{"health": "odd", "devices_health": "odd"}', Exit.PARTIAL, "another version"),
        ('{"health": "part', Exit.PARTIAL, "another version"),
        ("[]", Exit.PARTIAL, "another version"),
    ],
)
def test_the_status_of_an_exporter_of_another_version_never_counts_as_ok(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    status: str,
    code: int | None,
    said: str,
    devices_only: bool,
) -> None:
    monkeypatch.setattr(once, "read_from_daemon", lambda path, form, timeout_s: status)
    done = run_once(lambda: pytest.fail("not asked"), "table", None, 5.0, Path("/s"), "nvml", devices_only=devices_only)
    assert done != Exit.DONE
    assert code is None or done == code
    error = capsys.readouterr().err
    assert said in error
    assert error, "every exit has a message"


def test_reading_an_endless_answer_is_aborted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(once, "ANSWER_MAX", 200_000)
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()

        def flood() -> None:
            stream, _ = server.accept()
            with stream, contextlib.suppress(OSError):
                while True:
                    stream.sendall(b"x" * 65536)

        threading.Thread(target=flood, daemon=True).start()
        with pytest.raises(once.DaemonUnreadable, match="the answer is over 0 MiB"):
            once.read_from_daemon(path, "json", 5.0)
