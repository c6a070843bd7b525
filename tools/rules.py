"""Builds the Prometheus rules from alerts/src: fills in parameters, and adds links to the runbook.

    python -m tools.rules                   writes alerts/rules
    python -m tools.rules --output DIR --set idle_for=10s --set wait=0s
                                            writes a variant elsewhere, e.g. with a site's own windows
    python -m tools.rules --output DIR --recordings
                                            omits the alerts, for sites where Grafana evaluates them

The parameters are the section `alerts` of common/config/defaults.yaml. `--config.file` reads a site's values,
from the same file that the exporter reads.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml
from alerts.parameters import DASHBOARD, FIXED, RUNBOOK

from gpu_exporter.common.config.defaults import DURATIONS, Alerts
from gpu_exporter.common.config.load import ConfigError, load_settings
from gpu_exporter.common.config.values import check_value
from gpu_exporter.common.durations import format_duration, parse_duration
from tools.files import ROOT, write_or_check

SOURCES, RULES = ROOT / "alerts" / "src", ROOT / "alerts" / "rules"

LOOKBACK_S = 300.0  # Prometheus's --query.lookback-delta: an older recording is missing until the next evaluation
WAITS = ("wait", "wait_long", "keep")  # may be 0s in tests with short windows
PARAMETER = re.compile(r"\$\{([a-z]\w*)(\.seconds)?\}")  # ${1} belongs to PromQL
HEADER = "# Generated from alerts/src/{name} by tools/rules.py: do not edit.\n"


class BuildError(ValueError):
    """A source file uses an unknown parameter, or a value is invalid."""


def read_parameters(alerts: Alerts, overrides: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Returns each parameter as a text and as seconds or a number. Raises BuildError for an invalid override."""
    values: dict[str, tuple[str, str]] = {}
    defaults = alerts._asdict()
    unknown = sorted(set(overrides) - set(defaults))
    if unknown:
        raise BuildError(f"{unknown[0]}: no such parameter; known: {', '.join(defaults)}")
    for name, default in defaults.items():
        is_duration = f"alerts.{name}" in DURATIONS
        parse: Callable[[str], float | str] = parse_duration if is_duration else type(default)
        try:
            value = parse(overrides[name]) if name in overrides else default
        except ValueError as exc:
            raise BuildError(f"{name}: {exc}") from exc
        may_be_zero = name in WAITS
        if fault := "" if may_be_zero and value == 0 else check_value("alerts", name, value):
            raise BuildError(f"{name}: {fault}")
        values[name] = format_parameter(name, value), f"{value:g}" if isinstance(value, float) else value
    for name in ("interval", "owners_interval"):
        if float(values[name][1]) >= LOOKBACK_S:
            raise BuildError(f"{name}: must be below {LOOKBACK_S:g}s: Prometheus forgets a series that is older")
    for name, text in FIXED.items():
        filled = PARAMETER.sub(lambda match: values[match[1]][1 if match[2] else 0], text)
        values[name] = filled, filled
    return values


def format_parameter(name: str, value: float | str) -> str:
    """Writes a parameter in the notation of a configuration file."""
    if isinstance(value, str):
        return value
    return format_duration(value) if f"alerts.{name}" in DURATIONS else f"{value:g}"


def fill_text(text: str, parameters: Mapping[str, tuple[str, str]], name: str) -> str:
    """Fills parameters into the text of the file `name`. Raises BuildError."""

    def value_of(match: re.Match[str]) -> str:
        if match[1] not in parameters:
            raise BuildError(f"{name}: ${{{match[1]}}} is not a parameter; known: {', '.join(parameters)}")
        return parameters[match[1]][1 if match[2] else 0]

    return PARAMETER.sub(value_of, text)


def build_rules(text: str, parameters: Mapping[str, tuple[str, str]], name: str, *, alerts: bool = True) -> str:
    """Converts one source file to one rules file. Without `alerts`, keeps only its recordings. Raises BuildError."""

    def fill(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: fill(value) for key, value in node.items()}
        if isinstance(node, list):
            return [fill(value) for value in node]
        return fill_text(node, parameters, name) if isinstance(node, str) else node

    code = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    data: dict[str, Any] = fill(yaml.safe_load(code))  # after parsing, so that no matcher is parsed as YAML
    for group in data["groups"]:
        group["rules"] = [rule for rule in group["rules"] if alerts or "record" in rule]
        for rule in group["rules"]:
            rule["expr"] = rule["expr"].strip() + "\n"  # a block, so that the chart can insert any matcher
            if "alert" in rule:
                rule["annotations"]["runbook_url"] = f"{RUNBOOK}#{rule['alert'].lower()}"
                rule["annotations"]["dashboard_url"] = DASHBOARD % parameters["grafana"][0]
    data["groups"] = [group for group in data["groups"] if group["rules"]]
    return HEADER.format(name=name) + yaml.dump(data, sort_keys=False, width=10_000, Dumper=Blocks)


class Blocks(yaml.SafeDumper):
    """Writes texts of several lines as YAML blocks."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


Blocks.add_representer(str, _represent_text)


def build_all(settings: Alerts, overrides: Mapping[str, str], *, alerts: bool = True) -> dict[str, str]:
    """Returns the text of every rules file by name. A site loads at most one of the files `optional/NAME`."""
    parameters = read_parameters(settings, overrides)
    return {
        name: build_rules(path.read_text("utf-8"), parameters, name, alerts=alerts)
        for path in sorted(SOURCES.rglob("*.yaml"))
        for name in [path.relative_to(SOURCES).as_posix()]
    }


def add_parameters(parser: argparse.ArgumentParser) -> None:
    """Adds the options with which a site sets parameters."""
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="override a parameter")
    parser.add_argument("--config.file", dest="config", type=Path, help="take the section `alerts` of this file")


def chosen_parameters(options: argparse.Namespace) -> tuple[Alerts, dict[str, str]]:
    """Returns a site's section `alerts` and its overrides. Raises BuildError or ConfigError."""
    if wrong := [entry for entry in options.set if "=" not in entry]:
        raise BuildError(f"--set {wrong[0]}: expected NAME=VALUE")
    return load_settings(options.config).alerts, dict(entry.split("=", 1) for entry in options.set)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Build the Prometheus rules.", allow_abbrev=False)
    parser.add_argument("--output", type=Path, default=RULES, help="directory (default alerts/rules)")
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    parser.add_argument("--recordings", action="store_true", help="omit the alerts")
    add_parameters(parser)
    options = parser.parse_args(arguments)
    try:
        files = build_all(*chosen_parameters(options), alerts=not options.recordings)
    except (BuildError, ConfigError) as exc:
        print(f"tools.rules: {exc}", file=sys.stderr)
        return 2
    return write_or_check({options.output / name: text for name, text in files.items()}, options.check)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
