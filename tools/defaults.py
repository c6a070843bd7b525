"""Generates defaults.py from defaults.yaml."""

from __future__ import annotations

import json
import re

import yaml

from gpu_exporter.common.durations import DURATION, SECONDS

TAKEN = {"causes", "identity", "ledger"}  # their words name classes of other packages


def class_of(section: str) -> str:
    return section.capitalize() + ("Defaults" if section in TAKEN else "")


def render_defaults(text: str) -> str:
    """Returns named tuples with the settings of defaults.yaml, so that a start needs no YAML parser, and mypy checks
    every key.
    """
    comments, section = {}, ""
    for line in text.splitlines():
        if heading := re.match(r"(\w+):", line):
            section = heading[1]
        elif entry := re.match(r"  (\w+):[^#]*#\s*(.*)$", line):
            comments[section, entry[1]] = entry[2]
    sections = yaml.safe_load(text)
    out = [
        '"""Generated from defaults.yaml by tools/generate.py: do not edit.',
        "",
        "Durations are seconds, ratios 0 to 1.",
        '"""',
        "",
        "from __future__ import annotations",
        "",
        "from typing import NamedTuple",
    ]
    durations = sorted(
        f"{section}.{key}"
        for section, keys in sections.items()
        for key, value in keys.items()
        if DURATION.fullmatch(str(value))
    )
    for section, keys in sections.items():
        out += ["", "", f"class {class_of(section)}(NamedTuple):"]
        out.append(f'    """Keys of the section `{section}`."""')
        out.append("")
        for key, value in keys.items():
            match = DURATION.fullmatch(str(value))
            if match:
                annotation, default = "float", repr(float(match[1]) * SECONDS[match[2]])
                reason = "seconds; " + comments.get((section, key), "")
            else:
                annotation, default, reason = (
                    type(value).__name__,
                    json.dumps(value) if isinstance(value, str) and '"' not in value else repr(value),
                    comments.get((section, key), ""),
                )
            out += [f"    {key}: {annotation} = {default}", f'    """{reason.strip("; ")}"""']
    out += ["", "", "class Settings(NamedTuple):"]
    out += ['    """Every window and threshold."""', ""]
    out += [f"    {name}: {class_of(name)} = {class_of(name)}()" for name in sections]
    out += ["", "", "DURATIONS = frozenset(", "    ("]
    out += [f'        "{name}",' for name in durations]
    out += ["    )", ")", '"""Keys that are written with a unit, e.g. 90s."""']
    return "\n".join(out) + "\n"
