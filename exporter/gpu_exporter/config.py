"""Settings from a YAML file over the defaults. Unknown keys are refused with file, line and the key."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from gpu_exporter.defaults import DURATIONS, Settings
from gpu_exporter.durations import format_duration, parse_duration

CHOICES = {"identity.user": ("auto", "name", "uid", "hmac", "none")}  # settings that are words, with those they may be
MATCHER = r'''[A-Za-z_]\w*(?:=|!=|=~|!~)"[^"\\{}$]*"'''  # of PromQL, without an escape
MATCHERS = f"(?:{MATCHER}(?:, ?{MATCHER})*)?"
ADDRESS = r"""(?:https?://[^\s"'`{}$<>\\]*[^\s"'`{}$<>\\/])?"""
LABEL = r"[A-Za-z_]\w*"
POD = r"[\w.*?-]+/[\w.*?-]+"
PATTERNS = {  # settings that are texts: what they must look like, and what that is called
    "attribution.slurm_pods": (
        f"(?:{POD}(?:, ?{POD})*)?",
        "pods as NAMESPACE/POD with * and ?, such as slurm/*-worker-*",
    ),
    "policy.pause_when": (r"[\x20-\x7e]*", "one expression of PromQL, without line breaks"),
    "policy.help_url": (ADDRESS, "an address such as https://docs.example.org/gpu, without a slash at its end"),
    "alerts.selector": (MATCHERS, 'matchers of PromQL such as job="gpu-exporter"'),
    "alerts.reconciler": (MATCHERS, 'matchers of PromQL such as job="gpu-exporter-reconciler"'),
    "alerts.dcgm": (MATCHERS, 'matchers of PromQL such as job="dcgm-exporter"'),
    "alerts.nvidia_smi": (MATCHERS, 'matchers of PromQL such as job="nvidia-gpu-exporter"'),
    "alerts.grafana": (ADDRESS, "an address such as https://grafana.example.org, without a slash at its end"),
    "alerts.exclude": (MATCHERS, 'matchers of PromQL such as namespace!="ops", account!~"class-.*"'),
    "alerts.team_label": (LABEL, "a label of Prometheus"),
    "alerts.queue_label": (LABEL, "a label of Prometheus"),
    "alerts.pod_labels": (
        r"(?:label_\w+(?:, ?label_\w+){0,2})?",
        "at most three labels such as label_project",
    ),
    "alerts.pool_label": (LABEL, "a label of Prometheus"),
}


class ConfigError(ValueError):
    """The configuration is wrong. The text lists every fault, one a line."""


def load_settings(path: Path | None) -> Settings:
    """The defaults, with the file's keys over them. Raises ConfigError."""
    if path is None:
        return Settings()
    import yaml  # heavy, and only wanted when a file is given

    try:
        node = yaml.compose(path.read_text("utf-8"), Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as exc:
        raise ConfigError(f"{path}: {exc}") from exc
    except RecursionError as exc:
        raise ConfigError(f"{path}: nested too deeply for sections and keys") from exc
    if node is None:
        return Settings()
    faults: list[str] = []
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{path}:{node.start_mark.line + 1}: expected sections, e.g. `sampling:`")
    sections: dict[str, Any] = {}
    defaults = Settings()
    for key, value in node.value:
        place = f"{path}:{key.start_mark.line + 1}: {key.value}"
        if not hasattr(defaults, key.value):
            faults.append(_unknown(place, key.value, list(defaults._fields)))
        elif not isinstance(value, yaml.MappingNode):
            faults.append(f"{place}: expected keys below it")
        else:
            section = getattr(defaults, key.value)
            sections[key.value] = _load_section(path, key.value, section, value, faults)
    settings = defaults._replace(**sections)
    if not faults:
        faults = [f"{path}: {fault}" for fault in _check_order(settings)]
    if faults:
        raise ConfigError("\n".join(faults))
    return settings


def _check_order(settings: Settings) -> list[str]:
    """Settings that make sense one by one, but not together."""
    pairs = (
        (
            "policy.candidate_after",
            settings.policy.candidate_after,
            "policy.underused_after",
            settings.policy.underused_after,
        ),
        (
            "four times attribution.interval",
            4 * settings.attribution.interval,
            "ledger.idle_run_unknown_reset",
            settings.ledger.idle_run_unknown_reset,
        ),
        ("ledger.low_ratio", settings.ledger.low_ratio, "ledger.high_ratio", settings.ledger.high_ratio),
    )
    return [
        f"{low_name} ({low:g}) must not be above {high_name} ({high:g})"
        for low_name, low, high_name, high in pairs
        if low > high
    ]


def check_value(section: str, key: str, value: float | str) -> str:
    """Why a value is out of range, "" when it is not. Numbers that are neither durations nor counts are shares."""
    if isinstance(value, str):
        if pattern := PATTERNS.get(f"{section}.{key}"):
            return "" if re.fullmatch(pattern[0], value) else f"{value!r} is not {pattern[1]}"
        choices = CHOICES[f"{section}.{key}"]
        return "" if value in choices else f"{value!r} is not one of {', '.join(choices)}"
    if value <= 0:
        return "must be above 0"
    if f"{section}.{key}" not in DURATIONS and isinstance(value, float) and value > 1:
        return f"{value:g} is not a share between 0 and 1"
    return ""


def render_settings(settings: Settings) -> str:
    """The settings as a configuration file; what differs from the defaults is marked."""
    defaults = Settings()
    lines: list[str] = []
    for section, values in settings._asdict().items():
        lines.append(f"{section}:")
        for name, value in values._asdict().items():
            text = format_duration(value) if f"{section}.{name}" in DURATIONS else str(value)
            text = f"'{text}'" if f"{section}.{name}" in PATTERNS else text
            changed = value != getattr(getattr(defaults, section), name)
            lines.append(f"  {name}: {text}" + ("  # not the default" if changed else ""))
    return "\n".join(lines) + "\n"


def _load_section(path: Path, name: str, section: Any, node: Any, faults: list[str]) -> Any:
    fields = section._fields
    changes: dict[str, Any] = {}
    seen: set[str] = set()
    for key, value in node.value:
        if key.value in seen:
            faults.append(f"{path}:{key.start_mark.line + 1}: {name}.{key.value}: given twice")
        seen.add(key.value)
        place = f"{path}:{key.start_mark.line + 1}: {name}.{key.value}"
        if key.value not in fields:
            faults.append(_unknown(place, key.value, list(fields)))
            continue
        kind = type(getattr(section, key.value))
        is_duration = f"{name}.{key.value}" in DURATIONS
        try:
            text = str(value.value)
            changes[key.value] = parse_duration(text) if is_duration else kind(text)
        except (ValueError, TypeError):
            wanted = "a duration with its unit, e.g. 90s" if is_duration else f"a number ({kind.__name__})"
            faults.append(f"{place}: {value.value!r} is not {wanted}")
            continue
        if fault := check_value(name, key.value, changes[key.value]):
            faults.append(f"{place}: {fault}")
    return section._replace(**changes)


def _unknown(place: str, key: str, known: list[str]) -> str:
    import difflib  # only wanted for an error

    close = difflib.get_close_matches(key, known, 1)
    return f"{place}: unknown key" + (f", did you mean {close[0]}?" if close else f"; known: {', '.join(known)}")
