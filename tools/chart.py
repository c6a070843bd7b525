"""Copies files that the chart needs into its folder, since a chart can read only its own folder.

files/values.yaml has the values themselves, and files/settings.json the rules between settings, so that the chart can
refuse what the programs would refuse. The alert rules keep their parameters (${idle_for}); the chart
fills them in from values, with the defaults of alerts.json.
"""

from __future__ import annotations

import json
from pathlib import Path

import yaml
from alerts.parameters import FIXED

from gpu_exporter.common.config.defaults import DURATIONS, Alerts, Settings
from gpu_exporter.common.config.load import ORDER
from gpu_exporter.common.config.rules import CHANGES, JOB_LISTS, OF_PODS, RULES_MAX, SECTION
from gpu_exporter.common.config.values import LEAST
from gpu_exporter.common.durations import format_duration
from tools.config_schema import settings_schema
from tools.files import ROOT
from tools.grafana_alerts import render
from tools.rules import SOURCES, build_rules, format_parameter

CHART = ROOT / "helm" / "gpu-exporter"


def alert_defaults() -> dict[str, str]:
    """The parameters of the rules in the notation of a configuration file."""
    return {name: format_parameter(name, value) for name, value in Alerts()._asdict().items()}


def check_rules() -> dict[str, object]:
    """What must hold between settings, and the defaults of those settings in the notation of a configuration file."""
    names = {name for each in ORDER for name in (each.low, each.high)} | LEAST.keys()
    rules = [
        {**each._asdict(), "words": f"{each.words}{each.low} (%v) must not be above {each.high} (%v)"} for each in ORDER
    ]
    least = {
        name: {"least": format_duration(value), "why": f"must be at least {format_duration(value)}: {why}"}
        for name, (value, why) in LEAST.items()
    }
    policies = {
        "most": RULES_MAX,
        "section": SECTION,
        "of_pods": OF_PODS,
        "of_jobs": JOB_LISTS,
        "changes": (*CHANGES, "ceiling"),
    }
    return {
        "order": rules,
        "least": least,
        "policies": policies,
        "defaults": {name: _default(name) for name in sorted(names)},
    }


def _default(name: str) -> object:
    section, key = name.split(".")
    value = getattr(getattr(Settings(), section), key)
    return format_duration(value) if name in DURATIONS else value


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
    files[CHART / "files" / "settings.json"] = json.dumps(check_rules(), indent=2) + "\n"
    values = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))
    dumped = yaml.safe_dump(values, sort_keys=False, width=1000)
    files[CHART / "files" / "values.yaml"] = f"# Made from ../values.yaml by tools/chart.py.\n{dumped}"
    schema = json.loads((CHART / "values.schema.json").read_text("utf-8"))
    schema["properties"]["settings"] = settings_schema()
    files[CHART / "values.schema.json"] = json.dumps(schema, indent=2) + "\n"
    return files
