"""Recordings: every recorded answer is played back at its time; an invalid file is refused with line and fault."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_exporter.agent.devices.errors import DeviceError, DeviceLost, DriverUnavailable, NotSupported, device_error
from gpu_exporter.agent.devices.nvml.library import SYSTEM, Handle
from gpu_exporter.agent.devices.nvml.recording import (
    RecordedLibrary,
    Recorder,
    RecordingError,
    is_recording,
    read_recording,
)
from gpu_exporter.common.clock import ManualClock


class Script:
    """A driver with scripted answers."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {}

    def open(self) -> None:
        return

    def close(self) -> None:
        return

    def ask(self, call: str, handle: Handle = SYSTEM, *arguments: Any) -> Any:
        answer = self.answers[call]
        if isinstance(answer, DeviceError):
            raise answer
        return answer(*arguments) if callable(answer) else answer


PID = 4_194_303  # the largest pid that Linux allows


def mentions_a_pid(recorder: Recorder) -> bool:
    """The header is left out: it has the wall clock, and any four digits come up there at some hour."""
    _, *calls = gzip.decompress(recorder.render(exporter="TEST")).splitlines()
    assert calls
    return any(str(pid).encode() in call for pid in (PID, PID - 1) for call in calls)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def play(recorder: Recorder, path: Path, clock: ManualClock) -> RecordedLibrary:
    path.write_bytes(recorder.render(exporter="TEST"))
    library = RecordedLibrary(path, clock)
    library.open()
    return library


GPU = Handle("0")


def test_answers_and_errors_come_back_at_their_time(tmp_path: Path, clock: ManualClock) -> None:
    script = Script()
    recorder = Recorder(script, hashed=False, clock=clock.monotonic)
    for answer in (100_000, device_error("nvmlDeviceGetPowerUsage", "NVML_ERROR_GPU_IS_LOST"), 200_000):
        script.answers["nvmlDeviceGetPowerUsage"] = answer
        try:
            recorder.ask("nvmlDeviceGetPowerUsage", GPU)
        except DeviceLost:
            assert isinstance(answer, DeviceLost)
        clock.advance(1.0)
    library = play(recorder, tmp_path / "x.rec.gz", clock)
    assert library.ask("nvmlDeviceGetPowerUsage", GPU) == 100_000
    clock.advance(1.5)
    with pytest.raises(DeviceLost):
        library.ask("nvmlDeviceGetPowerUsage", GPU)
    clock.advance(1.0)
    assert library.ask("nvmlDeviceGetPowerUsage", GPU) == 200_000
    clock.advance(1.0)
    with pytest.raises(NotSupported, match="NO_DATA"):  # after its end a recording has no answers
        library.ask("nvmlDeviceGetPowerUsage", GPU)


def test_only_the_number_of_processes_is_recorded(tmp_path: Path, clock: ManualClock) -> None:
    call = "nvmlDeviceGetComputeRunningProcesses_v3"
    script = Script()
    script.answers[call] = ((PID, 0, 0), (PID - 1, 0, 0))
    recorder = Recorder(script, hashed=False, clock=clock.monotonic)
    assert recorder.ask(call, GPU) == ((PID, 0, 0), (PID - 1, 0, 0))
    clock.advance(1.0)
    assert not mentions_a_pid(recorder)
    assert play(recorder, tmp_path / "x.rec.gz", clock).ask(call, GPU) == 2


def test_only_the_number_of_process_utilizations_is_recorded(tmp_path: Path, clock: ManualClock) -> None:
    call = "nvmlDeviceGetProcessUtilization"
    script = Script()
    script.answers[call] = lambda since: ((PID, since + 1, 40, 0, 0, 0), (PID - 1, since + 1, 50, 0, 0, 0))
    recorder = Recorder(script, hashed=False, clock=clock.monotonic)
    for since in (1_000_000, 2_000_000):
        assert len(recorder.ask(call, GPU, since)) == 2
        clock.advance(1.0)
    assert not mentions_a_pid(recorder)
    assert play(recorder, tmp_path / "x.rec.gz", clock).ask(call, GPU, 3_000_000) == 2


def test_fields_are_recorded_one_by_one_and_played_back_in_any_combination(tmp_path: Path, clock: ManualClock) -> None:
    script = Script()
    script.answers["nvmlDeviceGetFieldValues"] = lambda ids: tuple((0, 10 * field) for field, _ in ids)
    recorder = Recorder(script, hashed=False, clock=clock.monotonic)
    recorder.ask("nvmlDeviceGetFieldValues", GPU, ((74, 0), (75, 0)))
    recorder.ask("nvmlDeviceGetFieldValues", GPU, ((138, 5),))
    clock.advance(1.0)
    library = play(recorder, tmp_path / "x.rec.gz", clock)
    asked = ((138, 5), (75, 0), (999, 0))
    assert library.ask("nvmlDeviceGetFieldValues", GPU, asked) == ((0, 1380), (0, 750), (13, 0))


def test_a_sample_ring_is_moved_to_the_present(tmp_path: Path, clock: ManualClock) -> None:
    script = Script()
    recorder = Recorder(script, hashed=False, clock=clock.monotonic)
    base = round(recorder._wall * 1e6)
    ring = [(base + 200_000 * i, i) for i in range(20)]
    for newest in (5, 10):
        script.answers["nvmlDeviceGetSamples"] = lambda kind, since, n=newest: tuple(ring[max(0, n - 6) : n])
        clock.advance(1.0)
        recorder.ask("nvmlDeviceGetSamples", GPU, 1, 0)
    clock.advance(0.5)
    library = play(recorder, tmp_path / "x.rec.gz", clock)
    clock.step_wall(1e6)
    start = clock.wall()
    assert library.ask("nvmlDeviceGetSamples", GPU, 1, 0) == ()
    clock.advance(1.1)
    answers = library.ask("nvmlDeviceGetSamples", GPU, 1, 0)
    assert [value for _, value in answers] == [0, 1, 2, 3, 4]
    # A recording has its start to the millisecond.
    assert [stamp / 1e6 - start for stamp, _ in answers] == pytest.approx([0.0, 0.2, 0.4, 0.6, 0.8], abs=0.002)
    clock.advance(1.0)
    assert [value for _, value in library.ask("nvmlDeviceGetSamples", GPU, 1, answers[-1][0])] == [5, 6, 7, 8, 9]


