"""Copies of the alerts that Grafana itself evaluates, for sites whose Prometheus may not alert.

    python -m tools.grafana_alerts [--datasource UID]      writes alerts/grafana/gpu-exporter.yaml from alerts/rules

A site loads either these alerts or those of alerts/rules, never both: each incident would be reported twice. The
recordings always remain in Prometheus; the chart then omits the alerts there (prometheusRule.alertsIn: grafana).
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from tools.files import ROOT, write_or_check
from tools.rules import HEADER, RULES, Blocks

PATH = ROOT / "alerts" / "grafana" / "gpu-exporter.yaml"
DATASOURCE = "prometheus"


def render(files: Iterable[str], datasource: str) -> str:
    """A file for Grafana's provisioning/alerting from rules files; `datasource`: UID of the Prometheus."""
    groups = []
    for text in files:
        for group in yaml.safe_load(text)["groups"]:
            if rules := [_convert(rule, datasource) for rule in group["rules"] if "alert" in rule]:
                groups.append(
                    {"orgId": 1, "name": group["name"], "folder": "GPU", "interval": group["interval"], "rules": rules}
                )
    body = yaml.dump({"apiVersion": 1, "groups": groups}, sort_keys=False, width=10_000, Dumper=Blocks)
    return HEADER.format(name="*.yaml").replace("rules.py", "grafana_alerts.py") + body


def read_rules() -> list[str]:
    """The rules files that every site loads."""
    return [path.read_text("utf-8") for path in sorted(RULES.glob("*.yaml"))]


def _convert(rule: Mapping[str, Any], datasource: str) -> dict[str, Any]:
    query = {
        "refId": "A",
        "relativeTimeRange": {"from": 600, "to": 0},
        "datasourceUid": datasource,
        "model": {"refId": "A", "expr": rule["expr"], "instant": True, "range": False},
    }
    # Every row of the query is an alert, even if its value is 0, as in Prometheus.
    condition = {
        "refId": "B",
        "datasourceUid": "__expr__",
        "model": {"refId": "B", "type": "math", "expression": "1 + 0 * $A"},
    }
    return {
        "uid": "gpu-" + hashlib.sha256(rule["alert"].encode()).hexdigest()[:16],
        "title": rule["alert"],
        "condition": "B",
        "data": [query, condition],
        "noDataState": "OK",  # without rows there is no alert
        "execErrState": "KeepLast",  # if Prometheus does not answer, no alert is raised or resolved
        "for": rule.get("for", "0s"),
        "keepFiringFor": rule.get("keep_firing_for", "0s"),
        "labels": dict(rule["labels"]),
        "annotations": {
            name: text.replace("$value", "$values.A.Value")
            for name, text in rule["annotations"].items()
            if " (query " not in text  # Grafana's templates cannot query
        },
    }


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Build Grafana's copies of the alerts.", allow_abbrev=False)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    parser.add_argument("--datasource", default=DATASOURCE, metavar="UID", help=f"default {DATASOURCE}")
    options = parser.parse_args(arguments)
    return write_or_check({PATH: render(read_rules(), options.datasource)}, options.check)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
