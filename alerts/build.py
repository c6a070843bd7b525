"""Builds the Prometheus rules from alerts/src: fills in parameters, adds the runbook links.

    python alerts/build.py                          writes alerts/rules
    python alerts/build.py --check                  says whether alerts/rules is up to date
    python alerts/build.py --output DIR --set idle_for=10s --set idle_warn_for=0s
                                                    writes a variant elsewhere, e.g. with a site's own windows

The parameters are the section `alerts` of exporter/gpu_exporter/defaults.yaml.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from gpu_exporter.config import parse_duration
from gpu_exporter.defaults import DURATIONS, Alerts

HERE = Path(__file__).resolve().parent
RUNBOOK = "https://github.com/gpu-exporter/gpu-exporter/blob/main/alerts/runbook.md"
TARGET = "node, instance"
KEY = f"{TARGET}, gpu, uuid, mig, mig_uuid, scheduler, namespace, pod, container, job_id"
PARAMETER = re.compile(r"\$\{(\w+)(\.seconds)?\}")
HEADER = "# Generated from alerts/src/{name} by alerts/build.py: do not edit.\n"


class BuildError(ValueError):
    """A source names a parameter that does not exist, or a value is wrong."""


def format_duration(seconds: float) -> str:
    """Seconds as a PromQL duration: 1800 to 30m, 0.5 to 500ms."""
    for unit, size in (("h", 3600), ("m", 60), ("s", 1)):
        if seconds >= size and seconds % size == 0:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds * 1000:.0f}ms" if seconds else "0s"


def read_parameters(overrides: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Each parameter as (text, seconds or number). Raises BuildError for an unknown or wrong override."""
    values: dict[str, tuple[str, str]] = {"key": (KEY, KEY), "target": (TARGET, TARGET)}
    defaults = Alerts()._asdict()
    unknown = sorted(set(overrides) - set(defaults))
    if unknown:
        raise BuildError(f"{unknown[0]}: no such parameter; known: {', '.join(defaults)}")
    for name, default in defaults.items():
        if f"alerts.{name}" in DURATIONS:
            try:
                seconds = parse_duration(overrides[name]) if name in overrides else default
            except ValueError as exc:
                raise BuildError(f"{name}: {exc}") from exc
            values[name] = (format_duration(seconds), f"{seconds:g}")
        else:
            values[name] = (f"{float(overrides.get(name, default)):g}",) * 2
    return values


def build_rules(text: str, parameters: Mapping[str, tuple[str, str]], name: str) -> str:
    """One source file to one rules file. Raises BuildError."""

    def fill(match: re.Match[str]) -> str:
        if match[1] not in parameters:
            raise BuildError(f"{name}: ${{{match[1]}}} is no parameter; known: {', '.join(parameters)}")
        return parameters[match[1]][1 if match[2] else 0]

    code = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    data: dict[str, Any] = yaml.safe_load(PARAMETER.sub(fill, code))
    for group in data["groups"]:
        for rule in group["rules"]:
            if "alert" in rule:
                rule["annotations"]["runbook_url"] = f"{RUNBOOK}#{rule['alert'].lower()}"
    return HEADER.format(name=name) + yaml.dump(data, sort_keys=False, width=10_000, Dumper=_Dumper)


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks, as people do."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _represent_text)


def build_all(overrides: Mapping[str, str]) -> dict[str, str]:
    """Every rules file by its name."""
    parameters = read_parameters(overrides)
    return {
        path.name: build_rules(path.read_text("utf-8"), parameters, path.name)
        for path in sorted((HERE / "src").glob("*.yaml"))
    }


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Build the Prometheus rules.", allow_abbrev=False)
    parser.add_argument("--output", type=Path, default=HERE / "rules", help="directory (default alerts/rules)")
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="override a parameter")
    options = parser.parse_args(arguments)
    try:
        files = build_all(dict(entry.split("=", 1) for entry in options.set))
    except (BuildError, ValueError) as exc:
        print(f"build.py: {exc}", file=sys.stderr)
        return 2
    stale = 0
    for name, text in files.items():
        path = options.output / name
        if not options.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text("utf-8") != text:
            print(f"{path} is stale: run `make generate`", file=sys.stderr)
            stale = 1
    return stale


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
