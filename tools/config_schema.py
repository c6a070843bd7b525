"""Generates the JSON Schema of the configuration file, for editors, the chart, and authors of such files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gpu_exporter.common.config.defaults import DURATIONS, Policy, Settings
from gpu_exporter.common.config.rules import CEILINGS, CHANGES, CLASSES, NAME, PATTERN_MAX, RULES_MAX, Match
from gpu_exporter.common.config.values import CHOICES, MAY_BE_ZERO, MOST, PATTERNS
from gpu_exporter.common.durations import SECONDS
from gpu_exporter.diagnosis.causes.rules import RULES
from tools.files import ROOT

PATH = ROOT / "docs" / "config.schema.json"
UNIT = f"({'|'.join(SECONDS)})"
PART = rf"[0-9]+(\.[0-9]+)?{UNIT}"
# Above 0, as the configuration requires: one of the parts is.
DURATION = rf"^({PART})*([0-9]*[1-9][0-9]*(\.[0-9]+)?|0+\.0*[1-9][0-9]*){UNIT}({PART})*$"
DURATION_OR_NONE = rf"^({PART})+$"
# Below 5m, as tools/rules.py requires.
BELOW_LOOKBACK = r"^([1-9][0-9]{0,4}ms|[1-9][0-9]?s|[12][0-9]{2}s|[1-4]m)$"


def settings_schema() -> dict[str, Any]:
    """Returns the schema of every section and key. Other keys are invalid."""
    sections: dict[str, Any] = {}
    for section, values in Settings()._asdict().items():
        keys: dict[str, Any] = {}
        for key, default in values._asdict().items():
            keys[key] = _value_schema(section, key, default)
        sections[section] = {"type": "object", "additionalProperties": False, "properties": keys}
    return {"type": "object", "additionalProperties": False, "properties": {**sections, "policies": _policies_schema()}}


def _value_schema(section: str, key: str, default: Any) -> dict[str, Any]:
    if choices := CHOICES.get(f"{section}.{key}"):
        return {"enum": list(choices)}
    if (section, key) == ("diagnosis", "without"):  # as the commands refuse it: only causes that exist
        name = "|".join(("stalls", *RULES))
        return {"type": "string", "pattern": f"^(?:(?:{name})(?:, ?(?:{name}))*)?$"}
    if text := PATTERNS.get(f"{section}.{key}"):
        return {"type": "string", "pattern": f"^(?:{text[0]})$"}
    if f"{section}.{key}" in ("alerts.interval", "alerts.owners_interval"):
        return {"type": "string", "pattern": BELOW_LOOKBACK}
    if f"{section}.{key}" in DURATIONS:
        return {"type": "string", "pattern": DURATION_OR_NONE if f"{section}.{key}" in MAY_BE_ZERO else DURATION}
    share = isinstance(default, float)  # as in check_value: a number that is neither a duration nor a count
    number = {"type": "number" if share else "integer", "exclusiveMinimum": 0}
    if most := MOST.get(f"{section}.{key}"):
        return {**number, "maximum": most[0]}
    return number | ({"maximum": 1} if share else {})


def _policies_schema() -> dict[str, Any]:
    """Returns the schema of the ordered policies, by the rules of config/rules.py."""
    text = {"type": "string", "pattern": f"^.{{1,{PATTERN_MAX}}}$"}
    texts = {"type": "array", "minItems": 1, "items": text}
    criteria: dict[str, Any] = dict.fromkeys(Match._fields, texts)
    criteria["mig"] = {"type": "boolean"}
    criteria["labels"] = {"type": "object", "minProperties": 1, "additionalProperties": text}
    criteria["classes"] = {"type": "array", "minItems": 1, "items": {"enum": list(CLASSES)}}
    defaults = Policy()._asdict()
    properties = {
        "name": {"type": "string", "pattern": f"^{NAME}$"},
        "match": {"type": "object", "additionalProperties": False, "properties": criteria},
        **{key: _value_schema("policy", key, defaults[key]) for key in CHANGES},
        "ceiling": {"enum": list(CEILINGS)},
        "exempt": text,
    }
    rule = {"type": "object", "additionalProperties": False, "required": ["name"], "properties": properties}
    return {"type": "array", "maxItems": RULES_MAX, "items": rule}


def build_all() -> dict[Path, str]:
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Configuration file of gpu-exporter (--config.file)",
    }
    return {PATH: json.dumps({**head, **settings_schema()}, indent=2) + "\n"}
