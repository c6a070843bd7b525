"""Gaps of a view are reported in words, and decide the exit code."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.testbed.nvml.scenarios import build
from tests.testbed.simulated_node import SimulatedNode

from gpu_exporter.agent.devices.protocol import FAILED
from gpu_exporter.agent.devices.scenario import parse_scenario
from gpu_exporter.agent.exposition.checks import CHECKS, LINE_MAX, TEXT_MIN, FailedCheck, join_failed, parse_checks
from gpu_exporter.agent.exposition.health import CHECK_OF, XID_S, judge_health, list_failed_checks, list_gaps
from gpu_exporter.agent.exposition.json_format import list_rows, render_json
from gpu_exporter.agent.exposition.page import render_page
from gpu_exporter.agent.exposition.publisher import no_history
from gpu_exporter.agent.exposition.series import list_series
from gpu_exporter.agent.inventory.inventory import Inventory
from gpu_exporter.agent.inventory.pci import PciFunction
from gpu_exporter.agent.node import conditions
from gpu_exporter.agent.runtime import once
from gpu_exporter.agent.runtime.once import GAPS_MAX, OLD_S, render, run_once
from gpu_exporter.common.exits import Exit
from gpu_exporter.common.model.holders import SourceStatus
from gpu_exporter.common.model.readings import CollectorOutcome, DeviceSnapshot, XidCounts
from gpu_exporter.common.model.rows import TONES
from gpu_exporter.common.model.units import NO_PLACE
from gpu_exporter.common.model.views import AgentStatus, GpuView, View

DEVICES = parse_checks("devices")
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
    code = run_once(lambda: view, "table", None, 5.0, None, "nvml", DEVICES if devices_only else None)
    return code, capsys.readouterr().err


def test_a_complete_view_has_no_gaps(node: SimulatedNode, capsys: pytest.CaptureFixture[str]) -> None:
    assert list_gaps(node.view()) == []
    assert exit_of(node.view(), capsys) == (Exit.DONE, "")


@pytest.mark.parametrize(
    ("action", "text"), [(1.0, "asks for a reset"), (4.0, "a drain and a reset"), (9.0, "recovery action 9")]
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
    assert [each.text for each in list_failed_checks(view)] == ["slurm counts 3 GPUs here, but 2 answer"] * gaps
    assert exit_of(view, capsys, devices_only=True)[0] == (Exit.PARTIAL if gaps else Exit.DONE)


@pytest.mark.parametrize("devices_only", [False, True])
@pytest.mark.parametrize("error", ["", "libnvidia-ml.so.1 cannot be loaded"])
def test_no_gpu_where_a_scheduler_counts_some_is_a_fault_with_both_numbers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: str, devices_only: bool
) -> None:
    """The first boot of a node that keeps no files, by a single reading and by the daemon."""
    status = AgentStatus("TEST", "nvml", not error, error, 0, 0, 1.0, None, counted=(("slurm", 4),))
    view = View(0.0, status, (), ())
    code, said = exit_of(view, capsys, devices_only=devices_only)
    assert (code, "; slurm counts 4 GPUs here, but 0 answer" in said) == (Exit.NO_DATA, True)
    monkeypatch.setattr(once, "read_from_daemon", lambda path, form, timeout_s: new_status(view))
    done = run_once(
        lambda: pytest.fail("not asked"), "table", None, 5.0, Path("/s"), "nvml", DEVICES if devices_only else None
    )
    said = capsys.readouterr().err
    assert (done, "; slurm counts 4 GPUs here, but 0 answer" in said) == (Exit.NO_DATA, True)
    expected = [each.rows for each in list_series(view) if each.family.name == "gpu_devices_expected"]
    assert [value for rows in expected for _, value in rows] == [4.0]


def test_instances_are_counted_in_place_of_their_gpu() -> None:
    mig = SimulatedNode(build("h100-mig"))
    mig.run(10)
    view = mig.view()
    number = len(view.gpus[0].snapshot.instances)
    for counted, gaps in ((number, 0), (number + 1, 1)):
        source = SourceStatus("slurm", up=True, complete=True, last_success_wall=1.0, devices=counted)
        said = view._replace(status=view.status._replace(sources=(source,)))
        assert sum("slurm counts" in each.text for each in list_failed_checks(said)) == gaps


def test_the_page_counts_unusable_gpus_and_not_their_rows(node: SimulatedNode) -> None:
    view = node.view()
    first, second = view.gpus
    lost = first._replace(snapshot=first.snapshot._replace(up=False, error="fell off"))
    no_place = first.snapshot.identity._replace(index=NO_PLACE, uuid="", pci_bus_id="10000:01:00.0")
    missing = GpuView(DeviceSnapshot(no_place, 0.0, 0.0, up=False, error="not listed"), 0.0, False, False, None)
    away = missing._replace(snapshot=missing.snapshot._replace(away=True))
    for gpus, unusable in (((first, second), 0), ((lost, second), 1), ((lost, second, missing), 2), ((first, away), 0)):
        page = render_page(view._replace(gpus=gpus), no_history)
        assert f"<b>{unusable}</b>Unusable" in page
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
    assert list_rows(node.view())[0].why == "in use by an unknown holder"
    view = node.view()
    nobody = view._replace(status=view.status._replace(sources=()))
    assert list_rows(nobody)[0].why == ""


ODD = [
    '{"health": "partial"}',
    '{"health": "partial", "gaps": ["gpu 1 is lost"]}',
    '{"health": "no_data"}',
    '{"health": "odd", "devices_health": "odd", "gaps": [], "failed_checks": [], "unchecked": []}',
    '{"health": "ok", "devices_health": "ok", "gaps": [], "failed_checks": [{}], "unchecked": []}',
    '{"health": "part',
    "[]",
]


@pytest.mark.parametrize("status", ODD)
def test_the_status_of_an_exporter_of_another_version_never_counts_as_ok(
    node: SimulatedNode, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], status: str
) -> None:
    monkeypatch.setattr(once, "read_from_daemon", lambda path, form, timeout_s: status)
    done = run_once(lambda: pytest.fail("not asked"), "table", None, 5.0, Path("/s"), "nvml")
    assert (done, "another version" in capsys.readouterr().err) == (Exit.PARTIAL, True)
    # A health check reads the GPUs itself: an upgrade without a restart drains no node, and hides no fault.
    for action, code in ((0.0, Exit.DONE), (1.0, Exit.PARTIAL)):
        view = changed(node.view(), 1, recovery_action=action)
        done = run_once(lambda view=view: view, "table", None, 5.0, Path("/s"), "nvml", DEVICES)  # type: ignore[misc]
        assert (done, "another version" in capsys.readouterr().err) == (code, True)


def new_status(view: View) -> str:
    """As an exporter answers that does not hang."""
    return re.sub(r'("timestamp_seconds": *)[0-9.]+', rf"\g<1>{time.time()}", render_json(view), count=1)


def test_an_old_picture_of_an_exporter_that_hangs_never_counts(
    node: SimulatedNode, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its GPUs may have failed since then, or may have been reset."""
    good, lost = node.view(), changed(node.view(), 1, recovery_action=1.0)
    for then, now in ((good, lost), (lost, good)):
        for age_s in (0.0, OLD_S + 5.0):
            status = render(then._replace(wall=time.time() - age_s), "json")
            monkeypatch.setattr(once, "read_from_daemon", lambda path, form, timeout_s, status=status: status)
            seen = now if age_s else then
            done = run_once(lambda now=now: now, "table", None, 5.0, Path("/s"), "nvml", DEVICES)  # type: ignore[misc]
            assert done == (Exit.PARTIAL if seen is lost else Exit.DONE)
            assert ("published nothing for" in capsys.readouterr().err) == bool(age_s)


