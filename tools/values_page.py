"""Generates the table of values in the chart's README, from values.yaml and its comments."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tools.files import ROOT

CHART = ROOT / "helm" / "gpu-exporter"
PATH = CHART / "README.md"
BEGIN, END = "<!-- generated: values -->\n", "<!-- end -->\n"
KEY = re.compile(r"^(?P<indent> *)(?P<key>[A-Za-z]\w*):(?P<rest>.*)$")
COMMENT = re.compile(r"(?:^|\s)# (?P<text>.*)$")
LONG = 60  # characters of a default that a table can show


def build_page() -> dict[Path, str]:
    """Returns the page with a new table."""
    text = PATH.read_text("utf-8")
    head, tail = text.split(BEGIN)[0], text.split(END)[-1]
    return {PATH: f"{head}{BEGIN}{_table()}{END}{tail}"}


def _table() -> str:
    values = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))
    schema = json.loads((CHART / "values.schema.json").read_text("utf-8"))
    lines = ["| value | default | what it does |", "| --- | --- | --- |"]
    for path, words in _keys((CHART / "values.yaml").read_text("utf-8"), schema):
        default: Any = values
        for key in path:
            default = default[key]
        is_section = _properties(schema, path) is not None and path != ("settings",)
        name = f"**`{'.'.join(path)}`**" if is_section else f"`{'.'.join(path)}`"
        if is_section and not words:
            continue
        lines.append(f"| {name} | {'' if is_section else _show(default)} | {words} |")
    return "\n".join(lines) + "\n"


def _keys(text: str, schema: dict[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yields the path of each value in the schema, in the order of the file, with the comments above and beside it."""
    path: list[str] = []
    above: list[str] = []
    for line in text.splitlines():
        if line.lstrip().startswith("#"):
            above.append(line.lstrip("# "))
            continue
        found = KEY.match(line)
        if found is None:
            above = []
            continue
        depth = len(found["indent"]) // 2
        former, path = path, [*path[:depth], found["key"]]
        if depth > len(former) or (_properties(schema, tuple(path[:-1])) or {}).get(path[-1]) is None:
            path, above = former, []
            continue
        beside = COMMENT.search(found["rest"])
        yield tuple(path), " ".join([*above, *([beside["text"]] if beside else [])]).replace("|", "\\|")
        above = []


def _properties(schema: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any] | None:
    for key in path:
        schema = (schema.get("properties") or {}).get(key, {})
    found: dict[str, Any] | None = schema.get("properties")
    return found


def _show(default: Any) -> str:
    text = json.dumps(default)
    return f"`{text}`".replace("|", "\\|") if len(text) <= LONG else "see values.yaml"
