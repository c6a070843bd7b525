"""Copies files that the chart needs into its folder, since a chart can read only its own folder.

The rules keep their parameters (${idle_for}); the chart fills them in from values, with the defaults of alerts.json.
"""

from __future__ import annotations

import json
from pathlib import Path

from alerts.parameters import FIXED

from gpu_exporter.defaults import Alerts
from tools.config_schema import settings_schema
from tools.files import ROOT
from tools.grafana_alerts import render
from tools.rules import SOURCES, build_rules, format_parameter

CHART = ROOT / "helm" / "gpu-exporter"


def alert_defaults() -> dict[str, str]:
    """The parameters of the rules in the notation of a configuration file."""
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
