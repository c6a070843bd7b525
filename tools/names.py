"""Lists every public name: the names that users write into queries, command lines, files and manifests.

The list is tests/golden/names.txt. `+` marks a name that the last release did not have, `-` a name that only the last
release had. CHANGELOG.md must contain both kinds below Unreleased, in backquotes; `*` stands for any text. After a
release, `make golden` removes the marks, and the lines with `-`.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import yaml

from gpu_exporter import reconciler
from gpu_exporter.agent.collectors import registry
from gpu_exporter.agent.exposition.catalog import DEVICE_LABELS, MIG_LABELS, fixed_groups
from gpu_exporter.agent.slurm_collector.collector import CollectorRun
from gpu_exporter.agent.slurm_collector.site import CollectorMetrics
from gpu_exporter.cli.commands import COMMANDS, SERVE
from gpu_exporter.cli.parser import Parser
from gpu_exporter.common.clock import ManualClock
from gpu_exporter.common.model.metrics import Family
from gpu_exporter.common.web.own_metrics import OwnMetrics
from gpu_exporter.reconciler.marks import PREFIX
from gpu_exporter.reconciler.telemetry import Telemetry
from tools.files import ROOT

PACKAGE = ROOT / "exporter" / "gpu_exporter"
CHART = ROOT / "helm" / "gpu-exporter"


def list_names() -> list[str]:
    """Returns one line for each name, sorted: kind, name, and other parts that users depend on (labels)."""
    found = [
        *(f"metric {name}{{{','.join(labels)}}}" for name, labels in _metrics()),
        *(f"flag {flag}" for flag in _flags()),
        *(f"setting {path}" for path in _settings()),
        *(f"value {path}" for path in _values(json.loads((CHART / "values.schema.json").read_text("utf-8")))),
        *(f"json {path}" for path in _json(json.loads((ROOT / "docs" / "status.schema.json").read_text("utf-8")))),
        *(f"{kind} {name}" for kind, name in _rules()),
        *(f"key {name}" for name in _keys()),
    ]
    return sorted(set(found))


def _metrics() -> Iterator[tuple[str, Iterable[str]]]:
    groups: list[tuple[tuple[str, ...], tuple[Family, ...]]]
    groups = [(DEVICE_LABELS, each.families) for each in registry.ALL]
    groups += [(MIG_LABELS, each.instance_families) for each in registry.ALL]
    groups += [(labels, families) for _, labels, families in fixed_groups()]
    for labels, families in groups:
        for family in families:
            yield family.name, (*labels, *family.labels)
    run = CollectorRun(None, None, ManualClock())  # type: ignore[arg-type]  # has not asked Slurm
    for each in (*Telemetry().registry._collector_to_names, CollectorMetrics(run), OwnMetrics("gpu_exporter")):
        for metric in [each] if hasattr(each, "_labelnames") else each.collect():
            described: Any = metric
            kind, name = getattr(described, "_type", None) or described.type, getattr(described, "_name", None)
            name = name or described.name
            if name.startswith("gpu_"):
                yield f"{name}_total" if kind == "counter" else name, described._labelnames


def _flags() -> Iterator[str]:
    for name, command in {"": SERVE, **COMMANDS}.items():
        parser: Parser = command.load().build_parser()
        if name:
            yield name
        for action in parser._actions:
            for flag in action.option_strings:
                yield f"{name} {flag}".strip()


def _settings() -> Iterator[str]:
    for section, keys in yaml.safe_load((PACKAGE / "common" / "config" / "defaults.yaml").read_text("utf-8")).items():
        yield from (f"{section}.{key}" for key in keys)


def _values(schema: Mapping[str, Any], path: str = "") -> Iterator[str]:
    if path == "settings":  # those of the configuration file
        yield path
    elif properties := schema.get("properties"):
        for key, below in properties.items():
            yield from _values(below, f"{path}.{key}".strip("."))
    elif path:
        yield path


def _json(schema: Mapping[str, Any], path: str = "") -> Iterator[str]:
    for key, below in schema.get("properties", {}).items():
        yield f"{path}{key}"
        yield from _json(below, f"{path}{key}.")
    for inside, mark in ((schema.get("items"), "[]."), (schema.get("additionalProperties"), "*.")):
        if isinstance(inside, dict):
            yield from _json(inside, f"{path[:-1]}{mark}" if mark == "[]." else f"{path}{mark}")
    for kind in ("anyOf", "oneOf", "allOf"):
        for each in schema.get(kind, ()):
            yield from _json(each, path)


def _rules() -> Iterator[tuple[str, str]]:
    for path in (ROOT / "alerts" / "rules").rglob("*.yaml"):
        for group in yaml.safe_load(path.read_text("utf-8"))["groups"]:
            for rule in group["rules"]:
                yield ("alert", rule["alert"]) if "alert" in rule else ("recording", rule["record"])


def _keys() -> Iterator[str]:
    """Yields labels, annotations and conditions of objects."""
    for module in pkgutil.walk_packages(reconciler.__path__, "gpu_exporter.reconciler."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, str) and value.startswith(PREFIX) and value != PREFIX:
                yield value


class Changelog(NamedTuple):
    """Parts of CHANGELOG.md: the text below Unreleased, the newest version with its heading, and the text below it."""

    unreleased: str
    version: str
    newest: str


def read_changelog(text: str) -> Changelog:
    """Parses CHANGELOG.md. The newest version is "" before the first release."""
    _, _, unreleased, *released = re.split(r"^## \[?([^]\s]+).*$", text, flags=re.MULTILINE)
    return Changelog(unreleased, *released[:2]) if released else Changelog(unreleased, "", "")


def update(golden: str, names: Iterable[str], changelog: str) -> tuple[str, list[str]]:
    """Returns the new text of the list, and its changed lines that the changelog lacks. `golden`: the present one."""
    log, now = read_changelog(changelog), set(names)
    head, *lines = golden.splitlines() or [_head(log.version), *now]
    released = {line.removeprefix("- ") for line in lines if not line.startswith("+ ")}
    changed = {name: "+ " if name in now else "- " for name in now ^ released}
    is_release = head != _head(log.version)
    section = log.newest if is_release else log.unreleased
    unnamed = [f"{changed[name]}{name}" for name in sorted(changed) if not _is_named(name, section)]
    shown = now if is_release else now | released
    rows = (f"{'' if is_release else changed.get(name, '')}{name}" for name in sorted(shown))
    return "\n".join((_head(log.version), *rows, "")), unnamed


def _head(version: str) -> str:
    return f"# Public names (tools/names.py), and changes since {version or 'the list was begun'}"


def _is_named(line: str, section: str) -> bool:
    """Returns whether the section contains the name. The changelog may name a flag without its command, and a metric
    without its labels.
    """
    name = line.partition(" ")[2]
    spellings = (name, name.partition("{")[0], name.rpartition(" ")[2])
    tokens = [re.escape(token).replace(r"\*", ".*") for token in re.findall(r"`([^`\n]+)`", section)]
    return any(re.fullmatch(token, each) for token in tokens for each in spellings)


if __name__ == "__main__":
    sys.stdout.write("".join(f"{name}\n" for name in list_names()))
