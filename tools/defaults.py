"""Generates defaults.py from defaults.yaml."""

from __future__ import annotations

import json

import yaml

from gpu_exporter.common.durations import DURATION, SECONDS

TAKEN = {"causes", "identity", "ledger"}  # their words name classes of other packages
HEAD = '''"""Generated from defaults.yaml, which has the reason of each value, by tools/generate.py: do not edit."""

from typing import Annotated, NamedTuple, TypeAlias

Seconds: TypeAlias = Annotated[float, "written with a unit, e.g. 90s"]
'''
TAIL = """

DURATIONS = frozenset(
    f"{section}.{key}"
    for section, values in Settings()._asdict().items()
    for key, kind in type(values).__annotations__.items()
    if kind is Seconds
)
"""


def class_of(section: str) -> str:
    return section.capitalize() + ("Defaults" if section in TAKEN else "")


def render_defaults(text: str) -> str:
    """Returns named tuples with the settings of defaults.yaml, so that a start parses no YAML, and mypy checks keys."""
    sections = yaml.safe_load(text)
    out = [HEAD]
    for section, keys in sections.items():
        out.append(f"\n\nclass {class_of(section)}(NamedTuple):\n")
        out += [f"    {key}: {_render(value)}\n" for key, value in keys.items()]
    out.append("\n\nclass Settings(NamedTuple):\n")
    out += [f"    {name}: {class_of(name)} = {class_of(name)}()\n" for name in sections]
    return "".join([*out, TAIL])


def _render(value: object) -> str:
    """Returns type and value of a setting."""
    if match := DURATION.fullmatch(str(value)):
        return f"Seconds = {float(match[1]) * SECONDS[match[2]]!r}"
    shown = json.dumps(value) if isinstance(value, str) and '"' not in value else repr(value)
    return f"{type(value).__name__} = {shown}"
