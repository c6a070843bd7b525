"""Recordings of real GPUs as devices."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_exporter.clock import ManualClock
from gpu_exporter.devices.errors import DriverUnavailable, NotSupported
from gpu_exporter.devices.replay import RecordingError, ReplayBackend, ReplayDevice, parse_recording, read_recording

RECORDINGS = Path(__file__).resolve().parents[2] / "fixtures" / "recordings"
HEADER = (
    "timestamp, utilization.gpu [%], pstate, temperature.gpu, clocks.current.sm [MHz], power.draw [W],"
    " power.draw.instant [W]\n"
)


def row(second: float, utilization: int, power: float) -> str:
    return f"2023/07/30 17:28:{second:06.3f}, {utilization}, P0, 53, 1410, {power}, {power}\n"


def test_units_are_converted_at_the_border() -> None:
    recording = parse_recording(HEADER + row(1, 50, 100) + row(2, 50, 200))
    assert recording.utilization == [0.5, 0.5]
    assert recording.sm_clock[0] == 1410e6
    assert recording.energy == [0.0, 150.0]
    assert recording.energy_at(0.5) == pytest.approx(75.0)


def test_samples_cover_the_whole_recording_once() -> None:
    recording = read_recording(RECORDINGS / "A100_update_freq_gpudata.csv.gz")
    clock = ManualClock()
    device = ReplayDevice(recording, 0, "A100", clock)
    seen = list(device.read_utilization_samples(0.0))
    while True:
        clock.advance(1.0)
        try:
            seen += device.read_utilization_samples(seen[-1].wall if seen else 0.0)
        except NotSupported:
            break
    stamps = [sample.wall for sample in seen]
    assert stamps == sorted(set(stamps))
    assert stamps[-1] - stamps[0] == pytest.approx(recording.duration_s, abs=0.5)


def test_after_its_end_a_recording_knows_nothing() -> None:
    clock = ManualClock()
    device = ReplayDevice(parse_recording(HEADER + row(1, 50, 100) + row(2, 50, 200)), 0, "x", clock)
    assert device.read_utilization() == (0.5, None)
    clock.advance(5.0)
    with pytest.raises(NotSupported):
        device.read_utilization()
    assert device.read_energy() == pytest.approx(150.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "log:1: column 'timestamp' is missing"),
        ("timestamp, power.draw [W]\n", "log:1: column 'utilization.gpu [%]' is missing"),
        (HEADER + row(1, 50, 100), "log: fewer than two rows"),
        (HEADER + row(1, 50, 100) + "2023/07/30 17:28:02, oops\n", "log:3: "),
    ],
)
def test_a_file_that_is_no_log_names_line_and_fault(text: str, message: str) -> None:
    with pytest.raises(RecordingError) as error:
        parse_recording(text, "log")
    assert str(error.value).startswith(message)


@given(st.text(max_size=300))
def test_any_text_is_a_recording_or_a_recording_error(text: str) -> None:
    try:
        parse_recording(HEADER + text)
    except RecordingError:
        return


def test_a_missing_file_is_no_driver(tmp_path: Path) -> None:
    with pytest.raises(DriverUnavailable, match=r"none\.csv"):
        ReplayBackend([tmp_path / "none.csv"], ManualClock()).open()