def test_a_recorded_gpm_window_is_returned_once(tmp_path: Path, clock: ManualClock) -> None:
    script = Script()
    recorder = Recorder(script, hashed=False, clock=clock.monotonic)
    for answer in (None, (1.0, ((1, 0, 50.0), (2, 0, float("nan"))))):
        script.answers["nvmlGpmMetricsGet"] = answer
        recorder.ask("nvmlGpmMetricsGet", GPU, "GPU-a-window", -1)
        clock.advance(1.0)
    library = play(recorder, tmp_path / "x.rec.gz", clock)
    assert library.ask("nvmlGpmMetricsGet", GPU, "another name", -1) is None
    clock.advance(1.0)
    span, metrics = library.ask("nvmlGpmMetricsGet", GPU, "another name", -1)
    assert (span, metrics[0]) == (1.0, (1, 0, 50.0))
    assert library.ask("nvmlGpmMetricsGet", GPU, "another name", -1) is None


def test_uuids_are_hashed_on_request_and_remain_distinct(tmp_path: Path, clock: ManualClock) -> None:
    uuids = ["GPU-0a0b0c0d-1111-2222-3333-444455556666", "MIG-0a0b0c0d-1111-2222-3333-444455556666"]
    script = Script()
    recorder = Recorder(script, hashed=True, clock=clock.monotonic)
    for place, uuid in zip("01", uuids, strict=True):
        script.answers["nvmlDeviceGetUUID"] = uuid
        recorder.ask("nvmlDeviceGetUUID", Handle(place))
    path = tmp_path / "x.rec.gz"
    clock.advance(1.0)
    library = play(recorder, path, clock)
    text = gzip.decompress(path.read_bytes()).decode()
    assert "0a0b0c0d" not in text
    answers = [library.ask("nvmlDeviceGetUUID", Handle(place)) for place in "01"]
    assert answers[0].startswith("GPU-")
    assert answers[1].startswith("MIG-")
    assert answers[0][4:] != answers[1][4:]
    assert [len(uuid) for uuid in answers] == [len(uuid) for uuid in uuids]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "x.rec.gz:1: not a recording of gpu-exporter"),
        ("[]\n", "x.rec.gz:1: not a recording of gpu-exporter"),
        (
            '{"format": "gpu-exporter-recording", "version": 2}\n',
            "x.rec.gz:1: the recording has version 2; this release reads version 1: record again with this release",
        ),
        (
            '{"format": "gpu-exporter-recording", "version": 1}\n{}\n',
            "x.rec.gz:1: the line is malformed (KeyError: 'wall'): record again",
        ),
        ("{head}\noops\n", "x.rec.gz:2: the line is malformed (JSONDecodeError: "),
        ('{head}\n{"call": "a"}\n', "x.rec.gz:2: the line is malformed (KeyError: 'device'): record again"),
        (
            '{head}\n{"call":"a","device":"","arguments":[],"s":[1],"us":[],"answer":[0],"answers":[["ok",1]]}\n',
            "x.rec.gz:2: the line is malformed (the numbers of times and answers differ): record again",
        ),
        (
            '{head}\n{"call":"a","device":"","arguments":[],"s":[1],"us":[1],"answer":[3],"answers":[["ok",1]]}\n',
            "x.rec.gz:2: the line is malformed (an answer is missing): record again",
        ),
        (
            '{head}\n{"call":"a","device":"","arguments":[],"s":[1],"us":[1],"answer":[0],"answers":[["maybe",1]]}\n',
            "x.rec.gz:2: the line is malformed ('maybe' is neither ok nor error",
        ),
    ],
)
def test_an_invalid_recording_is_refused_with_line_and_fault(
    tmp_path: Path, text: str, message: str, clock: ManualClock
) -> None:
    head = json.dumps({"format": "gpu-exporter-recording", "version": 1, "wall": 0, "duration_s": 1})
    path = tmp_path / "x.rec.gz"
    path.write_bytes(gzip.compress(text.replace("{head}", head).encode()))
    with pytest.raises(RecordingError) as error:
        read_recording(path)
    assert message in str(error.value).replace("ValueError: ", "")
    with pytest.raises(DriverUnavailable):
        RecordedLibrary(path, clock).open()


def test_a_file_that_is_not_gzip_is_not_a_recording(tmp_path: Path) -> None:
    path = tmp_path / "x.rec.gz"
    path.write_text("timestamp,\n", encoding="utf-8")
    assert not is_recording(path)
    with pytest.raises(RecordingError, match="not a gzipped recording"):
        read_recording(path)


@given(st.text(max_size=200))
def test_any_text_is_a_recording_or_a_recording_error(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.mktemp("r") / "x.rec.gz"
    head = json.dumps({"format": "gpu-exporter-recording", "version": 1, "wall": 0, "duration_s": 1})
    path.write_bytes(gzip.compress(f"{head}\n{text}".encode("utf-8", "surrogatepass")))
    try:
        read_recording(path)
    except RecordingError:
        return
