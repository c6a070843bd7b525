"""An H200 under known loads, as its driver answered: what is idle, what is not, and which load is a stall.

The recording is from a real board (tests/fixtures/recordings), so no assumption about levels is in it.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.gpu_review import Row, as_marks, review

from gpu_exporter.diagnosis.stalls import boards

FOLDER = Path(__file__).resolve().parents[2] / "fixtures" / "recordings"
AT_REST = {"no context", "context"}
RARE = {"rare", "rare, longer"}
HANGS = {"late rank", "late rank, 16 channels"}


def rows(step_s: float | None, name: str = "h200-loads") -> dict[str, Row]:
    marks = as_marks(json.loads((FOLDER / f"{name}.json").read_text("utf-8")))
    return {row.name: row for row in review(FOLDER / f"{name}.rec.gz", marks, step_s)}


@pytest.fixture(scope="module")
def loads() -> dict[str, Row]:
    return rows(1.0)


@pytest.fixture(scope="module", params=[1.0, None], ids=["every second", "as the exporter chooses"])
def engines(request: pytest.FixtureRequest) -> dict[str, Row]:
    """Other engines than the SMs, MPS, small kernels, and three other monitors."""
    return rows(request.param, "h200-engines")


def test_a_gpu_at_rest_is_idle_with_and_without_a_context(loads: dict[str, Row]) -> None:
    for name in AT_REST:
        assert loads[name].idle_s == pytest.approx(loads[name].known_s), name
        assert loads[name].known_s > 6.0


def test_a_gpu_at_rest_is_idle_in_the_cycles_that_the_exporter_chooses() -> None:
    """Its link carries 2 to 4 MB/s, which five seconds must not turn into 10 to 20 MB/s of one second."""
    loads = rows(None)
    assert loads["no context"].idle_s == pytest.approx(loads["no context"].known_s)
    assert loads["no context"].known_s > 1.0  # in the first long cycle, the traffic at rest is not known yet
    context = loads["context"]  # the process starts in the first long cycle
    assert context.idle_s > 3.0
    assert context.idle_s + context.others.get("pcie", 0.0) == pytest.approx(context.known_s)


def test_no_second_of_lasting_work_is_idle(loads: dict[str, Row]) -> None:
    for name, row in loads.items():
        if name not in AT_REST | RARE:
            assert row.idle_s == 0.0, name
            assert row.known_s > 6.0, name


def test_a_short_kernel_every_two_seconds_ends_each_idle_run(loads: dict[str, Row]) -> None:
    """Utilization rounds it to 0. Its share of SM activity is below 0.00002, and at rest that is exactly 0."""
    for name in RARE:
        assert loads[name].longest_idle_s < 2.0, name
        assert loads[name].others["gpm_sm"] > 2.0, name
        assert loads[name].busy_s < 0.01


def test_the_busy_ratio_is_near_the_time_of_the_kernels(loads: dict[str, Row]) -> None:
    for name, row in loads.items():
        if name.startswith("kernels"):
            assert row.truth is not None
            assert row.busy_s / row.known_s == pytest.approx(row.truth, abs=0.05), name


def test_a_hang_in_a_real_collective_is_a_stall_and_no_other_load_is(loads: dict[str, Row]) -> None:
    """The rule's thresholds, with durations shortened to the length of a load, and a host that does nothing."""
    for name, row in loads.items():
        assert (row.spin.confidence == "medium") == (name in HANGS), (name, row.spin, row.ended_by)
        assert row.spin.confidence != "high", "nothing proves that it hangs"


def test_other_monitors_leave_a_gpu_at_rest_idle(engines: dict[str, Row]) -> None:
    assert engines["monitors"].idle_s == pytest.approx(engines["monitors"].known_s)
    assert engines["monitors"].known_s > 6.0


def test_no_second_of_an_engine_or_of_small_kernels_is_idle(engines: dict[str, Row]) -> None:
    """JPEG engines and the video decoder hardly show in utilization."""
    for name, row in engines.items():
        if name not in AT_REST | {"monitors"}:
            assert row.idle_s == 0.0, name
            assert row.known_s > 6.0, name
    assert engines["video"].busy_s / engines["video"].known_s < 0.01
    assert engines["video"].others["decoder"] > 1.0


def test_drawing_is_no_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scene that does not change: full utilization, 3 % of the SMs, flat power near rest, and no traffic."""
    for row in rows(1.0, "h200-engines").values():
        assert row.spin.confidence == "none", row
    monkeypatch.setattr(boards, "DRAWS", "")
    drawing = rows(1.0, "h200-engines")["graphics"]
    assert (drawing.spin.confidence, "arithmetic" in drawing.ended_by) == ("none", True), "its pipes show it, too"


def test_each_spinning_sm_reads_the_same_from_the_host(loads: dict[str, Row]) -> None:
    """So the traffic of a hang grows with its channels, and a fixed limit would call it progress."""
    for name, sms in (("late rank", 2), ("late rank, 16 channels", 16)):
        witnesses = loads[name].witnesses
        assert witnesses["sm"][1] * 132 == pytest.approx(sms, rel=0.01)
        assert witnesses["pcie"][1] / sms == pytest.approx(60e6, rel=0.05)
