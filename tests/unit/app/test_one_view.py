"""The view of `--once`: one reading on a manual clock. A GPU or source that does not answer in time affects nothing
else.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.testbed.processes import wait_for

from gpu_exporter.agent.attribution.source import Answer, Source
from gpu_exporter.agent.collectors.names import COLLECTORS
from gpu_exporter.agent.devices.errors import DriverUnavailable
from gpu_exporter.agent.devices.scenario import parse_scenario
from gpu_exporter.agent.devices.simulated import SimulatedBackend
from gpu_exporter.agent.exposition.health import judge_health, list_failed_checks
from gpu_exporter.agent.exposition.json_format import list_rows
from gpu_exporter.agent.inventory.expected import FILE
from gpu_exporter.agent.ledger.state import read_boot_id
from gpu_exporter.agent.runtime.reading import make_readers, take_one_view
from gpu_exporter.agent.runtime.simulation import build_simulation
from gpu_exporter.agent.runtime.surroundings import Host
from gpu_exporter.common.clock import ManualClock
from gpu_exporter.common.config.defaults import Settings
from gpu_exporter.common.model.views import View

LOST = {"at": 0, "call": "*", "error": "NVML_ERROR_GPU_IS_LOST"}
HANGS = {"at": 0, "call": "nvmlDeviceGetTemperature", "hang_ms": 600_000}
HOLDER = {"kind": "job", "name": "42"}
SHORT_S, LONG_S = 0.5, 30.0  # a time limit that passes in the test, and a time limit that does not


def take(
    *gpus: dict[str, Any], held: int | None = None, sources: Sequence[Source] | None = None, timeout_s: float = LONG_S
) -> View:
    """`held`: the GPU that job 42 holds."""
    clock = ManualClock()
    holders = [] if held is None else [{"gpu": held, **HOLDER}]
    backend, source, _ = build_simulation(parse_scenario({"gpus": list(gpus), "holders": holders}), clock)
    asked = [source] if sources is None else sources
    readers = make_readers(Settings(), backend, clock, COLLECTORS, timeout_s)
    return take_one_view(Settings(), backend, readers, asked, clock)


def states(view: View) -> list[str]:
    return [row.state for row in list_rows(view)]


def test_one_view_knows_holders_and_free_gpus_and_reports_nothing_as_idle() -> None:
    view = take({"model": "H100"}, {"model": "T4"}, held=0)
    (allocation,) = view.allocations
    assert (allocation.allocation.holder.job_id, allocation.gpu) == ("42", 0)
    assert allocation.totals.idle_run_s == 0.0
    assert states(view) == ["unknown", "free"]
    assert (
        allocation.verdict.evidence
        == "this is one reading: for states, run the exporter with the same --state.directory"
    )
    assert [gpu.withheld for gpu in view.gpus] == [False, False]
    assert view.status.devices_visible == view.status.devices_expected == 2


def test_one_view_waits_for_the_gpm_window_and_has_gpm_ratios() -> None:
    (gpu,) = take({"model": "H100", "load": {"kind": "constant", "value": 0.5}}).gpus
    assert {"gpu_graphics_active_ratio", "gpu_sm_active_ratio"} <= {s.family.name for s in gpu.snapshot.samples}


def test_a_hanging_gpu_affects_no_other_gpu() -> None:
    view = take({"model": "H100", "faults": [HANGS]}, {"model": "T4"}, held=1, timeout_s=SHORT_S)
    assert [(row.gpu, row.state) for row in list_rows(view)] == [("0", "hung"), ("1", "unknown")]
    assert list_rows(view)[0].why == "its first call hangs in the driver"
    assert [gpu.hung for gpu in view.gpus] == [True, False]
    assert view.status.devices_expected == 2


def test_a_driver_does_not_answer_if_every_gpu_hangs() -> None:
    with pytest.raises(DriverUnavailable, match=r"the driver did not answer within 0\.5 s"):
        take({"model": "H100", "faults": [HANGS]}, timeout_s=SHORT_S)


def test_a_lost_gpu_is_listed_beside_the_others() -> None:
    view = take({"model": "H100", "faults": [LOST]}, {"model": "T4"})
    assert states(view) == ["lost", "free"]


@pytest.fixture
def silent() -> Iterator[Source]:
    """A source of holders that does not answer before the test ends."""
    over = threading.Event()

    class Silent:
        name = "slurm"

        def poll(self) -> Answer:
            over.wait()
            return Answer([])

    yield Silent()
    over.set()


def test_no_gpu_is_free_while_a_source_is_silent(silent: Source) -> None:
    view = take({"model": "T4"}, sources=[silent], timeout_s=SHORT_S)
    assert states(view) == ["unknown"]
    assert (view.status.attribution_known, [source.up for source in view.status.sources]) == (False, [False])


def test_a_slow_source_makes_no_gpu_that_has_answered_look_silent() -> None:
    """slurmctld may answer after a minute. The GPUs are read at the beginning, and only once."""
    clock = ManualClock()
    backend, _, _ = build_simulation(parse_scenario({"gpus": [{"model": "H100"}, {"model": "T4"}]}), clock)
    readers = make_readers(Settings(), backend, clock, COLLECTORS, 600.0)

    class Slow:
        name = "slurm"

        def poll(self) -> Answer:
            wait_for(lambda: len(readers.snapshots()) == 2, "the GPUs", each_s=0.01)
            clock.advance(60.0)
            return Answer([])

    view = take_one_view(Settings(), backend, readers, [Slow()], clock)
    assert (judge_health(view, devices_only=True), list_failed_checks(view)) == ("ok", [])
    assert [(row.state, gpu.age_s >= 60.0) for row, gpu in zip(list_rows(view), view.gpus, strict=True)] == [
        ("free", True)
    ] * 2


class Absent(SimulatedBackend):
    """A driver that is not installed, or that is installed and fails."""

    def __init__(self, *, absent: bool) -> None:
        self._absent = absent

    def open(self) -> None:
        raise DriverUnavailable("there is no driver", absent=self._absent)


def take_without_driver(directory: Path, *, absent: bool) -> View:
    backend, clock = Absent(absent=absent), ManualClock()
    readers = make_readers(Settings(), backend, clock, COLLECTORS, LONG_S)
    return take_one_view(Settings(), backend, readers, [], clock, Host(directory / "sys", directory=directory))


def test_a_node_that_never_had_a_gpu_has_an_empty_view(tmp_path: Path) -> None:
    view = take_without_driver(tmp_path, absent=True)
    assert (view.gpus, view.allocations, view.status.driver_up, view.status.driver_error) == (
        (),
        (),
        False,
        "there is no driver",
    )


def test_a_node_whose_gpus_were_seen_before_is_missing_its_driver(tmp_path: Path) -> None:
    seen = {"uuid": "GPU-1", "pci_bus_id": "0000:17:00.0", "position": 0, "name": "H100"}
    boot = read_boot_id()
    known = {"devices": [seen], "seen": {"GPU-1": boot}, "left_out": []}
    (tmp_path / FILE).write_text(json.dumps({"version": 1, "boot_id": boot, **known}))
    with pytest.raises(DriverUnavailable, match="there is no driver"):
        take_without_driver(tmp_path, absent=True)


def test_a_failing_driver_is_a_fault_on_every_node(tmp_path: Path) -> None:
    with pytest.raises(DriverUnavailable, match="there is no driver"):
        take_without_driver(tmp_path, absent=False)
