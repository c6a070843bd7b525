"""What the chart needs from elsewhere in the project, since a chart can read its own folder only.

The rules keep their parameters (${idle_for}); the chart fills them in from values, with the defaults of alerts.json.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from alerts.parameters import FIXED

from gpu_exporter.config import CHOICES, PATTERNS
from gpu_exporter.defaults import DURATIONS, Alerts, Settings
from tools.files import ROOT
from tools.grafana_alerts import render
from tools.rules import SOURCES, build_rules, format_parameter

CHART = ROOT / "helm" / "gpu-exporter"
DURATION = r"^[0-9]*[1-9][0-9]*(\.[0-9]+)?(ms|s|m|h)$"  # above 0, as the configuration asks
# Below 5m, as tools/rules.py asks.
BELOW_LOOKBACK = r"^([1-9][0-9]{0,4}ms|[1-9][0-9]?s|[12][0-9]{2}s|[1-4]m)$"


def settings_schema() -> dict[str, Any]:
    """JSON Schema of the configuration file: every section and key, nothing else."""
    sections: dict[str, Any] = {}
    for section, values in Settings()._asdict().items():
        keys: dict[str, Any] = {}
        for key, default in values._asdict().items():
            if choices := CHOICES.get(f"{section}.{key}"):
                keys[key] = {"enum": list(choices)}
            elif text := PATTERNS.get(f"{section}.{key}"):
                keys[key] = {"type": "string", "pattern": f"^(?:{text[0]})$"}
            elif f"{section}.{key}" in ("alerts.interval", "alerts.owners_interval"):
                keys[key] = {"type": "string", "pattern": BELOW_LOOKBACK}
            elif f"{section}.{key}" in DURATIONS:
                keys[key] = {"type": "string", "pattern": DURATION}
            else:
                share = isinstance(default, float)  # as in config.check_value: what is no duration and no count
                keys[key] = {"type": "number" if share else "integer", "exclusiveMinimum": 0}
                keys[key] |= {"maximum": 1} if share else {}
        sections[section] = {"type": "object", "additionalProperties": False, "properties": keys}
    return {"type": "object", "additionalProperties": False, "properties": sections}


def alert_defaults() -> dict[str, str]:
    """The parameters of the rules as a configuration file writes them."""
    return {name: format_parameter(name, value) for name, value in Alerts()._asdict().items()}


def build_all() -> dict[Path, str]:
    """Every generated file of the chart."""
    files: dict[Path, str] = {}
    kept = {name: (f"${{{name}}}", f"${{{name}.seconds}}") for name in Alerts._fields}
    parameters = {**kept, **{name: (text, text) for name, text in FIXED.items()}}
    for source in sorted(SOURCES.rglob("*.yaml")):
        name = source.relative_to(SOURCES).as_posix()
        files[CHART / "files" / "rules" / name] = build_rules(source.read_text("utf-8"), parameters, name)
    loaded = [text for path, text in files.items() if path.parent.name == "rules"]
    files[CHART / "files" / "grafana" / "alerts.yaml"] = render(loaded, "${datasource}")
    for dashboard in sorted((ROOT / "grafana" / "dashboards").glob("*.json")):
        files[CHART / "files" / "dashboards" / dashboard.name] = dashboard.read_text("utf-8")
    files[CHART / "files" / "alerts.json"] = json.dumps(alert_defaults(), indent=2) + "\n"
    schema = json.loads((CHART / "values.schema.json").read_text("utf-8"))
    schema["properties"]["settings"] = settings_schema()
    files[CHART / "values.schema.json"] = json.dumps(schema, indent=2) + "\n"
    return files
