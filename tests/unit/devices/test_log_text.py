"""Logs of nvidia-smi in each encoding, and their local times where the clock was set."""

from __future__ import annotations

import codecs
import gzip
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpu_exporter.agent.devices.log_text import LocalTimes, decode_log
from gpu_exporter.agent.devices.replay import ReplayBackend, parse_recording, read_recording
from gpu_exporter.agent.devices.smi_log import SmiLogError
from gpu_exporter.common.clock import ManualClock

HEADER = "timestamp, utilization.gpu [%], power.draw [W]\r\n"
LOG = HEADER + "".join(f"2025/10/26 10:00:0{second}.000, {second} %, 60.00 W\r\n" for second in range(4))
MARKED = {
    "utf-8": codecs.BOM_UTF8,
    "utf-16-le": codecs.BOM_UTF16_LE,
    "utf-16-be": codecs.BOM_UTF16_BE,
    "utf-32-le": codecs.BOM_UTF32_LE,
    "utf-32-be": codecs.BOM_UTF32_BE,
}
FEW = timedelta(seconds=10)


@pytest.mark.parametrize("name", ["log.csv", "log.csv.gz", "packed"])
@pytest.mark.parametrize("encoding", MARKED)
def test_a_mark_decides_the_encoding_of_a_log(tmp_path: Path, encoding: str, name: str) -> None:
    data = MARKED[encoding] + LOG.encode(encoding)
    (tmp_path / name).write_bytes(data if name.endswith("csv") else gzip.compress(data))
    assert read_recording(tmp_path / name).utilization == [0.0, 0.01, 0.02, 0.03]


@pytest.mark.parametrize("cut", range(1, 40))
def test_a_last_line_that_is_cut_within_a_character_costs_only_this_line(cut: int) -> None:
    text = decode_log(codecs.BOM_UTF16_LE + LOG.encode("utf-16-le")[:-cut])
    assert len(parse_recording(text).times) == (4 if cut <= 2 else 3)


def test_marks_inside_of_joined_logs_are_removed() -> None:
    later = LOG.replace("10:00", "10:01")
    text = decode_log(b"".join(codecs.BOM_UTF16_LE + each.encode("utf-16-le") for each in (LOG, later)))
    assert parse_recording(text).times == [0.0, 1.0, 2.0, 3.0, 60.0, 61.0, 62.0, 63.0]


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (LOG.encode("utf-16-le"), "the text contains NUL bytes, as UTF-16 without a byte order mark does"),
        (LOG.encode() + LOG.encode("utf-16-le"), "the text contains NUL bytes"),
        (LOG.replace("W", "W\xae").encode("latin-1"), "the text has no byte order mark and is not UTF-8 (invalid"),
        (codecs.BOM_UTF16_LE + b"\x00\xdc\x00\x00", "the text is not utf-16-le as marked (illegal"),
    ],
    ids=["utf-16", "utf-16 appended", "latin-1", "damaged utf-16"],
)
def test_a_text_in_an_unknown_encoding_is_refused_with_the_remedy(tmp_path: Path, data: bytes, fault: str) -> None:
    log = tmp_path / "log.csv"
    log.write_bytes(data)
    with pytest.raises(SmiLogError) as error:
        read_recording(log)
    assert str(error.value).startswith(f"{log}: not a gzip or text file: {fault}")
    assert "iconv -t UTF-8" in str(error.value)


@given(st.binary(max_size=60), st.sampled_from([b"", *MARKED.values()]))
def test_any_bytes_are_a_text_or_an_error_with_the_remedy(data: bytes, mark: bytes) -> None:
    try:
        text = decode_log(mark + data)
    except ValueError as exc:
        assert "iconv -t UTF-8" in str(exc)
    else:
        assert "\ufeff" not in text


def rows(first: datetime, step: timedelta, number: int) -> list[datetime]:
    return [first + i * step for i in range(number)]


def convert(times: list[datetime]) -> tuple[list[float | None], timedelta]:
    local = LocalTimes()
    return [local.convert(when) for when in times], local.shift


# The full hour at which the clock is set, by how much, and in which place.
ENDS = [
    (datetime(2025, 10, 26, 3), timedelta(hours=1)),  # Berlin
    (datetime(2025, 11, 2, 2), timedelta(hours=1)),  # New York
    (datetime(2025, 10, 26, 1), timedelta(hours=1)),  # Azores
    (datetime(2025, 10, 26, 0), timedelta(hours=1)),  # Nuuk
    (datetime(2025, 4, 6, 2), timedelta(minutes=30)),  # Lord Howe
]
STEPS = [timedelta(milliseconds=10), timedelta(seconds=1), timedelta(minutes=1), timedelta(minutes=10)]


@pytest.mark.parametrize("step", STEPS, ids=str)
@pytest.mark.parametrize(("end", "change"), ENDS, ids=str)
@pytest.mark.parametrize("begins", [False, True], ids=["end", "begin"])
def test_rows_keep_their_interval_over_a_change_of_summer_time(
    end: datetime, change: timedelta, step: timedelta, begins: bool
) -> None:
    real = rows(end - 4 * step + step / 2, step, 9)
    shift = -change if begins else change
    found, shifted = convert([when if when < end else when - shift for when in real])
    assert found == pytest.approx([i * step.total_seconds() for i in range(9)])
    assert shifted == shift


