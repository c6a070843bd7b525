"""Files that try to exhaust memory, stack or time: the result is one clear line and an exit code."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import pytest

from gpu_exporter.agent.devices.nvml import recording
from gpu_exporter.agent.devices.replay import read_recording
from gpu_exporter.agent.devices.scenario import ScenarioError, load_scenario
from gpu_exporter.common import files
from gpu_exporter.common.config.load import ConfigError, load_settings
from gpu_exporter.common.durations import parse_duration

NESTED = "[" * 5000
Read = Callable[[Path], object]


@pytest.mark.parametrize(("read", "error"), [(load_settings, ConfigError), (load_scenario, ScenarioError)])
@pytest.mark.parametrize("text", [NESTED, "a: {b: " * 3000, "gpus: [{model: T4, seed: " + "9" * 5000 + "}]"])
def test_extremely_nested_or_long_yaml_is_refused(
    tmp_path: Path, read: Read, error: type[Exception], text: str
) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(error, match="x.yaml"):
        read(path)


@pytest.mark.parametrize("text", ["9" * 400 + "h", "8785h"])
def test_a_duration_too_long_for_any_wait_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is longer than a year"):
        parse_duration(text)
    assert parse_duration("8784h") == 366 * 86400


@pytest.mark.parametrize("read", [read_recording, recording.read_recording])
def test_a_gzip_bomb_is_read_only_up_to_the_limit(tmp_path: Path, read: Read) -> None:
    path = tmp_path / "bomb.gz"
    with gzip.open(path, "wb") as file:
        for _ in range(300):
            file.write(bytes(2**20))
    assert path.stat().st_size < 400_000
    with pytest.raises(ValueError, match="bomb.gz: not a gzip.*holds more than 256 MiB"):
        read(path)


@pytest.mark.parametrize("place", [2, 15, -1])
def test_a_damaged_gzip_file_is_a_clear_error(tmp_path: Path, place: int) -> None:
    path = tmp_path / "x.gz"
    whole = bytearray(gzip.compress(b"0123456789" * 100))
    whole[place] ^= 0xFF
    path.write_bytes(whole)
    with pytest.raises((OSError, EOFError)):
        files.read_gzip(path, 10_000)
    assert not recording.is_recording(path)


def test_a_deeply_nested_recording_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "deep.gz"
    path.write_bytes(gzip.compress(f'{{"format": "{recording.FORMAT}", "version": 1}}\n{"[" * 99_999}'.encode()))
    with pytest.raises(recording.RecordingError, match="deep.gz:"):
        recording.read_recording(path)