def with_xids(view: View, *codes: tuple[int, str, float]) -> View:
    """`codes`: XID, class, and its age in seconds."""
    counts = XidCounts(tuple((code, kind, 1, view.wall - age) for code, kind, age in codes))
    return view._replace(gpus=(view.gpus[0], view.gpus[1]._replace(xids=counts)))


def all_at_once(view: View) -> View:
    """Seven checks fail."""
    broken = with_xids(changed(view, 1, recovery_action=1.0, remap_failed=1.0, fabric=FAILED), (79, "hardware", 1.0))
    first, second = broken.gpus
    lost = first._replace(snapshot=first.snapshot._replace(up=False, error=f"fell\noff {'x' * 300}"))
    second = second._replace(snapshot=second.snapshot._replace(not_ready=True))
    source = SourceStatus("slurm", up=True, complete=True, last_success_wall=1.0, devices=4)
    return broken._replace(gpus=(lost, second), status=broken.status._replace(sources=(source,)))


@pytest.mark.parametrize("by_daemon", [False, True])
@pytest.mark.parametrize(
    ("checks", "failed"),
    [
        ("devices", [each for each in CHECKS if each != "xid"]),
        ("lost,xid,remap,reset,fabric,ready,count", list(CHECKS)),
        ("lost", ["lost"]),
        ("xid,remap", ["xid", "remap"]),
        ("count, reset", ["reset", "count"]),
        ("fabric", ["fabric"]),
        ("ready", ["ready"]),
    ],
)
def test_the_chosen_checks_set_the_exit_code_and_one_line_names_them_with_a_remedy(
    node: SimulatedNode,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    checks: str,
    failed: list[str],
    by_daemon: bool,
) -> None:
    view = node.view()

    def run(view: View) -> tuple[int, list[str]]:
        monkeypatch.setattr(once, "read_from_daemon", lambda path, form, timeout_s: new_status(view))
        socket_path = Path("/s") if by_daemon else None
        code = run_once(lambda: view, "json", None, 5.0, socket_path, "nvml", parse_checks(checks))
        return code, capsys.readouterr().err.splitlines()

    code, said = run(with_xids(view))
    assert code == Exit.DONE and all("was not made" in line for line in said)
    code, said = run(all_at_once(view))
    assert code == Exit.PARTIAL
    assert len([line for line in said if line.startswith("gpu-exporter: partial: ")]) == len(failed)
    (line,) = [line.removeprefix("gpu-exporter: ") for line in said if "failed checks: " in line]
    parts = line.removeprefix("failed checks: ").removesuffix(")").split("); ")
    assert [re.split(r": | \(", part)[0] for part in parts] == failed
    assert all(part.count("(") >= 1 for part in parts)
    assert len(f"gpu-exporter: {line.removeprefix('failed checks: ')}") < 200


