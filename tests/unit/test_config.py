"""Settings: unknown keys and wrong values are refused with file, line and key."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tools.config_schema import DURATION, DURATION_OR_NONE

from gpu_exporter.common.config.defaults import Settings
from gpu_exporter.common.config.load import (
    Config,
    ConfigError,
    load_config,
    load_settings,
    render_config,
    render_config_json,
)
from gpu_exporter.common.durations import describe_duration, format_age, format_duration, parse_duration

ROOT = Path(__file__).resolve().parents[2]


def test_without_a_file_the_settings_are_the_defaults() -> None:
    assert load_settings(None) == Settings()


def test_the_defaults_file_reads_back_as_the_defaults() -> None:
    assert load_settings(ROOT / "exporter" / "gpu_exporter" / "common" / "config" / "defaults.yaml") == Settings()


def test_keys_override_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("policy:\n  candidate_after: 1h30m\nledger:\n  low_ratio: 0.2\n", encoding="utf-8")
    settings = load_settings(path)
    assert settings.policy.candidate_after == 5400.0
    assert settings.ledger.low_ratio == 0.2
    assert settings.sampling == Settings().sampling


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("polcy:\n  x: 1\n", ["c.yaml:1: polcy: unknown key, did you mean policy?"]),
        ("Policy: {}\n", ["c.yaml:1: Policy: unknown key, did you mean policy?"]),
        (
            "wait: 3s\npolicy: {low_ratio: 0.1, window: 3s}\n",
            [
                "c.yaml:1: wait: unknown key here; it belongs to alerts",
                "c.yaml:2: policy.low_ratio: unknown key here; it belongs to ledger",
                "c.yaml:2: policy.window: unknown key here; it belongs to diagnosis or alerts",
            ],
        ),
        (
            "policy:\n  candidat_after: 1h\n",
            ["c.yaml:2: policy.candidat_after: unknown key, did you mean candidate_after?"],
        ),
        (
            "policy:\n  candidate_after: 90\n  coverage_min: much\n",
            [
                "c.yaml:2: policy.candidate_after: '90' is not a duration with its unit, e.g. 90s",
                "c.yaml:3: policy.coverage_min: 'much' is not a number (float)",
            ],
        ),
        ("sampling:\n  interval: 0s\n", ["c.yaml:2: sampling.interval: must be above 0"]),
        (
            "sampling:\n  interval: 100ms\n",
            [
                "c.yaml:2: sampling.interval: must be at least 200ms: GPM compares two moments over 100 ms apart; "
                "otherwise every second cycle is unknown"
            ],
        ),
        ("policy:\n  coverage_min: 90\n", ["c.yaml:2: policy.coverage_min: 90 is not a share between 0 and 1"]),
        (
            "alerts:\n  dcgm_idle_max_ratio: 0.02\n",
            [
                "c.yaml:2: alerts.dcgm_idle_max_ratio: must be at most 0.01: higher activity is work, and no second "
                "witness would show this work on a MIG instance"
            ],
        ),
        (
            "identity:\n  user: sha1\n",
            ["c.yaml:2: identity.user: 'sha1' is not one of auto, name, uid, hmac, none"],
        ),
        (
            "policy:\n  candidate_after: 3h\n  underused_after: 1h\n",
            ["c.yaml: policy.candidate_after (10800) must not be above policy.underused_after (3600)"],
        ),
        (
            "attribution:\n  interval: 30s\n",
            ["c.yaml: four times attribution.interval (120) must not be above ledger.idle_run_unknown_reset (60)"],
        ),
        (
            "stalls: {proven_after: 20m}",
            ["c.yaml: stalls.proven_after (1200) must not be above stalls.after (900)"],
        ),
        ("sampling:\n  interval: 1s\n  interval: 2s\n", ["c.yaml:3: sampling.interval: given twice"]),
        ("policy: 3\n", ["c.yaml:1: policy: expected keys below it"]),
        ("- a\n", ["c.yaml:1: expected sections, e.g. `sampling:`"]),
    ],
)
def test_every_configuration_fault_is_reported_with_its_line(tmp_path: Path, text: str, faults: list[str]) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as error:
        load_settings(path)
    assert str(error.value).splitlines() == [fault.replace("c.yaml", str(path)) for fault in faults]


def test_the_output_of_check_config_is_a_valid_configuration(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("policy:\n  candidate_after: 90m\n", encoding="utf-8")
    settings = load_settings(path)
    text = render_config(Config(settings))
    assert "  candidate_after: 90m  # not the default" in text
    path.write_text(text, encoding="utf-8")
    assert load_settings(path) == settings


def test_the_configuration_as_json_is_a_valid_configuration(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    rule = "{name: a, match: {namespaces: [ml-*]}, underused_after: 1w2d}"
    path.write_text(
        f"policy: {{gap_max: 1w, idle_after_max: 90m}}\nledger: {{low_ratio: 0.0000001}}\npolicies: [{rule}]\n"
    )
    config = load_config(path)
    text = render_config_json(config)
    found = json.loads(text)
    assert (found["policy"]["gap_max"], found["policies"][0]["underused_after"]) == ("1w", "9d")
    path.write_text(text, encoding="utf-8")
    assert load_config(path) == config


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("500ms", 0.5), ("15s", 15.0), ("1h30m", 5400.0), ("2d", 172_800.0), ("1w", 604_800.0), ("1w2d", 777_600.0)],
)
def test_durations_are_parsed_to_seconds(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@given(st.integers(0, 366 * 86_400_000))
def test_a_duration_is_read_back_as_it_was_written(milliseconds: int) -> None:
    """In a configuration file, to the millisecond. In sentences and columns, to the smaller of its two units."""
    seconds = milliseconds / 1000
    assert parse_duration(format_duration(seconds)) == pytest.approx(seconds, abs=1e-6)
    unit = 1 if seconds < 3600 else 60 if seconds < 86_400 else 3600
    assert 0 <= seconds - parse_duration(describe_duration(seconds)) < unit
    unit = 1 if seconds < 60 else 60 if seconds < 86_400 else 3600
    assert 0 <= seconds - parse_duration(format_age(seconds)) < unit


@pytest.mark.parametrize("text", ["90m", "36h", "1d", "9d", "2w", "1500ms", "0s"])
def test_a_duration_is_written_with_the_largest_unit_that_needs_no_second_one(text: str) -> None:
    assert format_duration(parse_duration(text)) == text


@pytest.mark.parametrize("text", ["1w", "1w2d", "1.5h", "0s", "0ms", "1y", "15", "1h 5m", "5m1.5s"])
def test_schema_and_parser_accept_the_same_durations(text: str) -> None:
    try:
        seconds = parse_duration(text)
    except ValueError:
        seconds = -1.0
    assert (re.search(DURATION_OR_NONE, text) is not None) == (seconds >= 0)
    assert (re.search(DURATION, text) is not None) == (seconds > 0)


@pytest.mark.parametrize("text", ["", "15", "s", "1x", "1h 5m", "-1s", "1y", "\N{ARABIC-INDIC DIGIT ONE}h"])
def test_invalid_durations_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a duration"):
        parse_duration(text)


def test_every_setting_has_its_source_or_reason() -> None:
    """Each key of defaults.yaml has its reason on the same line."""
    text = (ROOT / "exporter" / "gpu_exporter" / "common" / "config" / "defaults.yaml").read_text("utf-8")
    keys = [line for line in text.splitlines() if line.startswith("  ")]
    assert len(keys) == sum(len(section) for section in Settings())
    assert all("#" in line for line in keys)
