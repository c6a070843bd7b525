"""Settings: unknown keys and wrong values are refused with file, line and key."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_exporter.common.config.defaults import Settings
from gpu_exporter.common.config.load import Config, ConfigError, load_settings, render_config
from gpu_exporter.common.durations import parse_duration

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


@pytest.mark.parametrize(("text", "seconds"), [("500ms", 0.5), ("15s", 15.0), ("1h30m", 5400.0), ("2d", 172_800.0)])
def test_durations_are_parsed_to_seconds(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "15", "s", "1x", "1h 5m", "-1s"])
def test_invalid_durations_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a duration"):
        parse_duration(text)


def test_every_setting_has_its_source_or_reason() -> None:
    """Each key of defaults.yaml has its reason on the same line."""
    text = (ROOT / "exporter" / "gpu_exporter" / "common" / "config" / "defaults.yaml").read_text("utf-8")
    keys = [line for line in text.splitlines() if line.startswith("  ")]
    assert len(keys) == sum(len(section) for section in Settings())
    assert all("#" in line for line in keys)