@pytest.mark.parametrize(
    ("code", "kind", "age_s", "fails"),
    [
        (79, "hardware", 0.0, True),
        (48, "hardware", XID_S - 1, True),
        (79, "hardware", XID_S, False),
        (79, "hardware", -30.0, True),  # the clock was set back
        (31, "application", 0.0, False),
        (63, "information", 0.0, False),
        (173, "hardware", 0.0, False),  # of a driver that is newer than the catalogue: it must not drain a fleet
    ],
)
def test_only_a_recent_xid_that_the_catalogue_calls_a_fault_fails_the_check(
    node: SimulatedNode, code: int, kind: str, age_s: float, fails: bool
) -> None:
    found = list_failed_checks(with_xids(node.view(), (code, kind, age_s)))
    assert [each.check for each in found] == ["xid"] * fails
    assert all(each.text.startswith(f"gpu 1: XID {code} ") for each in found)


def test_a_check_that_cannot_be_made_is_named_only_if_it_was_chosen(
    node: SimulatedNode, capsys: pytest.CaptureFixture[str]
) -> None:
    view = node.view()
    view = view._replace(gpus=tuple(gpu._replace(xids=None) for gpu in view.gpus))
    said = []
    for checks in ("xid", "lost,count", "lost", "devices"):
        assert run_once(lambda: view, "json", None, 5.0, None, "nvml", parse_checks(checks)) == Exit.DONE
        said.append(capsys.readouterr().err)
    assert [text.count("was not made") for text in said] == [1, 1, 0, 0]
    assert "check xid was not made" in said[0] and "check count was not made" in said[1]


@pytest.mark.parametrize("text", ["", "lost,", "xids", "all,lost", "Lost", "devices,lost"])
def test_a_check_of_another_name_is_an_error_that_lists_the_names(text: str) -> None:
    with pytest.raises(ValueError, match="use all, devices, or a list of: lost, xid, "):
        parse_checks(text)


def test_each_condition_that_makes_a_gpu_unusable_belongs_to_a_check(node: SimulatedNode) -> None:
    assert {check for check, _ in CHECK_OF.values()} == CHECKS.keys() - {"xid", "count"}
    source = Path(conditions.__file__).read_text("utf-8")
    assert set(re.findall(r'Condition\("(\w+)"', source)) - CHECK_OF.keys() == {"row_remap_pending", "fabric_degraded"}


REMEDIES = dict(CHECK_OF.values()) | {"xid": "reset the GPU", "count": "check dmesg"}
failures = st.builds(
    lambda check, text: FailedCheck(check, text, REMEDIES[check]), st.sampled_from(sorted(CHECKS)), st.text()
)


@given(st.lists(failures, min_size=1))
def test_the_line_of_failed_checks_is_one_short_line_with_every_check(found: list[FailedCheck]) -> None:
    line = join_failed(found)
    assert len(line) <= LINE_MAX and line.isprintable()
    for each in found:
        assert f"{each.check}: " in line or f"{each.check} (" in line
        assert f"({each.remedy})" in line


@pytest.mark.parametrize("number", range(1, len(CHECKS) + 1))
def test_long_texts_are_cut_to_equal_pieces_that_still_help_or_left_out(number: int) -> None:
    line = join_failed([FailedCheck(check, "x" * 300, REMEDIES[check]) for check in [*CHECKS][:number]])
    pieces = re.findall(r"(x+)\.\.\.", line)
    assert len(pieces) == (number if number <= 4 else 0) and len({*pieces}) == min(1, len(pieces))
    assert all(len(piece) >= TEXT_MIN - len("...") for piece in pieces)


@given(st.lists(st.builds(FailedCheck, st.sampled_from(sorted(CHECKS)), st.text(), st.text() | st.just("x" * 999))))
def test_the_line_of_foreign_findings_is_short_too(found: list[FailedCheck]) -> None:
    assert len(join_failed(found)) <= LINE_MAX and join_failed(found).isprintable()


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
