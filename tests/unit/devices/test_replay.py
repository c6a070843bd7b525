"""Recordings of real GPUs as devices."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_exporter.agent.devices.errors import DriverUnavailable, NotSupported
from gpu_exporter.agent.devices.replay import ReplayBackend, ReplayDevice, parse_recording, read_recording
from gpu_exporter.agent.devices.smi_log import SmiLogError
from gpu_exporter.common.clock import ManualClock

ROOT = Path(__file__).resolve().parents[3]
RECORDINGS = ROOT / "tests" / "fixtures" / "recordings"
HEADER = (
    "timestamp, utilization.gpu [%], pstate, temperature.gpu, clocks.current.sm [MHz], power.draw [W],"
    " power.draw.instant [W]\n"
)


def row(second: float, utilization: int, power: float) -> str:
    return f"2023/07/30 17:28:{second:06.3f}, {utilization}, P0, 53, 1410, {power}, {power}\n"


INDEXED = "2023/07/30 17:28:01.000, 0, 5 %\n2023/07/30 17:28:01.003, 1, 7 %\n"


def test_a_replayed_device_converts_units() -> None:
    recording = parse_recording(HEADER + row(1, 50, 100) + row(2, 50, 200))
    assert recording.utilization == [0.5, 0.5]
    assert recording.sm_clock[0] == 1410e6
    assert recording.energy == [0.0, 150.0]
    assert recording.energy_at(0.5) == pytest.approx(75.0)


def test_samples_cover_the_whole_log_once() -> None:
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


def test_after_the_end_of_a_log_there_is_no_data() -> None:
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
        (HEADER + "2023/07/30 17:28:02, oops\n" + row(3, 5, 100), "log:2: 2 cells, but the header has 7"),
        (
            HEADER + row(1, 50, 100).replace("1410", "1.41 GHz") + row(2, 5, 1),
            "log:2: clocks.current.sm [MHz]: '1.41 GHz'",
        ),
        (HEADER + row(1, 50, 100).replace("50", "nan") + row(2, 5, 1), "log:2: utilization.gpu [%]: 'nan'"),
        (HEADER + row(1, 50, 100) + row(1, 0, 100), "log:3: the log has a second GPU: write one log per GPU"),
        ("timestamp, index, utilization.gpu [%]\n" + INDEXED, "log:3: the log has a second GPU: write one log per GPU"),
        (row(1, 50, 100) + row(2, 50, 100), "log:1: column 'timestamp' is missing"),
    ],
)
def test_an_invalid_log_is_refused_with_line_and_fault(text: str, message: str) -> None:
    with pytest.raises(SmiLogError) as error:
        parse_recording(text, "log")
    assert str(error.value).startswith(message)


AS_WRITTEN = {  # by the name of a query: nvidia-smi's column header, and the format of its cells
    "timestamp": ("timestamp", "2025/06/01 10:00:{:06.3f}"),
    "utilization.gpu": ("utilization.gpu [%]", "12 %"),
    "pstate": ("pstate", "P0"),
    "temperature.gpu": ("temperature.gpu", "36"),
    "clocks.current.sm": ("clocks.current.sm [MHz]", "2505 MHz"),
    "power.draw": ("power.draw [W]", "60.10 W"),
    "power.draw.instant": ("power.draw.instant [W]", "90.40 W"),
}
DOCUMENTED = re.search(
    r"`(nvidia-smi --format=csv -lms 10\s--query-gpu=(\S+))`", (ROOT / "docs/interfaces.md").read_text()
)


@pytest.mark.parametrize("units", [True, False], ids=["units", "nounits"])
def test_the_output_of_the_documented_command_is_a_valid_log(units: bool) -> None:
    assert DOCUMENTED is not None
    columns = [AS_WRITTEN[name] for name in DOCUMENTED[2].split(",")]
    rows = [", ".join(cell.format(second / 100) for _, cell in columns) for second in range(3)]
    if not units:
        rows = [re.sub(r" (%|MHz|W)", "", each) for each in rows]
    recording = parse_recording("\n".join([", ".join(name for name, _ in columns), *rows, ""]))
    assert recording.utilization == [0.12] * 3
    assert (recording.temperature[0], recording.sm_clock[0], recording.power[0]) == (36.0, 2505e6, 90.4)


def test_a_cell_without_a_value_is_a_gap_only_in_its_column() -> None:
    clock = ManualClock()
    text = HEADER + row(1, 50, 100) + row(2, 7, 0).replace("7, P0", "[Unknown Error], P0") + row(3, 40, 300)
    device = ReplayDevice(parse_recording(text.replace(", 0, 0\n", ", [N/A], [N/A]\n")), 0, "x", clock)
    device.read_utilization()
    clock.advance(1.0)
    for read in (device.read_utilization, device.read_power):
        with pytest.raises(NotSupported):
            read()
    assert device.read_temperature() == 53.0
    clock.advance(1.0)
    assert device.read_power() == 300.0
    assert device.read_energy() == pytest.approx(400.0)
    assert [(each.ratio, each.span_s) for each in device.read_utilization_samples(clock.wall() - 2)] == [(0.4, 1.0)]


def test_a_pause_of_the_log_is_unknown_and_not_idle() -> None:
    """A watcher that was stopped for two minutes, in a log with a row each second."""
    clock = ManualClock()
    log = HEADER + "".join(row(second, 0, 60) for second in (1, 2, 3)) + row(3, 0, 60).replace(":28:", ":30:")
    device = ReplayDevice(parse_recording(log + row(4, 0, 60).replace(":28:", ":30:")), 0, "x", clock)
    reads = (device.read_utilization, device.read_power, device.read_energy, device.read_temperature)
    known = []
    for second in range(124):
        for read in reads:
            try:
                read()
            except NotSupported:
                continue
            known.append((second, read))
        clock.advance(1.0)
    assert known == [(second, read) for second in (0, 1, 2, 122, 123) for read in reads]
    assert [(each.ratio, each.span_s) for each in device.read_utilization_samples(clock.wall() - 124.5)] == [
        (0.0, 0.0), (0.0, 1.0), (0.0, 1.0), (0.0, 1.0), (0.0, 1.0)
    ]  # fmt: skip


def test_one_late_row_is_no_pause_of_the_log() -> None:
    log = HEADER + "".join(row(0, 50, 60).replace(":28:", f":{minute}:") for minute in ("00", "10", "30", "40"))
    assert parse_recording(log).times == [0.0, 600.0, 1800.0, 2400.0]


def test_a_log_without_power_has_no_energy() -> None:
    recording = parse_recording((HEADER + row(1, 50, 0) + row(2, 50, 0)).replace(", 0, 0\n", ", [N/A], [N/A]\n"))
    with pytest.raises(NotSupported):
        ReplayDevice(recording, 0, "x", ManualClock()).read_energy()
    with pytest.raises(NotSupported):
        ReplayDevice(recording, 0, "x", ManualClock()).read_power()


@pytest.mark.parametrize("cut", range(1, len(row(3, 40, 300))))
def test_an_incomplete_last_line_is_dropped(cut: int) -> None:
    whole = HEADER + row(1, 50, 100) + row(2, 50, 100)
    assert parse_recording(whole + row(3, 40, 300)[:cut]).times == [0.0, 1.0]


def test_other_lines_between_the_rows_of_a_log_cost_no_row() -> None:
    """A restarted service appended to the log, after it was killed within a line; with messages and empty lines."""
    parts = [row(1, 50, 100), "\n", row(2, 50, 100), row(3, 50, 100)[:30] + "\n", HEADER, row(4, 50, 100)]
    parts += ["Unable to determine the device handle for GPU0000:01:00.0: Unknown Error\n", row(5, 50, 100), "\n\n"]
    assert parse_recording(HEADER + "".join(parts)).times == [0.0, 1.0, 3.0, 4.0]


def test_a_gpu_whose_uuid_is_unreadable_in_a_row_is_not_a_second_gpu() -> None:
    text = "timestamp, uuid, utilization.gpu [%], temperature.gpu\n"
    for second, uuid, degrees in ((1, "GPU-a", "30"), (2, "[GPU is lost]", "-1"), (3, "GPU-a", "31")):
        text += f"2023/07/30 17:28:{second:06.3f}, {uuid}, 5 %, {degrees}\n"
    assert parse_recording(text).temperature == [30.0, None, 31.0]
    with pytest.raises(SmiLogError, match="log:5: the log has a second GPU"):
        parse_recording(text + "2023/07/30 17:28:04.000, GPU-b, 5 %, 30\n", "log")


def test_a_log_with_few_columns_and_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    log = tmp_path / "gpu.csv"
    log.write_text(
        "timestamp, utilization.gpu [%], power.draw [W]\n"
        "2025/06/01 10:00:00.000, 5 %, 60.00 W\n2025/06/01 10:00:01.000, 255 %, 60.00 W\n",
        "utf-8-sig",
    )
    recording = read_recording(log)
    assert (recording.utilization, recording.power) == ([0.05, None], [60.0, 60.0])


@given(st.text(max_size=300))
def test_any_text_is_a_recording_or_a_recording_error(text: str) -> None:
    try:
        parse_recording(HEADER + text)
    except SmiLogError:
        return


def test_a_missing_log_means_that_the_driver_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(DriverUnavailable, match=r"none\.csv"):
        ReplayBackend([tmp_path / "none.csv"], ManualClock()).open()
