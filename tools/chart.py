"""Copies files that the chart needs into the chart's folder, because a chart can read only its own folder.

- files/values.yaml: the values. files/settings.json: rules between settings, so that the chart refuses the same values
  as the programs.
- templates/_durations.tpl: reads and writes durations as common/durations.py does.
- The alert rules keep their parameters (${idle_for}). The chart fills them in from values; alerts.json has the
  defaults.
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
from gpu_exporter.common.durations import LONGEST_S, SECONDS, format_duration
from tools.config_schema import DURATION, PART, UNIT, settings_schema
from tools.files import ROOT
from tools.grafana_alerts import render
from tools.rules import SOURCES, build_rules, format_parameter

CHART = ROOT / "helm" / "gpu-exporter"
UNITS = " ".join(f'"{unit}" {size}' for unit, size in SECONDS.items())
SIZES_MS = [(round(1000 * size), unit) for unit, size in reversed(SECONDS.items()) if size >= 1.0]
WRITTEN = "".join(f"{{{{- else if not (mod $ms {ms}) }}}}{{{{ div $ms {ms} }}}}{unit}\n" for ms, unit in SIZES_MS)
# Values of the chart itself that are durations, "" where the target has a default.
DURATION_VALUES = (
    ("reconciler", "interval", DURATION),
    ("podMonitor", "interval", DURATION),
    ("podMonitor", "scrapeTimeout", f"^$|{DURATION}"),
)
# Braces of the template are not doubled: only @NAME@ is filled in.
DURATIONS_TPL = r"""{{/* Made from common/durations.py by tools/chart.py: do not edit. */}}

{{/* Seconds of a duration such as 90s, 1h30m, 500ms. */}}
{{- define "gpu-exporter.seconds" -}}
{{- $seconds := 0.0 -}}
{{- range regexFindAll "[0-9.]+@UNIT@" . -1 -}}
{{- $unit := regexFind "[a-z]+$" . -}}
{{- $seconds = addf $seconds (mulf (trimSuffix $unit . | float64) (get (dict @UNITS@) $unit)) -}}
{{- end -}}
{{- if eq (floor $seconds) $seconds }}{{ int64 $seconds }}{{ else }}{{ $seconds }}{{ end -}}
{{- end }}

{{/* A duration as one number with its unit: PromQL knows neither 1.5h nor 30m1h. */}}
{{- define "gpu-exporter.duration" -}}
{{- $ms := round (mulf 1000.0 (include "gpu-exporter.seconds" . | float64)) 0 | int64 -}}
{{- if not $ms }}0s
@WRITTEN@{{- else }}{{ $ms }}ms{{ end -}}
{{- end }}

{{- define "gpu-exporter.isDuration" -}}
{{ if regexMatch `^(@PART@)+$` (toString .) }}true{{ end }}
{{- end }}
"""


def alert_defaults() -> dict[str, str]:
    """Returns the parameters of the rules, in the notation of a configuration file."""
    return {name: format_parameter(name, value) for name, value in Alerts()._asdict().items()}


def check_rules() -> dict[str, object]:
    """Returns the rules between settings, and the defaults of these in the notation of a configuration file."""
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
        "longest": LONGEST_S,
        "policies": policies,
        "defaults": {name: _default(name) for name in sorted(names)},
    }


def render_durations() -> str:
    """Returns the template functions for durations, with the same units as in the programs."""
    text = DURATIONS_TPL
    for name, value in (("UNITS", UNITS), ("UNIT", UNIT), ("WRITTEN", WRITTEN), ("PART", PART)):
        text = text.replace(f"@{name}@", value)
    return text


def _default(name: str) -> object:
    section, key = name.split(".")
    value = getattr(getattr(Settings(), section), key)
    return format_duration(value) if name in DURATIONS else value


def build_all() -> dict[Path, str]:
    """Returns every generated file of the chart."""
    files: dict[Path, str] = {}
    kept = {name: (f"${{{name}}}", f"${{{name}.seconds}}") for name in Alerts._fields}
    parameters = {**kept, **{name: (text, text) for name, text in FIXED.items()}}
    for source in sorted(SOURCES.rglob("*.yaml")):
        name = source.relative_to(SOURCES).as_posix()
        files[CHART / "files" / "rules" / name] = build_rules(source.read_text("utf-8"), parameters, name)
    files[CHART / "files" / "grafana" / "alerts.yaml"] = render(parameters, "${datasource}")
    for dashboard in sorted((ROOT / "grafana" / "dashboards").glob("*.json")):
        files[CHART / "files" / "dashboards" / dashboard.name] = dashboard.read_text("utf-8")
    files[CHART / "templates" / "_durations.tpl"] = render_durations()
    files[CHART / "files" / "alerts.json"] = json.dumps(alert_defaults(), indent=2) + "\n"
    files[CHART / "files" / "settings.json"] = json.dumps(check_rules(), indent=2) + "\n"
    values = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))
    dumped = yaml.safe_dump(values, sort_keys=False, width=1000)
    files[CHART / "files" / "values.yaml"] = f"# Made from ../values.yaml by tools/chart.py.\n{dumped}"
    schema = json.loads((CHART / "values.schema.json").read_text("utf-8"))
    schema["properties"]["settings"] = settings_schema()
    for part, key, pattern in DURATION_VALUES:
        schema["properties"][part]["properties"][key]["pattern"] = pattern
    files[CHART / "values.schema.json"] = json.dumps(schema, indent=2) + "\n"
    return files
