"""The report of logs of nvidia-smi and of recordings: every second is in one part, or left out with its account."""

from __future__ import annotations

import gzip
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.gpu_review import EDGE_S

from gpu_exporter.agent.runtime.playback import Playback, PlayedUnit, play_back
from gpu_exporter.cli.commands import COMMANDS
from gpu_exporter.cli.reports import report_files
from gpu_exporter.common.config.defaults import Settings
from gpu_exporter.common.exits import Exit
from gpu_exporter.common.model.readings import Span
from gpu_exporter.reports.usage.cells import WINDOW_S, Unit
from gpu_exporter.reports.usage.sources.logs import LogTime, Stretch, of_gauge, with_unknown

RECORDINGS = Path(__file__).resolve().parents[2] / "fixtures" / "recordings"
HEADER = "timestamp, index, uuid, name, utilization.gpu [%]\n"
BEGIN = datetime(2026, 11, 20, 10)
MODEL = "NVIDIA H100"
Report = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture(autouse=True)
def zone(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Sets the local time zone, first to UTC."""

    def choose(name: str) -> None:
        monkeypatch.setenv("TZ", name)
        time.tzset()

    choose("UTC")
    yield choose
    monkeypatch.undo()
    time.tzset()


@pytest.fixture
def reported(capsys: pytest.CaptureFixture[str]) -> Report:
    """Runs the command. Returns its exit code and its JSON, with what it wrote to standard error as `said`."""

    def ask(*paths: Path, flags: Sequence[str] = ()) -> tuple[int, dict[str, Any]]:
        code = COMMANDS["report"].run([*(f"--source.file={path}" for path in paths), "--format=json", *flags])
        out, said = capsys.readouterr()
        return code, {**(json.loads(out) if out else {}), "said": said}

    return ask


def row(minute: float, cell: str, gpu: int = 0, *, uuid: str = "GPU-{gpu}") -> str:
    when = BEGIN + timedelta(minutes=minute, milliseconds=3 * gpu)
    return f"{when:%Y/%m/%d %H:%M:%S}.{when.microsecond // 1000:03d}, {gpu}, {uuid.format(gpu=gpu)}, {MODEL}, {cell}\n"


def log_of(cells: Sequence[tuple[float, str]], gpus: int = 1) -> str:
    return HEADER + "".join(row(minute, cell, gpu) for minute, cell in cells for gpu in range(gpus))


def minutes(found: dict[str, Any], part: str) -> float:
    return round(60 * float(found["total"][f"{part}_hours"]), 3)


def test_a_log_of_two_gpus_equals_its_truth(tmp_path: Path, reported: Report) -> None:
    """An hour of work at 80 %, ten minutes at 0, thirty minutes without rows, and twenty minutes at 0."""
    path = tmp_path / "node.csv"
    path.write_text(log_of([(m, "80 %" if m <= 60 else "0 %") for m in range(121) if not 70 < m < 100], gpus=2))
    code, found = reported(path, flags=("--price=2", "--currency=EUR", "--by=model"))
    assert code == Exit.DONE
    assert [minutes(found, part) for part in ("held", "used", "unproven", "idle", "unknown")] == [180, 120, 60, 0, 0]
    assert found["total"]["busy_ratio"] == pytest.approx(0.8 * 120 / 180)
    assert found["total"]["cost_unproven"] == pytest.approx(2.0)
    assert [each["model"] for each in found["groups"]] == [MODEL]
    assert (found["start"], found["end"]) == ("2026-11-20T10:00:00+00:00", "2026-11-20T12:00:00+00:00")
    assert found["left_out"] == [
        "1.0 GPU-hours between the first and the last sample of a GPU have no samples: scrapes failed, or the exporter "
        "or log stopped"
    ]


def test_the_times_of_a_log_are_local(tmp_path: Path, reported: Report, zone: Callable[[str], None]) -> None:
    path = tmp_path / "node.csv"
    path.write_text(log_of([(m, "5 %") for m in range(61)]))
    zone("Europe/Berlin")
    _, found = reported(path)
    assert found["start"] == "2026-11-20T09:00:00+00:00"
    assert minutes(found, "low") == 60


def test_a_short_pause_at_0_is_part_of_the_work(tmp_path: Path, reported: Report) -> None:
    path = tmp_path / "node.csv"
    path.write_text(log_of([(m / 6, "0 %" if m % 6 else "90 %") for m in range(61)]))  # 50 s of each minute
    _, found = reported(path)
    assert minutes(found, "used") == 10
    path.write_text(log_of([(m / 6, "0 %" if m % 20 else "90 %") for m in range(61)]))  # 190 s of 200 s
    _, found = reported(path)
    assert (minutes(found, "used"), minutes(found, "unproven")) == (0.5, 9.5)


def test_a_value_that_the_driver_does_not_have_is_unknown(tmp_path: Path, reported: Report) -> None:
    path = tmp_path / "node.csv"
    path.write_text(log_of([(m, "[N/A]" if 10 < m <= 30 else "0 %") for m in range(61)]))
    _, found = reported(path)
    assert (minutes(found, "unknown"), minutes(found, "unproven")) == (20, 40)


def test_time_that_two_files_have_counts_once(tmp_path: Path, reported: Report) -> None:
    whole = log_of([(m, "0 %") for m in range(121)])
    (tmp_path / "a.csv").write_text(whole)
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress(whole.encode()))
    (tmp_path / "c.csv").write_text(log_of([(m, "70 %") for m in range(60, 181)]))
    (tmp_path / "link.csv").symlink_to(tmp_path / "a.csv")
    (tmp_path / "notes.txt").write_text("not a log")
    code, found = reported(tmp_path, tmp_path / "a.csv")
    assert code == Exit.DONE
    assert (minutes(found, "unproven"), minutes(found, "used")) == (120, 60)
    assert found["left_out"] == ["3.0 GPU-hours that two files have: they count once"]
    assert found["sources"][0]["name"] == "logs of nvidia-smi (3)"


def test_files_of_one_gpu_continue_each_other(tmp_path: Path, reported: Report) -> None:
    (tmp_path / "2.csv").write_text(log_of([(m, "0 %") for m in range(180, 241)]))
    (tmp_path / "1.csv").write_text(log_of([(m, "0 %") for m in range(61)]))
    _, found = reported(tmp_path / "2.csv", tmp_path / "1.csv")
    assert minutes(found, "held") == 120
    assert found["left_out"][0].startswith("2.0 GPU-hours between the first and the last sample")


def test_a_row_that_does_not_show_its_gpu_is_left_out(tmp_path: Path, reported: Report) -> None:
    lost = row(61, "0 %").replace(", 0, GPU-0, NVIDIA H100, 0 %", 4 * ", [GPU is lost]")
    path = tmp_path / "node.csv"
    path.write_text(log_of([(m, "0 %") for m in range(61)], gpus=2) + lost)
    _, found = reported(path)
    assert minutes(found, "unproven") == 120
    assert found["left_out"] == [f"{path}:124: 1 rows are ignored, because they name no GPU"]


def test_gpus_without_a_uuid_are_other_gpus_in_another_file(tmp_path: Path, reported: Report) -> None:
    for name in ("node1.csv", "node2.csv"):
        text = log_of([(m, "0 %") for m in range(61)], gpus=2)
        (tmp_path / name).write_text(text.replace("uuid", "pstate").replace("GPU-0", "P0").replace("GPU-1", "P0"))
    _, found = reported(tmp_path)
    assert minutes(found, "held") == 240


def test_rows_of_gpus_that_nothing_distinguishes_are_left_out_and_not_mixed(tmp_path: Path, reported: Report) -> None:
    path = tmp_path / "node.csv"
    rows = [row(m, "0 %" if gpu else "90 %", gpu).split(", ") for m in range(61) for gpu in range(8)]
    path.write_text("timestamp, utilization.gpu [%]\n" + "".join(f"{cells[0]}, {cells[-1]}" for cells in rows))
    _, found = reported(path)
    assert minutes(found, "held") < 0.1
    assert found["left_out"][0].startswith("1.0 GPU-hours between")


@pytest.mark.parametrize("name", ["A100_update_freq_gpudata.csv.gz", "V100_update_freq_gpudata.csv.gz"])
def test_square_waves_of_real_gpus_are_work(name: str, reported: Report) -> None:
    """The load is on for half of the time, in turns of less than two minutes."""
    _, found = reported(RECORDINGS / name)
    assert found["total"]["used_hours"] == pytest.approx(found["total"]["held_hours"])
    assert found["total"]["held_hours"] * 3600 == pytest.approx(202, abs=1)
    assert found["total"]["busy_ratio"] == pytest.approx(0.485, abs=0.01)


@pytest.mark.parametrize("name", ["h200-loads", "h200-engines"])
def test_a_recording_of_known_loads_equals_their_truth(name: str, reported: Report) -> None:
    path = RECORDINGS / f"{name}.rec.gz"
    _, found = reported(path)
    parts = [found["total"][f"{part}_hours"] or 0.0 for part in ("used", "low", "idle", "unproven", "unknown")]
    played = play_back(path, Settings())
    assert sum(parts) * 3600 == pytest.approx(played.end - played.start, abs=0.01)
    assert (found["total"]["unknown_hours"] * 3600, found["total"]["unproven_hours"]) == (
        pytest.approx(1.5, abs=0.5),
        0,
    )
    (spans,) = played.units.values()
    rested = worked = 0
    for mark in json.loads((RECORDINGS / f"{name}.json").read_text("utf-8")):
        begin, end = (played.start + mark["start"] + EDGE_S, played.start + mark["end"] - EDGE_S)
        idle = sum(
            max(0.0, min(span.end, end) - max(span.start, begin)) for span in spans if not span.ratio and not span.other
        )
        if mark["name"] in ("no context", "context"):
            rested += 1
            assert idle == pytest.approx(end - begin, abs=1.0), mark["name"]
        elif "rare" not in mark["name"] and (mark["truth"] is None or mark["truth"] > 0.01):
            worked += 1
            assert idle == 0.0, mark["name"]
    assert rested + worked > 3


def test_the_zero_of_a_single_witness_is_not_confirmed(
    tmp_path: Path, reported: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = BEGIN.timestamp()
    spans = [
        Span(start, start + 600, 0.0, (), 2),
        Span(start + 600, start + 1200, 0.0, (), 1),
        Span(start + 1200, start + 1800, 0.0, ("nvlink",), 2),
        Span(start + 1500, start + 2100, 0.9, (), 2),  # from a ring that repeats a part
    ]
    units = {PlayedUnit("GPU-0", MODEL): spans, PlayedUnit("GPU-1", MODEL, "1/0", "1g.10gb"): spans[:1]}
    monkeypatch.setattr(report_files, "is_recording", lambda path: True)
    monkeypatch.setattr(report_files, "play_back", lambda *_: Playback(start, start + 3600, units, ["GPU 2: lost"]))
    (tmp_path / "node.rec.gz").touch()
    _, found = reported(tmp_path / "node.rec.gz")
    seventh = 1 / 7
    assert minutes(found, "idle") == round(10 + 10 * seventh, 3)
    assert (minutes(found, "unproven"), minutes(found, "low")) == (10, 0)
    assert minutes(found, "used") == 15
    assert minutes(found, "unknown") == round(25 + 50 * seventh, 3)
    assert found["left_out"] == ["GPU 2: lost"]


OF_GPU = ("Count", "HandleByIndex", "Name", "UUID", "PciInfo", "Index", "UtilizationRates", "GetSamples", "MemoryInfo")


def test_a_gpu_without_a_second_witness_is_not_confirmed(tmp_path: Path, reported: Report) -> None:
    """The same recording without engines, GPM, traffic and power, as of an old board. GPU 1 of two is malformed."""
    head, *lines = gzip.decompress((RECORDINGS / "h200-engines.rec.gz").read_bytes()).splitlines(keepends=True)
    kept = [json.loads(line) for line in lines if any(name in json.loads(line)["call"] for name in OF_GPU)]
    for entry in list(kept):
        if entry["call"] == "nvmlDeviceGetCount":
            entry["answers"] = [["ok", 2]]
        elif "HandleByIndex" in entry["call"]:
            kept.append({**entry, "arguments": [1], "answers": [["ok", "1"]]})
        elif entry["device"] == "0":
            kept.append({**entry, "device": "1", "answers": len(entry["answers"]) * [["ok", ["odd"]]]})
    path = tmp_path / "node.rec.gz"
    path.write_bytes(gzip.compress(head + b"".join(json.dumps(entry).encode() + b"\n" for entry in kept)))
    code, found = reported(path)
    assert (code, minutes(found, "idle")) == (Exit.DONE, 0)
    assert minutes(found, "unproven") > 0.5
    assert [each.startswith(f"{path}: GPU 1: an answer is malformed") for each in found["left_out"]] == [True]


GOOD = log_of([(m, "80 %") for m in range(61)])
BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "log.csv:1: column 'timestamp' is missing"),
    "header": (HEADER.encode(), "log.csv: fewer than two rows"),
    "binary": (b"\x7fELF\xff\xfe\x00", "log.csv: not a gzip or text file"),
    "half a gzip file": (gzip.compress(GOOD.encode())[:-20], "log.csv: not a gzip or text file"),
    "no number": (GOOD.replace("80 %", "80 ½", 1).encode(), "log.csv:2: utilization.gpu [%]: '80 ½' is not a number"),
    "no columns": (b"0, 5\n1, 5\n", "log.csv:1: column 'timestamp' is missing"),
    "two GPUs that nothing distinguishes": (
        b"timestamp, utilization.gpu [%]\n2026/11/20 10:00:00.000, 0\n2026/11/20 10:00:00.000, 90\n",
        "log.csv:3: the log has a second GPU: write one log per GPU, with nvidia-smi --id=INDEX, or add uuid",
    ),
    "the year 1": (GOOD.replace("2026/", "0001/").encode(), "log.csv: times before 1970 or after 9999"),
    "two rows and 90 years": (
        (GOOD[: len(HEADER)] + row(0, "0 %") + row(0, "0 %").replace("2026", "2116")).encode(),
        "log.csv: from 2026-11-20 10:00Z to 2116-11-20 10:00Z, but a report has at most 366 days",
    ),
    "a recording of NaN": (
        gzip.compress(b'{"format":"gpu-exporter-recording","version":1,"wall":NaN,"duration_s":1e99}\n'),
        "log.csv: ",
    ),
    "a recording cut": (gzip.compress(b'{"format":"gpu-exporter-recording","version":1}\n'), "log.csv:1: the line"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_cannot_be_read_costs_itself_alone(name: str, tmp_path: Path, reported: Report) -> None:
    data, error = BAD[name]
    (tmp_path / "log.csv").write_bytes(data)
    code, found = reported(tmp_path / "log.csv")
    assert (code, error in found["said"]) == (Exit.NO_DATA, True), found
    assert "total" not in found
    (tmp_path / "good.csv").write_text(GOOD)
    code, found = reported(tmp_path)
    assert (code, minutes(found, "used")) == (Exit.PARTIAL, 60)
    assert error in found["said"] and any(error in each for each in found["left_out"])


def test_what_is_no_file_is_refused_without_waiting(tmp_path: Path, reported: Report) -> None:
    os.mkfifo(tmp_path / "pipe.csv")
    (tmp_path / "none").mkdir()
    for path, error in (
        (tmp_path / "pipe.csv", "not a regular file"),
        (tmp_path / "missing.csv", "No such file"),
        (tmp_path / "none", "no file in this folder ends in .csv, .csv.gz, .rec.gz"),
    ):
        code, found = reported(path)
        assert (code, error in found["said"], str(path) in found["said"]) == (Exit.NO_DATA, True, True), found


@pytest.mark.parametrize(
    "data",
    [GOOD.encode("utf-16"), GOOD.encode()[:-3], gzip.compress(GOOD.encode()), GOOD.replace("\n", "\r\n").encode()],
    ids=["utf-16", "torn", "packed", "windows"],
)
def test_a_log_is_read_as_it_was_written(data: bytes, tmp_path: Path, reported: Report) -> None:
    (tmp_path / "log.csv").write_bytes(data)
    code, found = reported(tmp_path / "log.csv")
    assert (code, minutes(found, "used")) == (Exit.DONE, 59 if data == GOOD.encode()[:-3] else 60)


def test_a_period_of_years_is_an_error_of_a_clock(tmp_path: Path, reported: Report) -> None:
    (tmp_path / "a.csv").write_text(GOOD)
    (tmp_path / "b.csv").write_text(GOOD.replace("2026/", "1970/"))
    code, found = reported(tmp_path)
    assert code == Exit.NO_DATA
    assert "from 1970-11-20 10:00Z to 2026-11-20 11:00Z" in found["said"]


@pytest.mark.parametrize("flag", ["--source.prometheus=http://p:1", "--source.matcher=a", "--since=1d", "--rest=1"])
def test_flags_of_a_server_are_refused(flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        COMMANDS["report"].run([f"--source.file={tmp_path}", flag])
    assert ended.value.code == Exit.USAGE
    assert f"--source.file cannot be combined with {flag.partition('=')[0]}" in capsys.readouterr().err


def test_every_form_has_the_hours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "log.csv").write_text(GOOD)
    for form, text in (("text", "logs of nvidia-smi (1)"), ("html", "<html"), ("csv", "held"), ("tsv", "held")):
        answers = []
        for _ in range(2):
            assert COMMANDS["report"].run([f"--source.file={tmp_path}", f"--format={form}", "--price=3"]) == Exit.DONE
            answers.append(capsys.readouterr().out)
        assert text in answers[0] and answers[0] == answers[1]


UNIT = Unit("", "", "GPU-0")
READINGS = st.lists(
    st.tuples(st.sampled_from([1.0, 5.0, 60.0, 400.0, 5000.0]), st.sampled_from([None, 0.0, 0.0, 0.5])),
    min_size=2,
    max_size=40,
)


@given(st.lists(READINGS, min_size=1, max_size=3), st.integers(0, 9000))
def test_every_second_is_in_one_part_or_a_gap(files: list[list[tuple[float, float | None]]], shift: int) -> None:
    time_of = LogTime()
    ends, worked = [], 0.0
    for number, readings in enumerate(files):
        at, times = float(shift * number), []
        for step, _ in readings:
            at += step
            times.append(at)
        stretches = list(of_gauge(times, [ratio for _, ratio in readings]))
        worked += sum(each.end - each.start for each in stretches if each.ratio)
        ends += [each.start for each in stretches] + [each.end for each in stretches]
        time_of.add(UNIT, stretches)
    cells = list(time_of.cells())
    if not ends:
        assert cells == []
        return
    for cell in cells:
        assert cell.seconds == pytest.approx(cell.used + cell.low + cell.idle + cell.unproven + cell.unknown)
        assert cell.idle == 0.0 and cell.seconds <= WINDOW_S + 1e-6 and cell.start % WINDOW_S == 0.0
    held = sum(cell.seconds for cell in cells)
    assert held + time_of.gap_s == pytest.approx(max(ends) - min(ends))
    if len(files) == 1:
        assert time_of.twice_s == pytest.approx(0.0)
        assert sum(cell.used + cell.low for cell in cells) >= worked - 1e-6


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(1, 30), st.sampled_from([None, 0.0, 0.5])), max_size=20))
def test_a_recording_is_whole(spans: list[tuple[int, int, float | None]]) -> None:
    found = list(with_unknown([Stretch(a, a + b, ratio) for a, b, ratio in spans], 10.0, 90.0))
    assert [found[0].start, *(each.end for each in found)] == [*(each.start for each in found), 90.0]
    for each in found:
        assert each.ratio is None or any(
            a <= each.start and each.end <= a + b and ratio == each.ratio for a, b, ratio in spans
        )
