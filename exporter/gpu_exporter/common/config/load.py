"""Settings: the defaults, overridden by a YAML file. An unknown key is an error, which names the file, line and key."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gpu_exporter.common.config.defaults import DURATIONS, Settings
from gpu_exporter.common.config.values import PATTERNS, parse_value, unknown_key
from gpu_exporter.common.durations import format_duration
from gpu_exporter.common.files import read_named
from gpu_exporter.common.plain import describe_yaml

if TYPE_CHECKING:
    from gpu_exporter.common.config.rules import PolicyRule

FILE_MAX = 2**20  # bytes
RULES = "policies"  # the only key that is not a section: an ordered list


class ConfigError(ValueError):
    """The configuration is invalid. The text lists every fault, one per line."""


class Config(NamedTuple):
    """A configuration file: the settings, and the reconciler's ordered policies."""

    settings: Settings = Settings()
    rules: tuple[PolicyRule, ...] = ()


class Order(NamedTuple):
    """A rule: `times` x the setting `low` must not exceed `high`. `words`: text before `low` in the error."""

    low: str
    high: str
    times: int = 1
    words: str = ""


ORDER = (
    Order("policy.candidate_after", "policy.underused_after"),
    Order("attribution.interval", "ledger.idle_run_unknown_reset", 4, "four times "),
    Order("ledger.low_ratio", "ledger.high_ratio"),
    Order("stalls.proven_after", "stalls.after"),
)


def load_settings(path: Path | None) -> Settings:
    """Returns only the settings of `load_config`. Raises ConfigError."""
    return load_config(path).settings


def load_config(path: Path | None) -> Config:
    """Returns the defaults, overridden by the keys of the file. Raises ConfigError."""
    if path is None:
        return Config()
    import yaml  # slow to import, and needed only if a file is given

    try:
        text = read_named(path, FILE_MAX).decode("utf-8")
        if not text.strip():  # a full disk leaves such a file
            raise ConfigError(f"{path}: the file is empty: write {{}} for the defaults")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as exc:
        raise ConfigError(f"{path}: {describe_yaml(exc)}") from exc
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{path}: {exc}") from exc
    except RecursionError as exc:
        raise ConfigError(f"{path}: nested too deeply; only sections with keys are allowed") from exc
    if node is None:
        return Config()
    faults: list[str] = []
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{path}:{node.start_mark.line + 1}: expected sections, e.g. `sampling:`")
    nodes: dict[str, Any] = {}
    sections: dict[str, Any] = {}
    defaults = Settings()
    for key, value in node.value:
        place = f"{path}:{key.start_mark.line + 1}: {key.value}"
        if key.value in nodes:
            faults.append(f"{place}: given twice")
        elif key.value not in (*defaults._fields, RULES):
            faults.append(_unknown_key(place, key.value, [*defaults._fields, RULES]))
        elif key.value != RULES and not isinstance(value, yaml.MappingNode):
            faults.append(f"{place}: expected keys below it")
        elif key.value != RULES:
            section = getattr(defaults, key.value)
            sections[key.value] = _load_section(path, key.value, section, value, faults)
        nodes[key.value] = value
    settings = defaults._replace(**sections)
    if not faults:
        faults = [f"{path}: {fault}" for fault in _check_order(settings)]
    rules: tuple[PolicyRule, ...] = ()
    if RULES in nodes:
        from gpu_exporter.common.config.rules import RuleFaults, read_rules  # only the reconciler needs them

        try:
            rules = read_rules(str(path), nodes[RULES], settings.policy)
        except RuleFaults as exc:
            faults += exc.faults
    if faults:
        raise ConfigError("\n".join(faults))
    return Config(settings, rules)


def _check_order(settings: Settings) -> list[str]:
    """Returns the faults of settings that are valid alone, but not together."""

    def read(name: str) -> float:
        section, key = name.split(".")
        return float(getattr(getattr(settings, section), key))

    return [
        f"{each.words}{each.low} ({each.times * read(each.low):g}) must not be above {each.high} ({read(each.high):g})"
        for each in ORDER
        if each.times * read(each.low) > read(each.high)
    ]


def render_config(config: Config) -> str:
    """Returns the effective configuration, as a configuration file; values that differ from the defaults are marked."""
    settings, defaults = config.settings, Settings()
    lines: list[str] = []
    for section, values in settings._asdict().items():
        lines.append(f"{section}:")
        for name, value in values._asdict().items():
            text = format_duration(value) if f"{section}.{name}" in DURATIONS else str(value)
            if isinstance(value, float) and "e" in text:
                text = f"{value:.12f}".rstrip("0")  # YAML 1.1 takes 1e-07 for a word
            text = f"'{text}'" if f"{section}.{name}" in PATTERNS else text
            changed = value != getattr(getattr(defaults, section), name)
            lines.append(f"  {name}: {text}" + ("  # not the default" if changed else ""))
    text = "\n".join(lines) + "\n"
    if config.rules:
        import yaml

        from gpu_exporter.common.config.rules import plain_rules

        text += yaml.safe_dump({RULES: plain_rules(config.rules)}, sort_keys=False, allow_unicode=True)
    return text


def render_config_json(config: Config) -> str:
    """Returns the effective configuration as JSON, which is a configuration file too."""
    import json

    found: dict[str, Any] = {
        section: {
            name: format_duration(value) if f"{section}.{name}" in DURATIONS else value
            for name, value in values._asdict().items()
        }
        for section, values in config.settings._asdict().items()
    }
    if config.rules:
        from gpu_exporter.common.config.rules import plain_rules

        found[RULES] = plain_rules(config.rules)
    return json.dumps(found, indent=1) + "\n"


def _unknown_key(place: str, key: str, known: Sequence[str]) -> str:
    """The error for an unknown key. If the key belongs to other sections, the error names them."""
    sections = [section for section, values in Settings()._asdict().items() if key in values._fields]
    return (
        f"{place}: unknown key here; it belongs to {' or '.join(sections)}"
        if sections
        else unknown_key(place, key, known)
    )


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
            faults.append(_unknown_key(place, key.value, list(fields)))
            continue
        try:
            changes[key.value] = parse_value(name, key.value, str(value.value))
        except ValueError as exc:
            faults.append(f"{place}: {exc}")
    return section._replace(**changes)