def test_an_interval_that_fits_both_changes_shows_which_one_it_was() -> None:
    end, step = datetime(2025, 10, 26, 3), timedelta(minutes=45)
    real = rows(end - 4 * step + timedelta(minutes=35), step, 9)
    found, shift = convert([when if when < end else when - timedelta(hours=1) for when in real])
    assert found == [i * 2700.0 for i in range(9)]
    assert shift == timedelta(hours=1)


def test_a_log_over_a_whole_year_has_no_shift_at_its_end() -> None:
    step = timedelta(minutes=10)
    spring, autumn = datetime(2025, 3, 30, 2), datetime(2025, 10, 26, 2)
    winter = rows(datetime(2025, 1, 1, 0, 0, 1), step, 365 * 144)
    local = [when + timedelta(hours=1) if spring <= when < autumn else when for when in winter]
    found, shift = convert(local)
    assert found == [i * 600.0 for i in range(len(winter))]
    assert shift == timedelta()


@pytest.mark.parametrize(
    ("last", "next_one"),
    [
        ("02:59:59", "02:59:54"),  # the clock was set by a few seconds
        ("02:40:00", "01:40:01"),  # by an hour, but not at a full hour
        ("13:59:59", "13:00:00"),  # by day: a second log of one hour
        ("02:59:59", "02:10:00"),  # the rows do not continue
        ("02:59:59", "00:00:00"),
    ],
)
def test_other_times_that_go_back_drop_rows_until_the_time_is_reached_again(last: str, next_one: str) -> None:
    end, again = (datetime.fromisoformat(f"2025-10-26 {text}") for text in (last, next_one))
    step = timedelta(seconds=1)
    found, shift = convert([*rows(end - 3 * step, step, 4), *rows(again, step, int((end - again) / step) + 3)])
    assert [at for at in found if at is not None] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert shift == timedelta()


@pytest.mark.parametrize("gap", [timedelta(minutes=59), timedelta(hours=1), timedelta(hours=2)])
def test_a_gap_by_day_or_of_another_length_is_kept(gap: timedelta) -> None:
    for hour in (2, 13):
        at = datetime(2025, 3, 30, hour, 10)
        found, shift = convert([at, at + FEW, at + FEW + gap])
        assert found[-1] == (FEW + gap).total_seconds()
        assert shift == timedelta()


@given(st.lists(st.datetimes(), max_size=20))
@example([datetime.max, datetime.min, datetime.max])
def test_any_times_give_increasing_seconds(times: list[datetime]) -> None:
    found = [at for at in convert(times)[0] if at is not None]
    assert found == sorted(set(found))


def as_log(times: list[datetime], header_above_each: bool = False) -> str:
    lines = [f"{when:%Y/%m/%d %H:%M:%S}.{when.microsecond // 1000:03d}, 50 %, 60.00 W\n" for when in times]
    return HEADER + (HEADER if header_above_each else "").join(lines)


def test_a_row_that_is_dropped_and_an_hour_that_is_added_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    step, end = timedelta(minutes=10), datetime(2025, 10, 26, 3)
    log = tmp_path / "log.csv"
    log.write_text(as_log([*rows(end - 6 * step, step, 6), *rows(end - 6 * step, step, 12), end - step]))
    backend = ReplayBackend([log], ManualClock())
    for _ in range(2):
        backend.open()
    assert [record.getMessage() for record in caplog.records] == [
        f"{log}:8: summer time set the clock back by 60 minutes, which are added to all times from this line on",
        f"{log}:20: the time goes back, so 1 rows are ignored; if the file joins several logs, sort its rows by time",
    ]


def test_a_second_log_of_the_same_hour_is_dropped_and_not_shifted() -> None:
    """Two logs of one hour, joined: by day or at night, they may belong to two GPUs."""
    hour = rows(datetime(2025, 10, 26, 2), timedelta(seconds=1), 3600)
    recording = parse_recording(as_log(hour) + as_log(hour), "log")
    assert len(recording.times) == 3600
    assert [note.partition(" ignored")[0] for note in recording.notes] == [
        "log:3603: the time goes back, so 3600 rows are"
    ]


@pytest.mark.parametrize("before", [1, 5])
def test_a_log_with_a_header_above_each_row_is_continued_over_the_end_of_summer_time(before: int) -> None:
    step, end = timedelta(minutes=1), datetime(2025, 10, 26, 3)
    times = [*rows(end - before * step, step, before), *rows(end - timedelta(hours=1), step, 5)]
    assert parse_recording(as_log(times, header_above_each=True)).times == [60.0 * i for i in range(before + 5)]


def test_a_log_in_reverse_order_is_refused_with_the_number_of_rows() -> None:
    times = rows(datetime(2025, 6, 1), timedelta(seconds=1), 5)
    with pytest.raises(SmiLogError) as error:
        parse_recording(as_log(times[::-1]), "log")
    assert str(error.value).startswith("log: fewer than two rows; log:3: the time goes back, so 4 rows are ignored")
